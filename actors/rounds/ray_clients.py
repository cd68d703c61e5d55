"""The clients of `airmoe_ray.model.seam` as actors: rounds with whoever is on the roster at the moment."""

import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from actors.errors import Fault
from actors.rounds.ray_round import RayRound
from actors.rounds.roster import Roster, RoundSpec
from airmoe_ray.config import ChannelConfig


class RayClients:
    """Starts rounds with the clients of a roster."""

    def __init__(self, roster: Roster, *, classes: int, call_s: float) -> None:
        self.roster, self.classes, self.call_s = roster, classes, call_s
        self.ends_at = float("inf")
        self.finished: deque[str] = deque(maxlen=32)  # hosts drop these rounds at their next read
        self._turns = itertools.count()
        self._name = f"{time.time_ns():x}"

    def until(self, ends_at: float) -> Self:
        """The same clients for a round that must be over by then (`time.monotonic`)."""
        limited = copy.copy(self)
        limited.ends_at = ends_at
        return limited

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Start a round."""
        return RayRound(self.next_round(ids_B, channel))

    def next_round(self, ids_B: Sequence[int], channel: ChannelConfig) -> RoundSpec:
        """What the next round begins with."""
        turn = next(self._turns)
        return RoundSpec(
            id=f"{self._name}-{turn}",
            roster=self.roster,
            turn=turn,
            ids_B=tuple(ids_B),
            channel=channel,
            classes=self.classes,
            call_s=self.call_s,
            ends_at=self.ends_at,
            finished=tuple(self.finished),
        )


class RecordingClients(RayClients):
    """Clients that remember who failed in any of their rounds."""

    def __init__(self, roster: Roster, *, classes: int, call_s: float) -> None:
        super().__init__(roster, classes=classes, call_s=call_s)
        self.rounds: list[RayRound] = []

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Start a round."""
        self.rounds.append(super().begin(ids_B, channel))
        return self.rounds[-1]

    @property
    def faults(self) -> dict[str, Fault]:
        """By host, of all rounds so far."""
        return {key: fault for round_ in self.rounds for key, fault in round_.faults.items()}


class Begun:
    """Clients whose round has begun already, so that pilots are under way while the cloud computes features."""

    def __init__(self, round_: RayRound) -> None:
        self.round = round_

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Hand out the round that has begun."""
        return self.round

"""The clients of `airmoe_ray.model.seam` as actors: rounds with whoever is on the roster at the moment."""

import copy
import itertools
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from actors.errors import Fault
from actors.rounds.ray_round import RayRound
from actors.rounds.replies import Overdue
from actors.rounds.roster import Roster, RoundSpec
from airmoe_ray.config import ChannelConfig


class RayClients:
    """Starts rounds with the clients of a roster."""

    def __init__(self, roster: Roster, *, classes: int, overdue: Overdue) -> None:
        self.roster, self.classes, self.overdue = roster, classes, overdue
        self.ends_at = float("inf")
        self.tickets_B: tuple[int, ...] | None = None
        self.snr_db_B: tuple[float, ...] | None = None
        self.finished: deque[str] = deque(maxlen=32)  # hosts drop these rounds at their next read
        self._turns = itertools.count()
        self._name = f"{time.time_ns():x}"

    def follow(self, roster: Roster) -> None:
        """Begin later rounds with the clients of this roster."""
        self.roster = roster

    def for_requests(self, tickets_B: tuple[int, ...], snr_db_B: tuple[float, ...], *, ends_at: float) -> Self:
        """The same clients for a round of these requests, which must be over by `ends_at` (`time.monotonic`)."""
        limited = copy.copy(self)
        limited.ends_at, limited.tickets_B, limited.snr_db_B = ends_at, tickets_B, snr_db_B
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
            tickets_B=self.tickets_B or tuple(secrets.randbits(63) for _ in ids_B),
            channel=channel,
            snr_db_B=self.snr_db_B or (channel.snr_db,) * len(ids_B),
            classes=self.classes,
            overdue=self.overdue,
            ends_at=self.ends_at,
            finished=tuple(self.finished),
        )


class RecordingClients(RayClients):
    """Clients that remember who failed in any of their rounds."""

    def __init__(self, roster: Roster, *, classes: int, overdue: Overdue) -> None:
        super().__init__(roster, classes=classes, overdue=overdue)
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
    """Clients whose round has begun already: its maker has given it work to do meanwhile."""

    def __init__(self, round_: RayRound) -> None:
        self.round = round_

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Hand out the round that has begun."""
        return self.round

"""The clients of `airmoe_ray.moe` as actors: rounds with whoever is on the roster at the moment."""

import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from actors.replies import Replies
from actors.roster import Roster
from actors.round import RayRound
from airmoe_ray.config import ChannelConfig

R = TypeVar("R", bound=RayRound)


class RayClients:
    """Starts rounds with whoever is on the roster."""

    def __init__(self, roster: Roster, *, classes: int, call_s: float) -> None:
        self.roster, self.classes, self.call_s = roster, classes, call_s
        self.ends_at = float("inf")
        self.finished: deque[str] = deque(maxlen=32)  # hosts drop these rounds at their next read
        self._turns = itertools.count()
        self._name = f"{time.time_ns():x}"

    def until(self, ends_at: float) -> "RayClients":
        """The same clients for a round that must be over by then (`time.monotonic`)."""
        limited = copy.copy(self)
        limited.ends_at = ends_at
        return limited

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Start a round."""
        return self._begin(RayRound, ids_B, channel)

    def _begin(self, kind: type[R], ids_B: Sequence[int], channel: ChannelConfig) -> R:
        turn = next(self._turns)
        return kind(
            self.roster,
            Replies(self.roster.channel, call_s=self.call_s, ends_at=self.ends_at),
            name=f"{self._name}-{turn}",
            turn=turn,
            ids_B=tuple(ids_B),
            channel=channel,
            classes=self.classes,
            finished=tuple(self.finished),
        )


class Begun:
    """Clients whose round has begun already, so that pilots are under way while the cloud computes features."""

    def __init__(self, round_: RayRound) -> None:
        self.round = round_

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """That round."""
        return self.round

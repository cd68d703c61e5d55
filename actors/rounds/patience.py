"""How long to wait for a client: as long as it usually takes and some more, never longer than configured.

Decisions only: no Ray, no clock. What a call usually takes is estimated as TCP estimates a round trip (RFC 6298):
smoothed mean and deviation, here per unit of work, so that a batch of eight may take eight times as long as one.
A client that missed its time is asked on, but not waited for, until it has answered. Where a host itself has to know
when it is too late, the moment is told on its own clock.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from math import inf

from actors.rounds.fault_policy import Exchange

SLACK_S = 0.4  # hiccups of a healthy machine: whoever answers in 10 ms is late after a few hundred
_TRUSTED = 5  # calls after which an estimate is believed
_MARGIN = 2.0  # of the estimate, on top of its deviation
_MOST_UNANSWERED = 8  # calls that a client may leave unanswered before it is not even asked


@dataclass(frozen=True)
class Usual:
    """What one kind of call usually takes, per unit of work [s]."""

    mean: float = 0.0
    deviation: float = 0.0
    calls: int = 0

    def after(self, seconds: float) -> "Usual":
        """The estimate after one more call."""
        if self.calls == 0:
            return Usual(seconds, seconds / 2, 1)
        deviation = self.deviation + (abs(seconds - self.mean) - self.deviation) / 4
        return Usual(self.mean + (seconds - self.mean) / 8, deviation, self.calls + 1)

    def at_most(self, work: float) -> float:
        """How long a call of so much work takes, with hardly an exception."""
        return _MARGIN * (self.mean + 4 * self.deviation) * work

    @property
    def trusted(self) -> bool:
        """Whether there were enough calls."""
        return self.calls >= _TRUSTED


class Patience:
    """How long each host may take for each exchange; shared by all rounds of a cloud, on whatever thread.

    With a slack as long as the ceiling every call has that time, as in training, where no client is to be left out.
    """

    def __init__(self, ceiling_s: float, *, slack_s: float = SLACK_S) -> None:
        self.ceiling_s, self.slack_s = ceiling_s, min(slack_s, ceiling_s)
        self._usual: dict[tuple[str, Exchange], Usual] = {}
        self._everybody: dict[Exchange, Usual] = {}
        self._unanswered: Counter[str] = Counter()  # calls that were given up, by host
        self._lock = threading.Lock()

    def limit_s(self, key: str, exchange: Exchange, work: float = 1.0) -> float:
        """How long a host may take for a call.

        Until its own estimate is trusted, the estimate over all hosts and twice the slack; before that, the ceiling.
        """
        own = self._usual.get((key, exchange), Usual())
        if own.trusted:
            return min(self.slack_s + own.at_most(work), self.ceiling_s)
        others = self._everybody.get(exchange, Usual())
        return min(2 * self.slack_s + others.at_most(work), self.ceiling_s) if others.trusted else self.ceiling_s

    def stretched_s(self, limit_s: float, half_s: float) -> float:
        """The limit, raised to the slack and three times `half_s`, within which half of the hosts answered.

        Where most hosts are slow, a slow host is not at fault.
        """
        return min(max(limit_s, self.slack_s + 3 * half_s), self.ceiling_s)

    def answered(self, key: str, exchange: Exchange, seconds: float, work: float = 1.0) -> None:
        """Update the estimates with a reply.

        One that came after the limit counts as if it had taken the limit, so that a freeze does not raise later limits.
        """
        seconds = min(seconds, self.limit_s(key, exchange, work)) / work
        with self._lock:
            self._usual[key, exchange] = self._usual.get((key, exchange), Usual()).after(seconds)
            self._everybody[exchange] = self._everybody.get(exchange, Usual()).after(seconds)

    # who is behind

    def gave_up(self, key: str) -> None:
        """A call was not answered in time; it may still be."""
        with self._lock:
            self._unanswered[key] += 1

    def caught_up(self, key: str) -> None:
        """A call that was given up has been answered after all, or has failed."""
        with self._lock:
            self._unanswered[key] = max(self._unanswered[key] - 1, 0)

    def is_behind(self, key: str) -> bool:
        """Whether a host owes an answer: it is not waited for."""
        return self._unanswered[key] > 0

    def may_ask(self, key: str) -> bool:
        """Whether another call would not just lengthen the queue of a host that does not answer."""
        return self._unanswered[key] < _MOST_UNANSWERED

    @property
    def known(self) -> set[str]:
        """Hosts of which anything is known."""
        with self._lock:
            return {key for key, _ in self._usual} | set(self._unanswered)

    def forget(self, key: str) -> None:
        """A host was lost: what its next process takes is not known, and it owes nothing."""
        with self._lock:
            self._unanswered.pop(key, None)
            self._usual = {kept: usual for kept, usual in self._usual.items() if kept[0] != key}


class HostClocks:
    """How far each host's `time.monotonic` is ahead of ours, learned from replies that tell it.

    Monotonic clocks, since those of the wall may be set, and differ by machine.
    """

    def __init__(self) -> None:
        self._ahead: dict[str, tuple[int, float]] = {}  # by host: its process, seconds
        self._lock = threading.Lock()

    def note(self, key: str, process: int, theirs: float, arrived: float) -> None:
        """A reply was made at `theirs` and was here at `arrived`, of our own: the difference is at least as large."""
        with self._lock:
            known, ahead = self._ahead.get(key, (process, -inf))
            self._ahead[key] = (process, max(theirs - arrived, ahead if known == process else -inf))

    def at(self, key: str, ours: float) -> float:
        """What a host's clock shows, or a little later, when ours shows `ours`; never for one that has not told."""
        return ours + self._ahead[key][1] if key in self._ahead else inf

    def forget(self, key: str) -> None:
        """A host has left or was lost: its next process may be on another machine."""
        with self._lock:
            self._ahead.pop(key, None)

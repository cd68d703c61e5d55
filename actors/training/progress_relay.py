"""How work on the cluster shows its progress: a worker's reports wait in an actor until the driver shows them.

Light imports: the relay is a process of its own, and torch would take it seconds.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.rounds.calls import Ref

if TYPE_CHECKING:
    from airmoe_ray.runtime.progress import Reporter

_POLL_S = 0.2


@dataclass(frozen=True)
class Line:
    """A line that stays."""

    text: str


@dataclass(frozen=True)
class Stage:
    """What begins now and may take a while."""

    text: str


@dataclass(frozen=True)
class Bar:
    """A new progress bar."""

    title: str


@dataclass(frozen=True)
class Move:
    """The bar has moved."""

    done: int
    total: int


@dataclass(frozen=True)
class Note:
    """A note beside the bar."""

    text: str


Report = Line | Stage | Bar | Move | Note


class ProgressRelay:
    """Keeps what the first worker reports until the driver takes it, and the error that ended the training."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._error: str | None = None

    def add(self, report: Report) -> None:
        """Keep a report."""
        self._reports.append(report)

    def take(self) -> list[Report]:
        """Hand over all reports."""
        reports, self._reports = self._reports, []
        return reports

    def set_error(self, message: str) -> None:
        """A user's mistake, which ends the training; the first one counts."""
        self._error = self._error or message

    def error(self) -> str | None:
        """The mistake that ended the training, if any did."""
        return self._error


@dataclass(frozen=True)
class RelayCalls:
    """The relay's calls, typed."""

    handle: Any

    @classmethod
    def start(cls) -> Self:
        """A new relay, on the node of whoever shows what arrives: losing another one must not end the training."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        relay: Any = ray.remote(ProgressRelay).options(num_cpus=0, scheduling_strategy=here)
        return cls(relay.remote())

    def add(self, report: Report) -> None:
        """Leave a report; nobody waits for it to arrive."""
        self.handle.add.remote(report)

    def take(self) -> Ref[list[Report]]:
        """Take all reports."""
        return Ref(self.handle.take.remote())

    def set_error(self, message: str) -> Ref[None]:
        """End the training with a user's mistake."""
        return Ref(self.handle.set_error.remote(message))

    def error(self) -> Ref[str | None]:
        """The mistake that ended the training, if any did."""
        return Ref(self.handle.error.remote())


class RelayingReporter:
    """A `Reporter` that writes to a relay, never waits, and does not write more than anyone can read."""

    def __init__(self, relay: RelayCalls) -> None:
        self.relay = relay
        self.last: dict[type[Report], float] = {}

    def line(self, text: str) -> None:
        """Relay a line that stays."""
        self.relay.add(Line(text))

    def stage(self, text: str) -> None:
        """Relay what begins."""
        self.relay.add(Stage(text))

    def progress(self, title: str) -> Callable[[int, int], None]:
        """Relay a bar, and then its moves."""
        self.relay.add(Bar(title))
        self.last.clear()

        def move(done: int, total: int) -> None:
            if done >= total or self._due(Move):
                self.relay.add(Move(done, total))

        return move

    def note(self, text: str) -> None:
        """Relay a note beside the bar."""
        if self._due(Note):
            self.relay.add(Note(text))

    def _due(self, kind: type[Report]) -> bool:
        now = time.monotonic()
        due = now - self.last.get(kind, 0.0) >= _POLL_S
        if due:
            self.last[kind] = now
        return due


def show(relay: RelayCalls, report: "Reporter", *, while_: Callable[[], bool]) -> None:
    """Show what arrives for as long as something may."""
    move: Callable[[int, int], None] | None = None
    more = True
    while more:
        time.sleep(_POLL_S)
        more = while_()
        reports: list[Report] = []
        with contextlib.suppress(GetTimeoutError):
            reports = relay.take().get(timeout_s=10)
        for arrived in reports:
            match arrived:
                case Line(text):
                    report.line(text)
                case Stage(text):
                    report.stage(text)
                case Bar(title):
                    move = report.progress(title)
                case Note(text):
                    report.note(text)
                case Move(done, total) if move is not None:
                    move(done, total)

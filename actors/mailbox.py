"""How work on the cluster shows its progress: a worker posts, the driver collects and shows.

Light imports: the mailbox is a process of its own, and torch would take it seconds.
"""

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from airmoe_ray.reporter import Reporter

_POLL_S = 0.2


class Mailbox:
    """What the first worker reports, until the driver shows it."""

    def __init__(self) -> None:
        self.letters: list[tuple[Any, ...]] = []
        self.complaint: str | None = None

    def post(self, letter: tuple[Any, ...]) -> None:
        """Leave a report."""
        self.letters.append(letter)

    def complain(self, message: str) -> None:
        """A user's mistake, which ends the training; the first one counts."""
        self.complaint = self.complaint or message

    def complaint_of_worker(self) -> str | None:
        """What a worker complained about, if any did."""
        return self.complaint

    def collect(self) -> list[tuple[Any, ...]]:
        """Take all reports."""
        letters, self.letters = self.letters, []
        return letters


class PostingReporter:
    """A `Reporter` that writes to a mailbox, never waits, and does not write more than anyone can read."""

    def __init__(self, mailbox: Any) -> None:
        self.mailbox = mailbox
        self.last: dict[str, float] = {}

    def line(self, text: str) -> None:
        """A line that stays."""
        self.mailbox.post.remote(("line", text))

    def progress(self, title: str) -> Callable[[int, int], None]:
        """A bar."""
        self.mailbox.post.remote(("bar", title))
        self.last.clear()

        def move(done: int, total: int) -> None:
            if done >= total or self._due("move"):
                self.mailbox.post.remote(("move", done, total))

        return move

    def note(self, text: str) -> None:
        """A note beside the bar."""
        if self._due("note"):
            self.mailbox.post.remote(("note", text))

    def _due(self, kind: str) -> bool:
        now = time.monotonic()
        due = now - self.last.get(kind, 0.0) >= _POLL_S
        if due:
            self.last[kind] = now
        return due


def show(mailbox: Any, report: "Reporter", *, while_: Callable[[], bool]) -> None:
    """Show what arrives for as long as something may."""
    move: Callable[[int, int], None] | None = None
    more = True
    while more:
        time.sleep(_POLL_S)
        more = while_()
        letters: list[tuple[Any, ...]] = []
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            letters = ray.get(mailbox.collect.remote(), timeout=10)
        for kind, *content in letters:
            if kind == "line":
                report.line(*content)
            elif kind == "bar":
                move = report.progress(*content)
            elif kind == "note":
                report.note(*content)
            elif move is not None:
                move(*content)

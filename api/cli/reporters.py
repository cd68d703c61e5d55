"""How a command shows its progress on stderr: bars on a terminal, lines in a pipe or a file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from airmoe_ray.runtime.progress import Reporter
from api.cli.common import stderr

_LINE_EVERY_S = 10.0  # where nobody sees a bar


class ClosableReporter(Reporter, Protocol):
    """A reporter of a command that may go on after there is nothing left to report."""

    def close(self) -> None:
        """Take down what moves; lines may still follow."""
        ...


class TerminalReporter:
    """Progress bars with ETA that vanish when done, and lines that stay."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.current: TaskID | None = None  # a bar, or the stage that has none yet
        self.moving = False  # it is a bar

    def line(self, text: str) -> None:
        """One line that stays."""
        _print_line(self.bars.console, text)

    def stage(self, text: str) -> None:
        """A bar without an end, until the next stage or the first step of a real one."""
        self._show(text, total=None)

    def progress(self, title: str) -> Callable[[int, int], None]:
        """A bar; it shows up with its first step, so work found in a cache shows nothing."""
        if self.moving:
            self._finish()

        def move(done: int, total: int) -> None:
            if not self.moving:
                self._show(title, total=total)
            self.bars.update(self._task(), completed=done)
            if done >= total:
                self._finish()

        return move

    def note(self, text: str) -> None:
        """A live note beside the bar."""
        if self.moving:
            self.bars.update(self._task(), note=text)

    def close(self) -> None:
        """No bars from now on."""
        self._finish()
        self.bars.stop()

    def _show(self, title: str, *, total: int | None) -> None:
        self._finish()
        self.current, self.moving = self.bars.add_task(title, total=total, note=""), total is not None

    def _task(self) -> TaskID:
        assert self.current is not None, "what moves is shown"
        return self.current

    def _finish(self) -> None:
        if self.current is not None:
            self.bars.remove_task(self.current)
        self.current, self.moving = None, False


class LineReporter:
    """For pipes and files: a line for what begins, and another now and then for as long as it takes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.told_at = time.monotonic()
        self.beside = ""

    def line(self, text: str) -> None:
        """One line."""
        _print_line(self.console, text)
        self.told_at = time.monotonic()

    def stage(self, text: str) -> None:
        """A line like any other."""
        self.line(text)

    def progress(self, title: str) -> Callable[[int, int], None]:
        """Lines with what is done and the time that is left, unless another line has just been written."""
        first: tuple[int, float] | None = None
        self.beside = ""

        def move(done: int, total: int) -> None:
            nonlocal first
            now = time.monotonic()
            first = first or (done, now)
            if done >= total or now - self.told_at < _LINE_EVERY_S:
                return
            moved, seconds = done - first[0], now - first[1]
            left = f", {timedelta(seconds=round(seconds * (total - done) / moved))} left" if moved else ""
            self.line(f"{title}: {done} of {total}{left}  {self.beside}".rstrip())

        return move

    def note(self, text: str) -> None:
        """Part of the next line about this work."""
        self.beside = text

    def close(self) -> None:
        """Nothing moves here."""


def _print_line(console: Console, text: str) -> None:
    encoding = console.encoding  # not every terminal knows the blocks of the expert load
    console.print(text.encode(encoding, "replace").decode(encoding), soft_wrap=True, markup=False)


class _Count(MofNCompleteColumn):
    """Nothing where nobody knows how much there is."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


@contextmanager
def reporting() -> Iterator[ClosableReporter]:
    """Progress on stderr for the duration of a command: bars where they can be seen, else lines."""
    if not stderr.is_interactive:
        yield LineReporter(stderr)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        _Count(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=stderr, transient=True) as bars:
        yield TerminalReporter(bars)

"""Where long work says how far it is."""

from collections.abc import Callable
from typing import Protocol

Progress = Callable[[int, int], None]  # done, total


class Reporter(Protocol):
    """Where progress goes; the command line draws bars or writes lines, tests stay silent."""

    def line(self, text: str) -> None:
        """One line that stays."""
        ...

    def stage(self, text: str) -> None:
        """What begins now and may take a while."""
        ...

    def progress(self, title: str) -> Progress:
        """A bar; the returned function moves it to (done, total)."""
        ...

    def note(self, text: str) -> None:
        """A live note beside the bar."""
        ...


class Silent:
    """No output."""

    def line(self, text: str) -> None:
        """Say nothing."""

    def stage(self, text: str) -> None:
        """Say nothing."""

    def progress(self, title: str) -> Progress:
        """Say nothing."""
        return lambda done, total: None

    def note(self, text: str) -> None:
        """Say nothing."""

"""Where long work says how far it is."""

from typing import Protocol

from airmoe_ray.features import Progress


class Reporter(Protocol):
    """Where progress goes; the command line draws bars, tests stay silent."""

    def line(self, text: str) -> None:
        """One line that stays."""
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
        """Nothing."""

    def progress(self, title: str) -> Progress:
        """Nothing."""
        return lambda done, total: None

    def note(self, text: str) -> None:
        """Nothing."""

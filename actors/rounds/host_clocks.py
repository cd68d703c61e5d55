"""What the clock of each host shows: a monotonic one, since that of the wall may be set, and differs by machine."""

import threading
from math import inf


class HostClocks:
    """How far each host's `time.monotonic` is ahead of ours, learned from replies that tell it."""

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

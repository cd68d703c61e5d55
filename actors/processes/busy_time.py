"""How long a process has been at work, whichever of its threads was."""

import threading
import time
from collections.abc import Callable


class BusyTime:
    """Seconds in which at least one block `with busy:` was under way; two at once count once.

    A share of time made of it is never above 1, however many threads there are.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0  # when the first of those under way began
        self._seconds = 0.0  # of those that are over

    def __enter__(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = self._clock()
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._seconds += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Until now, work under way included."""
        with self._lock:
            return self._seconds + (self._clock() - self._since if self._under_way else 0.0)

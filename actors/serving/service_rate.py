"""How many images per second come out while there is work, and so how many may wait: without a clock."""

_KEPT = 0.9  # of what was counted before, with each batch
_LATEST_S = 10.0  # longest `Retry-After`
_SHARE = 0.5  # of a deadline that a queue may fill: all are in time on a machine that becomes half as fast meanwhile


class ServiceRate:
    """Images per second of busy time, over the last ten batches or so. All times are of one clock [s]."""

    def __init__(self) -> None:
        self._images = self._seconds = 0.0
        self._since = 0.0  # when work began, or the last batch ended

    def begun(self, now: float) -> None:
        """Work begins after a time without any."""
        self._since = now

    def done(self, images: int, now: float) -> None:
        """A batch came out."""
        self._images = _KEPT * self._images + images
        self._seconds = _KEPT * self._seconds + max(now - self._since, 0.0)
        self._since = now

    def wait_s(self, ahead: int) -> float:
        """How long an image waits for its answer with so many before it; 0 while nothing is known."""
        return (ahead + 1) * self._seconds / self._images if self._images else 0.0

    def again_s(self, ahead: int) -> float:
        """When it is worth asking again: half of those before are answered by then, so that work does not run out."""
        return min(max(self.wait_s(ahead) / 2, 1.0), _LATEST_S)

    def has_room(self, ahead: int, time_s: float) -> bool:
        """Whether one more image would be answered within `time_s`; the first is always tried."""
        return ahead == 0 or self.wait_s(ahead) <= _SHARE * time_s

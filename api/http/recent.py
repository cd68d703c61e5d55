"""Figures over the last images: rate, latency, how many were degraded, channel error."""

import math
import time
from collections import deque
from dataclasses import dataclass

from actors.serving.results import ImageResult

_KEPT = 1000  # images
_RATE_S = 10  # the rate is of this many seconds


@dataclass(frozen=True)
class _Image:
    at: float  # time.monotonic
    seconds: float
    degraded: bool
    nmse: float


class RecentImages:
    """Keeps what the figures need of the last 1000 images."""

    def __init__(self) -> None:
        self._images: deque[_Image] = deque(maxlen=_KEPT)

    def add(self, result: ImageResult, *, seconds: float) -> None:
        """Remember an image that took `seconds` from arrival to result."""
        self._images.append(_Image(time.monotonic(), seconds, result.degraded, result.nmse))

    def requests_per_second(self) -> float:
        """Images finished in the last ten seconds, per second."""
        now = time.monotonic()
        return sum(now - image.at < _RATE_S for image in self._images) / _RATE_S

    def latency_ms(self) -> dict[str, float | None]:
        """Median and 95 % quantile of the time from arrival to result; None before the first image."""
        ordered = sorted(image.seconds for image in self._images)
        return {"p50": _quantile_ms(ordered, 0.5), "p95": _quantile_ms(ordered, 0.95)}

    def degraded_share(self) -> float | None:
        """Degraded images over all; None before the first."""
        return sum(image.degraded for image in self._images) / len(self._images) if self._images else None

    def nmse_db(self) -> float | None:
        """Mean channel error [dB] of the images that met one; None if none did."""
        noise = [image.nmse for image in self._images if image.nmse > 0]
        return 10 * math.log10(sum(noise) / len(noise)) if noise else None


def _quantile_ms(ordered: list[float], share: float) -> float | None:
    return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None

"""How many instances an expert should have: by imbalance, by how busy its instances are, and by who waits.

A decision without Ray and without a clock; the supervisor measures and acts.
"""

from dataclasses import dataclass

_COMFORT = 0.7  # of a threshold: below it an instance fewer will do, and the gap keeps them from coming and going


@dataclass(frozen=True)
class Pressure:
    """What an expert has to bear."""

    load: float  # windowed routing load over the fair share; at most N / K
    busy: float  # share of their time that its instances work, mean over them
    waiting: bool  # whether more images wait than a batch takes


def hot_load(configured: float, *, clients: int, routed: int) -> float:
    """Load above which an expert is hot: as configured, but never more than can happen.

    K of N clients answer an image, so a load is N / K of fair at most; halfway there is hot.
    """
    return min(configured, (1 + clients / max(routed, 1)) / 2)


def replicas_wanted(pressure: Pressure, *, hot_load: float, hot_busy: float, most: int, current: int) -> int:
    """One instance more where those there are hot, one less where the rest could bear it comfortably.

    Requests that wait halve the limit of busy time. Where nobody is busy they wait for something else, which more
    instances of experts would not mend.
    """
    limit = hot_busy / 2 if pressure.waiting else hot_busy
    if pressure.load > hot_load * current or pressure.busy > limit:
        return max(min(current + 1, most), 1)
    if current > 1:
        fewer = current - 1
        if pressure.load < _COMFORT * hot_load * fewer and pressure.busy * current < _COMFORT * limit * fewer:
            return fewer
    return current


class BusyMeter:
    """From working seconds that only grow to the share of time that was work, by host."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}  # clock and working seconds when last looked at
        self.share: dict[str, float] = {}

    def note(self, host: str, busy_s: float, now: float) -> None:
        """Take in a host's working seconds; one that began anew counts from there."""
        before, worked = self._seen.get(host, (now, busy_s))
        self._seen[host] = (now, busy_s)
        if now > before and busy_s >= worked:
            self.share[host] = min((busy_s - worked) / (now - before), 1.0)

    def forget_all_but(self, hosts: set[str]) -> None:
        """Drop hosts that are gone."""
        for host in self._seen.keys() - hosts:
            del self._seen[host]
            self.share.pop(host, None)

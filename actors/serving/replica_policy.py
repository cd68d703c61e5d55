"""How many hosts a client should have: by its load, by how busy its hosts are, and by whether requests wait.

A decision without Ray and without a clock; the supervisor measures and acts.
"""

from dataclasses import dataclass

_COMFORT = 0.7  # share of a limit that one host fewer must stay below; the gap keeps hosts from being added and removed


@dataclass(frozen=True)
class Pressure:
    """How much work an expert has."""

    load: float  # windowed routing load over the fair share; at most N / K
    busy: float  # share of their time that its hosts work, mean over them
    waiting: bool  # whether more images wait than a batch takes


def hot_load(configured: float, *, clients: int, routed: int) -> float:
    """Load above which an expert is hot: as configured, but never more than can happen.

    K of N clients answer an image, so a load is N / K of fair at most; halfway there is hot.
    """
    return min(configured, (1 + clients / max(routed, 1)) / 2)


def replicas_wanted(pressure: Pressure, *, hot_load: float, hot_busy: float, most: int, current: int) -> int:
    """Number of hosts: one more where load or busy time is over its limit, one fewer where both would stay well below.

    While requests wait, the limit of busy time is halved. It still has to be exceeded: requests that wait while hosts
    are idle wait for something else, and more replicas would not help.
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

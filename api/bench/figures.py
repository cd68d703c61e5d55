"""What a measurement is, and how two are compared."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Note = Callable[[str], None]
"""Says what begins."""


@dataclass(frozen=True)
class Figure:
    """One result: the median over rounds, its spread, and whether it meets its target."""

    value: float
    unit: str
    target: float
    better: Literal["higher", "lower"]
    rounds: tuple[float, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{value, unit, target, pass}` and what else is known."""
        met = self.value >= self.target if self.better == "higher" else self.value <= self.target
        sign = ">=" if self.better == "higher" else "<="
        return {
            "value": round(self.value, 4),
            "unit": self.unit,
            "target": f"{sign} {self.target:g}",
            "pass": met,
            "spread": [round(min(self.rounds), 4), round(max(self.rounds), 4)] if self.rounds else None,
            **self.detail,
        }


def by_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Both measurements in every round, the order changing, so that neither has the better minutes."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            b = second()
            pairs.append((first(), b))
        else:
            a = first()
            pairs.append((a, second()))
    return pairs


def ratio(
    pairs: Sequence[tuple[float, float]], *, target: float, better: Literal["higher", "lower"], **detail: Any
) -> Figure:
    """Median over rounds of first over second."""
    values = tuple(a / b for a, b in pairs)
    return Figure(statistics.median(values), "ratio", target, better, values, detail)


def rate(work: Callable[[], int], seconds: float) -> float:
    """Items per second of repeated `work`, which says how many it did."""
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        done += work()
    return done / elapsed


def median_ms(work: Callable[[], Any], seconds: float) -> float:
    """Median time of one call [ms]."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)

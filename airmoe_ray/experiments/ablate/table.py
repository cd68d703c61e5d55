"""Tables of sweeps: scores with intervals, what the setting is meant to move, and the paper's figures beside them."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airmoe_ray.experiments.ablate.sweeps import MOVED, Sweep
from airmoe_ray.experiments.compare.channels import OWN
from airmoe_ray.experiments.compare.records import Record
from airmoe_ray.experiments.compare.statistics import METRICS, Difference, Estimate, estimate, holm, over_seeds, paired
from airmoe_ray.experiments.compare.table import TWO_MODELS, blocks_of, told

_SURE = 0.05


@dataclass(frozen=True)
class Point:
    """One value of a sweep."""

    value: Any
    scores: dict[str, Estimate]
    moved: dict[str, Estimate]
    against_first: Difference | None  # mIoU less that of the sweep's first value, on the same images and seeds
    paper: tuple[float | None, ...] | None
    commits: list[str]


def swept_channel(record: Record) -> str:
    """What a sweep is judged on: the run's own channel, which is 20 dB air unless it was set."""
    return OWN if OWN in record.scores else "air"


def points_of(sweep: Sweep, runs: dict[Any, list[Record]]) -> list[Point]:
    """The values that have runs, in the sweep's order; `runs` are those of each value, by seed."""
    done = [value for value in sweep.values if runs.get(value)]
    first = runs[done[0]] if done else []
    return [_point(sweep, value, runs[value], first) for value in done]


def _point(sweep: Sweep, value: Any, records: Sequence[Record], first: Sequence[Record]) -> Point:
    counts, blocks = [record.counts(swept_channel(record)) for record in records], blocks_of([[records[0]]])
    common = {r.seed for r in records} & {r.seed for r in first}
    ours, theirs = ([r.counts(swept_channel(r)) for r in some if r.seed in common] for some in (first, records))
    printed = sweep.paper.rows.get(value) if sweep.paper else None
    return Point(
        value,
        {metric: estimate(counts, metric, blocks=blocks) for metric in METRICS},
        {name: over_seeds([_moved(record, name) for record in records]) for name in sweep.moves},
        paired(ours, theirs, blocks=blocks) if common and records is not first else None,
        printed,
        sorted({record.commit for record in records}),
    )


def _moved(record: Record, name: str) -> float:
    if name == "prototype_norm":
        return record.prototypes.get("norm", math.nan)
    found = record.scores[swept_channel(record)].get("routing", {}).get(name)
    return math.nan if found is None else float(found)


def verdict(sweep: Sweep, points: Sequence[Point]) -> str:
    """Whether any value differs from the first one, and if not, why."""
    judged = [(point.value, point.against_first) for point in points if point.against_first is not None]
    if not judged:
        return ""
    corrected = holm([gap.p for _, gap in judged])
    p, (value, surest) = min(zip(corrected, judged, strict=True), key=lambda each: (each[0], each[1][1].p))
    pairs = f"{len(judged)} pair{'s' if len(judged) > 1 else ''}, Holm's correction"
    only = f"; one seed: of {TWO_MODELS}" if surest.seeds == 1 else ""
    if p < _SURE:
        return (
            f"{sweep.key} = {value} differs from {points[0].value} by {surest.mean:+.2f} mIoU "
            f"[{surest.low:+.2f}, {surest.high:+.2f}], p {p:.3f} ({pairs}{only})."
        )
    why = f" {sweep.if_flat}" if sweep.if_flat else ""
    return f"Flat: no value is shown to differ from {points[0].value} (smallest p {p:.2f}; {pairs}{only}).{why}"


def as_markdown(
    sweeps: Sequence[tuple[Sweep, list[Point]]], *, title: str, about: Sequence[str], remarks: Mapping[str, str]
) -> str:
    """All sweeps on a page; `about` the model and its channel, `remarks` by the key of a sweep."""
    notes = [
        *about,
        "The last epoch is scored. Intervals are 95 %: Student's t over seeds, and, with a *, a bootstrap over images",
        "of a single seed. The paper's figures are of Cityscapes and not of this data.",
    ]
    lines = [f"# {title}", "", *notes, ""]
    for sweep, points in sweeps:
        table = f", the paper's Table {sweep.paper.table}" if sweep.paper else ""
        lines += [f"## {sweep.short} (`{sweep.key}`){table}", ""]
        heads = ["value", "mIoU", "mF1", "mPre", "mRec", *(MOVED[name] for name in sweep.moves)]
        heads += ["paper, mIoU / mF1 / mPre / mRec"] if sweep.paper else []
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for point in points:
            cells = [str(point.value), *(told(point.scores[metric]) for metric in METRICS)]
            cells += [_short(point.moved[name]) for name in sweep.moves]
            if sweep.paper:
                cells.append(
                    "" if point.paper is None else " / ".join(f"{x:.2f}" for x in point.paper if x is not None)
                )
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", verdict(sweep, points), *([remarks[sweep.key]] if sweep.key in remarks else []), ""]
    return "\n".join(lines)


def as_csv(sweeps: Sequence[tuple[Sweep, list[Point]]]) -> str:
    """One line per value and figure."""
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["setting", "value", "figure", "mean", "low", "high", "seeds", "paper", "commits"])
    for sweep, points in sweeps:
        for point in points:
            printed = dict(zip(METRICS, point.paper or (), strict=False))
            for name, found in {**point.scores, **point.moved}.items():
                numbers = [f"{x:.5g}" for x in (found.mean, found.low, found.high)]
                about = [found.seeds, printed.get(name, ""), " ".join(point.commits)]
                writer.writerow([sweep.key, point.value, name, *numbers, *about])
    return stream.getvalue()


def _short(found: Estimate) -> str:
    if math.isnan(found.mean):
        return "-"
    half = "" if math.isnan(found.low) else f" ± {(found.high - found.low) / 2:.2g}"
    return f"{found.mean:.4g}{half}"

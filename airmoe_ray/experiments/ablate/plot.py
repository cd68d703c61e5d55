"""Sweeps as pictures: how mIoU changes with the setting, ours and the paper's, and what the setting moves."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airmoe_ray.experiments.ablate.sweeps import MOVED, Sweep
from airmoe_ray.experiments.ablate.table import Point
from airmoe_ray.experiments.plotting import COLOURS, picture


def draw_sweeps(sweeps: Sequence[tuple[Sweep, list[Point]]], path: Path) -> None:
    """A column per sweep: above, mIoU less that of the first value; below, the first figure that it should move.

    Levels of two datasets have nothing to say to each other, changes have.
    """
    with picture(path, width=max(2.6 * len(sweeps), 3.4), height=4.6) as figure:
        panels = figure.subplots(2, len(sweeps), squeeze=False)
        for column, (sweep, points) in enumerate(sweeps):
            places, names = list(range(len(points))), [_name(point.value) for point in points]
            _draw_change(panels[0][column], places, points)
            _draw_moved(panels[1][column], places, points, sweep)
            for axes in panels[:, column]:
                axes.set_xticks(places, names)
                axes.set_xlim(-0.4, len(points) - 0.6)
                axes.grid(True)
            panels[1][column].set_xlabel(sweep.short)
        panels[0][0].set_ylabel("mIoU less that of the first value")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2)


def _name(value: Any) -> str:
    """Short enough for an axis: 8e-4 rather than 0.0008."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _draw_change(axes: Any, places: list[int], points: Sequence[Point]) -> None:
    changes = [0.0 if point.against_first is None else point.against_first.mean for point in points]
    gaps = [point.against_first for point in points]
    below = [0.0 if gap is None else max(gap.mean - gap.low, 0) for gap in gaps]
    above = [0.0 if gap is None else max(gap.high - gap.mean, 0) for gap in gaps]
    axes.errorbar(
        places, changes, yerr=[below, above], color=COLOURS[1], marker="o", markersize=4, capsize=3, label="ours, 95 %"
    )
    printed = [point.paper[0] if point.paper else None for point in points]
    if printed and None not in printed:
        first = printed[0] or 0.0
        lines = [(value or 0.0) - first for value in printed]
        axes.plot(
            places, lines, color=COLOURS[4], linestyle="--", marker="s", markersize=3.5, label="paper, Cityscapes"
        )
    axes.axhline(0, color="#888888", linewidth=0.6)


def _draw_moved(axes: Any, places: list[int], points: Sequence[Point], sweep: Sweep) -> None:
    name = sweep.moves[0] if sweep.moves else None
    if name is None:
        axes.set_axis_off()
        return
    means = [point.moved[name].mean for point in points]
    halves = [
        0.0 if math.isnan(point.moved[name].low) else point.moved[name].high - point.moved[name].mean
        for point in points
    ]
    axes.errorbar(places, means, yerr=halves, color=COLOURS[2], marker="^", markersize=4, capsize=3)
    axes.set_ylabel(MOVED[name])

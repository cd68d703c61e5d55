"""Convergence: mIoU and mF1 per epoch of every method, the paper's Fig. 4.

Suffixes: U seeds, E epochs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.baselines.method import Method
from airmoe_ray.experiments.compare.table import Seeds
from airmoe_ray.experiments.plotting import COLOURS, DASHES, picture

_MARKERS = "os^vDPX*<>"


def draw_curves(methods: Sequence[Method], rows: Mapping[str, Seeds], path: Path) -> bool:
    """Mean over seeds, with the range of seeds behind it; False where no run was validated while it trained."""
    shown = [method for method in methods if method.key in rows and _curves(rows[method.key], "miou").size]
    if not shown:
        return False
    with picture(path, width=10.2, height=3.4 + 0.12 * max(len(shown) - 14, 0)) as figure:
        panels = figure.subplots(1, 2)
        for axes, metric, name in zip(panels, ("miou", "mf1"), ("mIoU", "mF1"), strict=True):
            for number, method in enumerate(shown):
                curves_UE = _curves(rows[method.key], metric)
                epochs = np.arange(1, curves_UE.shape[1] + 1)
                colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
                marker = _MARKERS[number % len(_MARKERS)]
                mean_E = curves_UE.mean(axis=0)
                axes.plot(epochs, mean_E, color=colour, linestyle=dash, marker=marker, markersize=3, label=method.label)
                if len(curves_UE) > 1:
                    low_E, high_E = curves_UE.min(axis=0), curves_UE.max(axis=0)
                    axes.fill_between(epochs, low_E, high_E, color=colour, alpha=0.12, linewidth=0)
            axes.set_xlabel("epoch")
            axes.set_ylabel(f"{name} on held-out images [%]")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlim(0.5, axes.get_xlim()[1] + 0.5)
            axes.grid(True)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", handlelength=3)
    return True


def _curves(seeds: Seeds, metric: str) -> NDArray[np.float64]:
    """(runs, epochs); empty where some run lacks the metric or an epoch."""
    curves = [[row.get(metric) for row in record.curve] for folds in seeds for record in folds]
    if any(None in curve or not curve for curve in curves) or len({len(curve) for curve in curves}) > 1:
        return np.empty((0, 0))
    return np.array(curves, dtype=np.float64)

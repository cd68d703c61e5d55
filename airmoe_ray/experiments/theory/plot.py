"""The six panels as one picture."""

from pathlib import Path
from typing import Any

from airmoe_ray.experiments.plotting import COLOURS, DASHES, picture
from airmoe_ray.experiments.theory.panels import Curve, Panel

# where each panel has room
_LEGENDS = {
    "a": "lower left",
    "b": "upper left",
    "c": "upper right",
    "d": "upper left",
    "e": "upper right",
    "f": "lower left",
}


def draw(panels: list[Panel], path: Path) -> None:
    """Write the picture as PNG."""
    with picture(path, width=10.2, height=6.0) as figure:
        for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
            _draw_panel(axes, panel)


def _draw_panel(axes: Any, panel: Panel) -> None:
    axes.set_yscale("log")
    if panel.x_log:
        axes.set_xscale("log")
    lines = sum(curve.kind == "formula" for curve in panel.curves)
    for number, curve in enumerate(panel.curves):
        _draw_curve(axes, panel, curve, number if lines > 3 else number + 1)
    if panel.target is not None:
        axes.axhline(panel.target, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            rf"target $\epsilon$ = {panel.target:g}",
            (0.985, panel.target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=6.5,
            color="#555555",
        )
    axes.set_title(f"({panel.key}) {panel.title}", loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _limit(axes, panel)
    axes.grid(True, which="major")
    axes.tick_params(which="both", direction="in", top=True, right=True)
    axes.legend(loc=_LEGENDS[panel.key], handlelength=2.6)


def _draw_curve(axes: Any, panel: Panel, curve: Curve, number: int) -> None:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    heights = [float("nan") if y is None else y for y in curve.y]
    if curve.kind == "measured":
        axes.plot(curve.x, heights, "o", markersize=4, color=COLOURS[4], label=curve.label)
        return
    if curve.kind == "own bound":
        axes.plot(curve.x, heights, "-", marker="s", markersize=3, color=COLOURS[5], label=curve.label)
        return
    axes.plot(curve.x, heights, linestyle=dash, color=colour, label=curve.label)
    if curve.asymptote is not None:
        line = axes.axhline if panel.key == "f" else axes.axvline
        line(curve.asymptote, color=colour, linewidth=0.7, linestyle=(0, (1, 2)))


def _limit(axes: Any, panel: Panel) -> None:
    """T is cut some decades above where curves begin: at an asymptote it has no end."""
    heights = [y for curve in panel.curves for y in curve.y if y is not None]
    widths = [x for curve in panel.curves for x in curve.x]
    axes.set_xlim(min(widths), max(widths))
    if panel.key in "abcd" and heights:
        top = min(heights) * (1e12 if panel.key == "a" else 1e7)
        axes.set_ylim(min(heights) / 3, top)
    if panel.key == "e":
        axes.set_ylim(min(heights) / 30, max(heights) * 1e5)

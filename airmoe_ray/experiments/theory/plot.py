"""The six panels as one picture."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from airmoe_ray.errors import UserError
from airmoe_ray.experiments.theory.panels import Curve, Panel

# Okabe and Ito's colours, told apart by colour-blind eyes; yellow is left out, as white paper swallows it
_COLOURS = ("#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
_STYLE: Any = {
    "font.family": "serif",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 6.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "grid.linewidth": 0.3,
    "grid.color": "#cccccc",
    "legend.framealpha": 1.0,
    "legend.edgecolor": "#cccccc",
}


# where each panel has room
_LEGENDS = {
    "a": "lower left",
    "b": "upper left",
    "c": "upper right",
    "d": "upper left",
    "e": "upper right",
    "f": "lower left",
}


def require_matplotlib() -> None:
    """Say what is missing before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "the picture needs matplotlib, which is not installed; pip install 'airmoe-ray[experiments]'"
        ) from None


def draw(panels: list[Panel], path: Path) -> None:
    """Write the picture as PNG; no display is needed, and nothing global is changed."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10.2, 6.0), layout="constrained", dpi=160)
        canvas: Any = FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
            _draw_panel(axes, panel)
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.08, h_pad=0.08)
        canvas.draw()
        # a line drawing has few colours: a palette makes the file a quarter as large
        Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).quantize(128).save(path, format="PNG", optimize=True)


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
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    heights = [float("nan") if y is None else y for y in curve.y]
    if curve.kind == "measured":
        axes.plot(curve.x, heights, "o", markersize=4, color=_COLOURS[4], label=curve.label)
        return
    if curve.kind == "own bound":
        axes.plot(curve.x, heights, "-", marker="s", markersize=3, color=_COLOURS[5], label=curve.label)
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

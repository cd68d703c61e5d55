"""What all pictures of experiments share: colours, a paper's style, and how they are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from airmoe_ray.errors import UserError

# Okabe and Ito's colours, told apart by colour-blind eyes; yellow is left out, as white paper swallows it
COLOURS = ("#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
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


def require_matplotlib() -> None:
    """Say what is missing before any work is done."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "the picture needs matplotlib, which is not installed; pip install 'airmoe-ray[experiments]'"
        ) from None


@contextmanager
def picture(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """A figure to draw on, written as PNG at the end; no display is needed, and nothing global is changed."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=160)
        canvas: Any = FigureCanvasAgg(figure)
        yield figure
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.08, h_pad=0.08)
        canvas.draw()
        # a line drawing has few colours: a palette makes the file a quarter as large
        Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).quantize(128).save(path, format="PNG", optimize=True)

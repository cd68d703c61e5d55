"""AirMoE: statistic-augmented over-the-air mixture of experts, whole and in one process.

Follow one image: `moe.py` reads like the paper's algorithm box and calls everything else.
"""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

# what people import from here, and where it lives; imported when it is asked for, so that `import airmoe_ray` is light
_PUBLIC = {
    "Segmenter": "airmoe_ray.inference.segmenter",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

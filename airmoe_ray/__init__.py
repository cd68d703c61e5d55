"""AirMoE: statistic-augmented over-the-air mixture of experts, whole and in one process.

Follow one image: `moe.py` reads like the paper's algorithm box and calls everything else. The names in `_PUBLIC` can be
imported from here; their modules are imported when they are first used, so that this import stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airmoe_ray.client import AsyncClient as AsyncClient
    from airmoe_ray.client import Client as Client
    from airmoe_ray.client import ServerError as ServerError
    from airmoe_ray.inference.segmenter import Segmenter as Segmenter

__version__ = "0.4.0"

# what people import from here, and where it lives
_PUBLIC = {
    "AsyncClient": "airmoe_ray.client",
    "Client": "airmoe_ray.client",
    "Segmenter": "airmoe_ray.inference.segmenter",
    "ServerError": "airmoe_ray.client",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})

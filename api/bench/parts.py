"""The parts of the bench, by name; each gives some figures."""

from collections.abc import Callable
from pathlib import Path

from api.bench.figures import Figure
from api.bench.life import life_figures
from api.bench.overhead import overhead_figures
from api.bench.overload import overload_figures
from api.bench.packed import packed_figures
from api.bench.peers.flower import flower_figures
from api.bench.peers.serve import serve_figures
from api.bench.requests import mixed_figures, photo_figures
from api.bench.serving import serving_figures
from api.bench.single.model import model_figures
from api.bench.training import training_figures

PARTS: dict[str, Callable[..., dict[str, Figure]]] = {
    "serve": serving_figures,
    "overhead": overhead_figures,
    "photo": photo_figures,
    "mixed": mixed_figures,
    "overload": overload_figures,
    "model": model_figures,
    "life": life_figures,
    "train": training_figures,
    "packed": packed_figures,
    "peer_serve": serve_figures,
    "peer_flower": flower_figures,
}
"""Each takes the run, a folder of its own, `rounds`, `seconds` and `note`."""

ALONE = frozenset({"packed", "peer_serve", "peer_flower"})
"""Measured only when asked for: a thousand clients, and peers that are installed first."""

NEED_NO_RUN = frozenset({"overhead", "photo", "model", "packed", "peer_serve", "peer_flower"})
"""Made of models of their own."""


def measure(part: str, run: str | Path, folder: Path, **how: object) -> dict[str, Figure]:
    """The figures of one part."""
    place = folder / part
    place.mkdir(parents=True, exist_ok=True)
    return PARTS[part](run, place, **how)

"""Images per second of ours over those of the same model on Ray Serve, by turns."""

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from api.bench.figures import Figure, Note, by_turns, ratio
from api.bench.peers.venvs import python_with
from api.bench.serving import IN_FLIGHT, post_many, scene, served, served_rate

_MODEL = "street"


def serve_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`peer_serve`: the model in the box here and there, 8 requests in flight."""
    python = python_with("serve", [f"ray[serve]=={ray.__version__}"], check="import ray.serve", note=note)
    image = scene(360, 480)
    with served(_MODEL, note) as ours:
        note("and the same model on Ray Serve, one deployment per expert")
        with served(_MODEL, note, module="api.bench.peers.serve_app", python=python) as theirs:
            note("peer_serve")
            return {"peer_serve": compare(ours, theirs, image, rounds=rounds, seconds=seconds)}


def compare(ours: int, theirs: int, image: bytes, *, rounds: int, seconds: float) -> Figure:
    """Throughput at one port over that at another."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for port in (ours, theirs):
            post_many(pool, port, image, 2 * IN_FLIGHT)
        pairs = by_turns(
            lambda: served_rate(pool, ours, image, seconds), lambda: served_rate(pool, theirs, image, seconds), rounds
        )
    rates = (round(statistics.median(side), 2) for side in zip(*pairs, strict=True))
    return ratio(pairs, target=1.3, better="higher", **dict(zip(("ours_per_s", "serve_per_s"), rates, strict=True)))

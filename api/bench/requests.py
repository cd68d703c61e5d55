"""What kinds of requests cost: a phone's photograph against a small one, mixed settings against equal ones."""

import http.client
import io
import random
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from airmoe_ray.data.scenes import render_scene
from api.bench.figures import Figure, Note, by_turns, median_ms, ratio
from api.bench.serving import IN_FLIGHT, ask, post_many, scene, served, served_rate

_LARGE, _SMALL = (3000, 4000), (360, 480)
_TARGETS = {"json": ("application/json", 2.5), "png": ("image/png", 1.8)}


def photo_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`photo_12mp_json` and `photo_12mp_png` of the model in the box."""
    note("drawing a photograph of 12 megapixels")
    large, small = jpegs(_LARGE, _SMALL)
    with served("street", note) as port:
        return photo_ratios(port, large, small, rounds=rounds, seconds=seconds, note=note)


def photo_ratios(
    port: int, large: bytes, small: bytes, *, rounds: int, seconds: float, note: Note
) -> dict[str, Figure]:
    """Time of a large picture over that of a small one, by form of the answer."""
    connection, figures = http.client.HTTPConnection("127.0.0.1", port), {}
    for form, (accept, target) in _TARGETS.items():
        note(f"photo_12mp_{form}")

        def take(image: bytes, accept: str = accept) -> float:
            ask(connection, image, accept)
            return median_ms(lambda: ask(connection, image, accept), seconds)

        pairs = by_turns(lambda: take(large), lambda: take(small), rounds)
        large_ms, small_ms = (round(statistics.median(side), 1) for side in zip(*pairs, strict=True))
        figures[f"photo_12mp_{form}"] = ratio(pairs, target=target, better="lower", ms=large_ms, small_ms=small_ms)
    return figures


def mixed_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`mixed_settings`: images per second with random snr_db and top_k, over those with equal ones."""
    with served(run, note) as port:
        note("mixed_settings: random snr_db and top_k against the server's own, 8 in flight")
        return {"mixed_settings": mixed_ratio(port, scene(192, 256), rounds=rounds, seconds=seconds)}


def mixed_ratio(port: int, image: bytes, *, rounds: int, seconds: float) -> Figure:
    """Throughput of mixed requests over that of equal ones; as many clients are routed in the mean."""
    draw = random.Random(0)

    def mixed() -> Mapping[str, object]:
        return {"snr_db": round(draw.uniform(0, 30), 1), "top_k": draw.choice((3, 4, 5, 6, 7))}

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        post_many(pool, port, image, 2 * IN_FLIGHT)
        pairs = by_turns(
            lambda: served_rate(pool, port, image, seconds, mixed),
            lambda: served_rate(pool, port, image, seconds, lambda: {"snr_db": 15, "top_k": 5}),
            rounds,
        )
    rates = (round(statistics.median(side), 2) for side in zip(*pairs, strict=True))
    return ratio(pairs, target=0.9, better="higher", **dict(zip(("mixed_per_s", "equal_per_s"), rates, strict=True)))


def jpegs(*sizes: tuple[int, int]) -> list[bytes]:
    """One picture as JPEG files of several sizes (height, width), the first with a sensor's noise."""
    height, width = sizes[0]
    picture = render_scene(990_000, height=height, width=width).image
    grain = np.random.default_rng(0).normal(0, 4, (height, width, 1))
    noisy = Image.fromarray(np.clip(picture + grain, 0, 255).astype(np.uint8))
    files = []
    for height, width in sizes:
        buffer = io.BytesIO()
        noisy.resize((width, height), Image.Resampling.BILINEAR).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files

"""What a request takes without arithmetic, by hop, and how many calls between actors it is; alone and packed."""

import http.client
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

from airmoe_ray.config import Config
from api.bench.bare import bare_calls_ms
from api.bench.figures import Figure, Note
from api.bench.serving import post, scene, served, untrained_run, vit_small

_TARGETS = {1: (40.0, 22.0), 5: (20.0, 8.0)}  # clients per actor: milliseconds, calls
_WARM_UP = 10


def overhead_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`serve_overhead_ms` and `calls_per_image` of ViT-S/16 at 384x384, N 10, K 5: one client per actor, and five."""
    note("the pattern of calls between actors that do nothing")
    floor = bare_calls_ms(clients=10, routed=5, feature_bytes=4 * 384 * 24 * 24, image_bytes=3 * 384 * 384)
    config, image, figures = vit_small(folder), scene(384, 384), {}
    for packed, (milliseconds, calls) in _TARGETS.items():
        name = "" if packed == 1 else "_packed"
        place = untrained_run(folder / f"stub_{packed}", _packed(config, packed))
        with served(place, note, module="api.bench.stub") as port:
            note(f"serve_overhead_ms{name}: all hops, no arithmetic")
            overhead = measure_overhead(port, image, rounds=rounds, seconds=seconds, target=milliseconds)
            figures[f"calls_per_image{name}"] = count_calls(port, image, target=calls)
        detail = {**overhead.detail, "bare_ray_calls_ms": round(floor, 2)}
        figures[f"serve_overhead_ms{name}"] = replace(overhead, detail=detail)
    return figures


def measure_overhead(port: int, image: bytes, *, rounds: int, seconds: float, target: float) -> Figure:
    """Median time of a request [ms], one after another; the server's own clock tells the hops apart."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(_WARM_UP):
        post(connection, image)
    times: list[list[float]] = []
    hops: list[dict[str, float]] = []
    for _ in range(rounds):
        times.append([])
        until = time.perf_counter() + seconds / 2
        while time.perf_counter() < until or not times[-1]:
            started = time.perf_counter()
            hops.append(post(connection, image))
            times[-1].append(1e3 * (time.perf_counter() - started))
    medians = tuple(statistics.median(turn) for turn in times)
    value = statistics.median(medians)
    budget = {name: round(statistics.median(hop[name] for hop in hops), 2) for name in hops[0]}
    budget["http"] = round(value - sum(budget.values()), 2)
    return Figure(value, "ms", target, "lower", medians, {"budget_ms": budget})


def count_calls(port: int, image: bytes, *, target: float, images: int = 20) -> Figure:
    """Calls between actors for each of some images that come one after another, as the server counts them."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    counts, before = [], _calls(connection)
    for _ in range(images):
        post(connection, image)
        after = _calls(connection)
        counts.append(after - before)
        before = after
    return Figure(statistics.median(counts), "calls", target, "lower", tuple(counts))


def _calls(connection: http.client.HTTPConnection) -> float:
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    found = re.search(r"^airmoe_actor_calls_total (\S+)", text, re.M)
    assert found is not None, "the server counts no calls"
    return float(found[1])


def _packed(config: Config, per_actor: int) -> Config:
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"experts_per_actor": per_actor})})

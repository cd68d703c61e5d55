"""A thousand clients on one machine: how long they take to start, and what asking all of them costs."""

import http.client
import statistics
import time
from pathlib import Path

import torch

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.routing import route
from api.bench.figures import Figure, Note, by_turns, median_ms
from api.bench.serving import post, scene, served, untrained_run

_MANY, _FEW, _ACTORS = 1000, 10, 2


def packed_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """Start of 1000 packed clients, and their routing against that of 10 in as many actors, arithmetic apart."""
    note(f"making {_MANY} untrained clients of the quickstart's size (0.8 GB)")
    many, few = (untrained_run(folder / f"packed_{count}", _packed(count)) for count in (_MANY, _FEW))
    image = scene(192, 256)
    begun = time.perf_counter()
    with served(many, note) as crowd:
        start = Figure(time.perf_counter() - begun, "s", 60.0, "lower")
        with served(few, note) as handful:
            note(f"packed_routing: one image through {_MANY} statistics against {_FEW}")
            pairs = by_turns(
                lambda: _routing_ms(crowd, image, seconds), lambda: _routing_ms(handful, image, seconds), rounds
            )
    arithmetic = _arithmetic_ms(many, seconds)
    values = tuple((crowded - arithmetic) / alone for crowded, alone in pairs)
    crowded, alone = (round(statistics.median(side), 2) for side in zip(*pairs, strict=True))
    detail = {f"ms_of_{_MANY}": crowded, f"ms_of_{_FEW}": alone, "arithmetic_ms": round(arithmetic, 2)}
    return {
        "packed_start": start,
        "packed_routing": Figure(statistics.median(values), "ratio", 3.0, "lower", values, detail),
    }


def _packed(count: int) -> Config:
    return load_config("quickstart", [f"experts.count={count}", f"cluster.experts_per_actor={count // _ACTORS}"])


def _routing_ms(port: int, image: bytes, seconds: float) -> float:
    """Median time of read and route, by the server's own clock."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(3):
        post(connection, image)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        hops = post(connection, image)
        times.append(hops["read"] + hops["route"])
    return statistics.median(times)


def _arithmetic_ms(run: Path, seconds: float) -> float:
    """The same reads, divergences and TopK in one process."""
    segmenter = Segmenter.load(run / "checkpoint")
    config, clients = segmenter.config, segmenter.model.clients
    query_dist_Bd = torch.full((1, config.frl.dim), 1.0 / config.frl.dim)
    round_ = clients.begin([0], config.channel)

    @torch.inference_mode()
    def ask_all() -> None:
        reading = round_.read(query_dist_Bd)
        route(query_dist_Bd, reading.stat_BNd, config=config.routing)

    return median_ms(ask_all, seconds)

"""A server's start and its memory: `cold_start_s`, own memory per expert, and what requests leave behind."""

import http.client
import statistics
import time
from pathlib import Path

import psutil

from api.bench.figures import Figure, Note
from api.bench.serving import post, scene, served

_MB = 1e6


def life_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """Start and memory of the given run."""
    starts, experts = [], []
    note("cold_start_s: from the command to the first readiness, each time anew")
    for number in range(min(rounds, 3)):
        begun = time.perf_counter()
        with served(run, note) as port:
            starts.append(time.perf_counter() - begun)
            experts = [own_mb(process) for process in actors_here("ExpertHost")]
            if number == 0:
                note("memory_growth: own memory of all processes while images come")
                growth = memory_growth(port, scene(192, 256), rounds=rounds, seconds=seconds)
    detail = {"expert_mb": round(statistics.median(experts), 1), "experts": len(experts)} if experts else {}
    return {
        "cold_start_s": Figure(statistics.median(starts), "s", 20.0, "lower", tuple(starts), detail),
        "memory_growth": growth,
    }


def memory_growth(port: int, image: bytes, *, rounds: int, seconds: float) -> Figure:
    """Own memory of the server and its actors after some thousand images over that after the first hundred."""
    connection, images = http.client.HTTPConnection("127.0.0.1", port), 0

    def keep_posting(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            post(connection, image)
            count += 1
        return count

    keep_posting(time.perf_counter() + 2 * seconds)
    first = sum(map(own_mb, family()))
    values = []
    for _ in range(rounds):
        images += keep_posting(time.perf_counter() + 2 * seconds)
        values.append(sum(map(own_mb, family())) / first)
    return Figure(values[-1], "ratio", 1.05, "lower", tuple(values), {"images": images, "first_mb": round(first, 1)})


def family() -> list[psutil.Process]:
    """All processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def actors_here(name: str) -> list[psutil.Process]:
    """Actors of a class among them; Ray calls their processes by it."""
    return [process for process in family() if _title(process).startswith(f"ray::{name}")]


def own_mb(process: psutil.Process) -> float:
    """Memory that would be free without the process (USS) [MB]; 0 for one that has ended."""
    try:
        return float(process.memory_full_info().uss) / _MB
    except psutil.Error:
        return 0.0


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""

"""What comes out under overload: answers in time with 300 clients at once over those with 8, refusals, readiness."""

import http.client
import json
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from api.bench.figures import Figure, Note, by_turns, ratio
from api.bench.serving import IN_FLIGHT, post_many, scene, served

CROWD = 300
_SETTLE_S = 2.0  # before answers are counted: a crowd that comes at once is answered in order
_READY_EVERY_S = 0.25
_HEADERS = {"Content-Type": "application/octet-stream", "Accept": "image/png"}


@dataclass
class Load:
    """What came of all requests of some clients, and of readiness checks meanwhile."""

    answered: list[tuple[float, float]] = field(default_factory=list)  # `time.monotonic` of the answer, seconds it took
    degraded: int = 0  # answers without some client, which are not counted as good
    refused_s: list[float] = field(default_factory=list)  # each with Retry-After
    wrong: Counter[str] = field(default_factory=Counter)  # any other end, by status or error
    ready_s: list[float] = field(default_factory=list)  # of checks that were answered by 200
    unready: Counter[str] = field(default_factory=Counter)

    def goodput(self, since: float, until: float, deadline_s: float) -> float:
        """Whole answers within their deadline, per second of this interval."""
        good = sum(since <= at < until and took <= deadline_s for at, took in self.answered)
        return good / (until - since)

    def late(self, deadline_s: float) -> int:
        """Answers after their deadline."""
        return sum(took > deadline_s for _, took in self.answered)


def overload_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """`overload_goodput`: answers in time per second with 300 clients, over those with 8."""
    with served(run, note) as port:
        note(f"overload_goodput: {CROWD} clients, who come again when Retry-After says so, against {IN_FLIGHT}")
        return {"overload_goodput": overload_ratio(port, scene(192, 256), rounds=rounds, seconds=seconds)}


def overload_ratio(port: int, image: bytes, *, rounds: int, seconds: float, crowd: int = CROWD) -> Figure:
    """Goodput of a crowd over that of a few, and what else befell the crowd."""
    deadline_s = deadline_of(port)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        post_many(pool, port, image, 2 * IN_FLIGHT)
    crowded: list[Load] = []

    def few() -> float:
        return keep_asking(port, image, clients=IN_FLIGHT, seconds=seconds)[1]

    def many() -> float:
        load, goodput = keep_asking(port, image, clients=crowd, seconds=seconds)
        crowded.append(load)
        return goodput

    pairs = by_turns(many, few, rounds)
    crowd_per_s, few_per_s = (round(statistics.median(side), 2) for side in zip(*pairs, strict=True))
    return ratio(
        pairs,
        target=0.95,
        better="higher",
        crowd_per_s=crowd_per_s,
        few_per_s=few_per_s,
        late=sum(load.late(deadline_s) for load in crowded),
        degraded=sum(load.degraded for load in crowded),
        wrong=dict(sum((load.wrong for load in crowded), Counter())),
        refused=sum(len(load.refused_s) for load in crowded),
        slowest_refusal_s=round(max((s for load in crowded for s in load.refused_s), default=0.0), 2),
        unready=sum(load.unready.total() for load in crowded),
        slowest_ready_s=round(max((s for load in crowded for s in load.ready_s), default=0.0), 2),
    )


def keep_asking(port: int, image: bytes, *, clients: int, seconds: float) -> tuple[Load, float]:
    """Some clients, each with one request under way unless it was told to come later; all that came, and the goodput.

    Returns once everything that was asked has been answered.
    """
    load, deadline_s = Load(), deadline_of(port)
    since = time.monotonic() + _SETTLE_S
    until = since + seconds
    over = threading.Event()
    watching = threading.Thread(target=_watch_readiness, args=(port, load, over))
    watching.start()
    with ThreadPoolExecutor(clients) as pool:
        for _ in range(clients):
            pool.submit(_ask_until, port, image, load, until)
    over.set()
    watching.join()
    return load, load.goodput(since, until, deadline_s)


def deadline_of(port: int) -> float:
    """The server's own deadline [s]."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/config")
    return float(json.loads(connection.getresponse().read())["settings"]["serve"]["deadline_s"])


def _ask_until(port: int, image: bytes, load: Load, until: float) -> None:
    """One client: asks again when it has its answer; refused, when it was told to."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    while (begun := time.monotonic()) < until:
        try:
            connection.request("POST", "/segment", image, _HEADERS)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            load.wrong[type(error).__name__] += 1
            connection.close()
            continue
        now = time.monotonic()
        again_s = response.headers.get("Retry-After")
        if response.status == 200 and response.headers.get("X-AirMoE-Degraded") == "true":
            load.degraded += 1
        elif response.status == 200:
            load.answered.append((now, now - begun))
        elif response.status in (429, 503) and again_s is not None:
            load.refused_s.append(now - begun)
            time.sleep(max(min(float(again_s), until - now), 0.0))
        else:
            load.wrong[str(response.status)] += 1
    connection.close()


def _watch_readiness(port: int, load: Load, over: threading.Event) -> None:
    while not over.wait(_READY_EVERY_S):
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/readyz")
            status = connection.getresponse().status
        except OSError as error:
            load.unready[type(error).__name__] += 1
            continue
        finally:
            connection.close()
        if status == 200:
            load.ready_s.append(time.monotonic() - begun)
        else:
            load.unready[str(status)] += 1

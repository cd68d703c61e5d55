"""Metrics of a real server: they agree with what was sent, and cost next to nothing."""

import asyncio
import re
import statistics
import time
import timeit
from typing import Any

from airmoe_ray.config import Config
from api.http.metrics import Metrics
from api.http.middleware.request_metrics import MetricsMiddleware
from tests.api.http.results import make_result
from tests.api.http.server_requests import segment
from tests.api.support import EXPERTS, TOP_K, samples


def test_metrics_agree_with_what_was_sent(server, client):
    before = samples(server.url)
    for parameters in ({"top_k": 1}, {"top_k": 3}, {"channel": "ideal"}, {"channel": "digital", "top_k": 4}):
        assert segment(client, seed=1, **parameters).status_code == 200
    segment(client, b"no picture")
    after = samples(server.url)

    def grown(start: str) -> float:
        return sum(value - before.get(name, 0) for name, value in after.items() if name.startswith(start))

    assert grown('airmoe_requests_total{code="200"}') == 4
    assert grown('airmoe_requests_total{code="400"}') == 1
    assert grown("airmoe_request_duration_seconds_count") == 5
    assert grown("airmoe_expert_selected_total") == 1 + 3 + TOP_K + 4
    assert grown("airmoe_channel_nmse_count") == 3
    assert grown('airmoe_stage_duration_seconds_count{stage="total"}') == 4
    assert grown('airmoe_stage_duration_seconds_count{stage="encode"}') == 4
    assert after["airmoe_requests_in_progress"] == 0


def test_labels_are_bounded_by_the_number_of_experts(server, client):
    segment(client)
    names = samples(server.url)
    assert {label for name in names for label in re.findall('expert="([^"]+)"', name)} == set(map(str, range(EXPERTS)))
    assert len(names) < 700


def test_metrics_cost_at_most_two_percent_of_a_request(client):
    metrics, result = Metrics(Config()), make_result()
    asked: list[float] = []
    for _ in range(15):
        start = time.perf_counter()
        segment(client, seed=1)
        asked.append(time.perf_counter() - start)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        """Nowhere."""

    def cost(app: Any) -> float:
        async def many() -> None:
            for _ in range(300):
                await app({"type": "http", "path": "/segment"}, None, send)

        return min(timeit.repeat(lambda: asyncio.run(many()), number=1, repeat=5)) / 300

    middleware = cost(MetricsMiddleware(app, metrics=metrics)) - cost(app)
    counting = min(timeit.repeat(lambda: metrics.observe(result, seconds=0.1), number=100, repeat=5)) / 100
    assert middleware + counting < 0.02 * statistics.median(asked)

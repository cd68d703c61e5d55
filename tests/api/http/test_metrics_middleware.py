"""Laws of the middleware that counts requests, and what counting costs."""

import asyncio
import time
from typing import Any

import pytest
from fastapi import FastAPI, Response, WebSocket
from starlette.testclient import TestClient

from actors.errors import Fault
from api.http.metrics import Metrics
from api.http.middleware.request_metrics import MetricsMiddleware
from tests.api.http.results import make_result, samples


def make_app(metrics: Metrics) -> FastAPI:
    app = FastAPI()
    app.add_middleware(MetricsMiddleware, metrics=metrics)

    @app.get("/metrics")
    def scrape() -> Response:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    @app.get("/answer/{code}")
    def answer(code: int) -> Response:
        return Response(f"body of {code}", code, headers={"X-Own": "kept"})

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("broken")

    @app.get("/busy")
    def busy() -> float:
        return samples(metrics)["airmoe_requests_in_progress"]

    @app.post("/echo")
    async def echo(body: dict[str, int]) -> dict[str, int]:
        return body

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    return app


@pytest.fixture
def client(metrics: Metrics) -> TestClient:
    return TestClient(make_app(metrics), raise_server_exceptions=False)


def test_requests_pass_unchanged_and_are_counted_by_code(metrics, client):
    for code in (200, 200, 404, 503):
        response = client.get(f"/answer/{code}")
        assert (response.status_code, response.text, response.headers["X-Own"]) == (code, f"body of {code}", "kept")
    assert client.post("/echo", json={"a": 1}).json() == {"a": 1}
    got = samples(metrics)
    assert [got[f"airmoe_requests_total{{code={code}}}"] for code in (200, 404, 503)] == [3, 1, 1]
    assert got["airmoe_request_duration_seconds_count"] == 5
    assert 0 < got["airmoe_request_duration_seconds_sum"] < 5


def test_an_exception_is_a_500_and_leaves_nothing_in_progress(metrics, client):
    assert client.get("/broken").status_code == 500
    assert samples(metrics)["airmoe_requests_total{code=500}"] == 1
    assert samples(metrics)["airmoe_requests_in_progress"] == 0


def test_a_request_is_in_progress_while_it_runs(metrics, client):
    assert client.get("/busy").json() == 1
    assert samples(metrics)["airmoe_requests_in_progress"] == 0


def test_scrapes_and_probes_are_not_traffic(metrics, client):
    assert b"airmoe_requests_total" in client.get("/metrics").content
    client.get("/livez")
    assert samples(metrics)["airmoe_request_duration_seconds_count"] == 0


def test_web_sockets_pass_uncounted(metrics, client):
    with client.websocket_connect("/socket") as socket:
        assert socket.receive_text() == "hello"
    assert samples(metrics)["airmoe_request_duration_seconds_count"] == 0


async def _start_and_break(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("half way")


async def _never_answer(scope, receive, send):
    await asyncio.sleep(60)


async def _forget(scope, receive, send):
    return


async def _swallow(message):
    return


def _call(metrics: Metrics, app: Any, *, timeout_s: float = 5.0) -> None:
    middleware = MetricsMiddleware(app, metrics=metrics)
    asyncio.run(asyncio.wait_for(middleware({"type": "http", "path": "/x"}, None, _swallow), timeout_s))


@pytest.mark.parametrize(
    ("app", "error", "code"),
    [(_start_and_break, RuntimeError, 500), (_never_answer, TimeoutError, 499), (_forget, None, 500)],
)
def test_unfinished_answers_have_a_code_too(metrics, app, error, code):
    if error is None:
        _call(metrics, app)
    else:
        with pytest.raises(error):
            _call(metrics, app, timeout_s=0.2)
    got = samples(metrics)
    assert got[f"airmoe_requests_total{{code={code}}}"] == 1
    assert sum(value for name, value in got.items() if name.startswith("airmoe_requests_total")) == 1
    assert got["airmoe_requests_in_progress"] == 0


# costs, in CPU time of this thread, so that a busy machine does not count


def test_an_image_of_ten_clients_is_counted_in_150_microseconds(metrics):
    result = make_result(truncated=(1,), skipped={9: Fault.QUARANTINED})
    costs = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(100):
            metrics.observe(result, seconds=0.1)
        costs.append((time.thread_time() - start) / 100)
    assert min(costs) < 150e-6


def test_the_middleware_costs_at_most_two_percent_of_a_plain_request(metrics):
    async def plain(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def cost(app) -> float:
        start = time.thread_time()
        for _ in range(500):
            await app({"type": "http", "path": "/x"}, None, _swallow)
        return (time.thread_time() - start) / 500

    def best(app) -> float:
        return min(asyncio.run(cost(app)) for _ in range(10))

    extra = best(MetricsMiddleware(plain, metrics=metrics)) - best(plain)
    assert extra < 0.02 * 1.2e-3, "820 requests/s, the most that uvicorn and actors do here, are 1.2 ms each"

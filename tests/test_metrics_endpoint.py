"""Laws of the service's metrics and of the middleware that counts requests."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Response, WebSocket
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from actors.messages import Answer, ClientAccount
from actors.policy import Fault
from airmoe_ray.config import Config
from airmoe_ray.ledger import account
from api.metrics import REASONS, Metrics, MetricsMiddleware

CONFIG = Config()
LEDGER = account(CONFIG, feature_dim=64, classes=5, grid=(4, 4), top_k=5, gains_K=[1.0] * 5)


def make_answer(clients: int = 10, *, js: float = 0.02, nmse: float = 3e-3, **changes: Any) -> Answer:
    """An image routed to the first five clients; divergences grow with the client's id."""
    accounts = tuple(
        ClientAccount(
            id=j,
            js=js * (j + 1),
            score=1.0,
            probability=1 / clients,
            selected=j < 5,
            weight=0.2 if j < 5 else 0.0,
            gamma=1 + 0j,
            version=0,
        )
        for j in range(clients)
    )
    stages = ("queue", "backbone", "read", "route", "expert", "channel")
    answer = Answer(
        logits_Chw=np.zeros((5, 4, 4), np.float32),
        clients=accounts,
        channel=CONFIG.channel,
        seed=1,
        rho=1.0,
        noise_power=0.01,
        nmse=nmse,
        truncated=(),
        skipped={},
        all_faded=False,
        ledger=LEDGER,
        batch_size=1,
        timings_ms=dict.fromkeys(stages, 4.0),
    )
    return replace(answer, **changes)


def make_state(expert: int, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"id": expert, "state": "up", "replicas": 1, "restarts": 0, "drift": 0.1, "load_ratio": 1.0} | changes
    )


def samples(metrics: Metrics) -> dict[str, float]:
    """What a scraper reads: `name{label=value}` -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CONFIG)


def test_an_image_is_counted_in_every_account(metrics):
    metrics.observe(make_answer(truncated=(3,)), seconds=0.5)
    got = samples(metrics)
    assert [got[f"airmoe_expert_selected_total{{expert={j}}}"] for j in range(10)] == [1] * 5 + [0] * 5
    assert [got[f"airmoe_routing_js_count{{expert={j}}}"] for j in range(10)] == [1] * 10
    assert got["airmoe_routing_js_sum{expert=9}"] == pytest.approx(0.2)
    assert got["airmoe_expert_weight_count{expert=0}"] == 1
    assert got["airmoe_expert_weight_count{expert=9}"] == 0, "silent clients would drown the weights of the others"
    assert got["airmoe_channel_truncated_total{expert=3}"] == 1
    assert got["airmoe_stage_duration_seconds_sum{stage=expert}"] == pytest.approx(0.004)
    assert got["airmoe_stage_duration_seconds_sum{stage=total}"] == 0.5
    assert got["airmoe_channel_nmse_count"] == 1
    assert got["airmoe_channel_snr_db"] == CONFIG.channel.snr_db
    assert got["airmoe_channel_uses_total{scheme=air}"] == LEDGER.air_channel_uses
    assert got["airmoe_channel_uses_total{scheme=tdma}"] == LEDGER.tdma_channel_uses
    assert got["airmoe_uplink_bits_total{kind=routing}"] == LEDGER.uplink_routing_bits
    assert got["airmoe_uplink_bits_total{kind=report}"] == LEDGER.uplink_report_bits
    assert got["airmoe_uplink_bits_total{kind=raw_features}"] == LEDGER.uplink_raw_feature_bits


def test_selected_counts_clients_that_faded_afterwards(metrics):
    metrics.observe(make_answer(), seconds=0.1)
    faded = [replace(client, weight=0.0) if client.id == 2 else client for client in make_answer().clients]
    metrics.observe(replace(make_answer(truncated=(2,)), clients=tuple(faded)), seconds=0.1)
    got = samples(metrics)
    assert got["airmoe_expert_selected_total{expert=2}"] == 2
    assert got["airmoe_expert_weight_count{expert=2}"] == 1


def test_an_ideal_channel_says_nothing_about_the_air(metrics):
    ideal = CONFIG.channel.model_copy(update={"kind": "ideal", "snr_db": -7.0})
    metrics.observe(make_answer(channel=ideal, ledger=replace(LEDGER, tdma_channel_uses=None)), seconds=0.1)
    got = samples(metrics)
    assert got["airmoe_channel_snr_db"] == CONFIG.channel.snr_db
    assert got["airmoe_channel_nmse_count"] == 0
    assert got["airmoe_channel_uses_total{scheme=tdma}"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_do_not_poison_sums(metrics, bad):
    metrics.observe(make_answer(js=bad, nmse=bad), seconds=0.1)
    metrics.observe(make_answer(js=0.1, nmse=0.5), seconds=0.1)
    assert samples(metrics)["airmoe_channel_nmse_sum"] == 0.5
    assert samples(metrics)["airmoe_routing_js_sum{expert=0}"] == 0.1


def test_a_client_that_did_not_answer_has_no_divergence(metrics):
    silent = replace(make_answer().clients[0], js=None, selected=False, weight=0.0)
    metrics.observe(replace(make_answer(), clients=(silent,)), seconds=0.1)
    assert samples(metrics)["airmoe_routing_js_count{expert=0}"] == 0


@pytest.mark.parametrize(
    ("skipped", "all_faded", "reason"),
    [
        ({1: "was late by 3.21 s"}, False, "late"),
        ({1: "was LOST: ActorDiedError"}, False, "lost"),
        ({1: "is quarantined", 2: "sent invalid numbers"}, False, "invalid"),
        ({1: "is restarting"}, True, "restarting"),
        ({}, True, "faded"),
        ({1: "calculated nothing, template exhausted"}, False, "other"),  # holds "late" only inside words
        ({1: ""}, False, "other"),
    ],
)
def test_a_degraded_image_counts_once_under_its_gravest_reason(metrics, skipped, all_faded, reason):
    metrics.observe(make_answer(skipped=skipped, all_faded=all_faded), seconds=0.1)
    got = {name: value for name, value in samples(metrics).items() if name.startswith("airmoe_degraded")}
    assert got == {f"airmoe_degraded_requests_total{{reason={name}}}": float(name == reason) for name in REASONS}


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_of_the_policy_has_a_reason_of_its_own(metrics, fault):
    metrics.observe(make_answer(skipped={0: fault.value}), seconds=0.1)
    assert samples(metrics)[f"airmoe_degraded_requests_total{{reason={fault.name.lower()}}}"] == 1


def test_a_healthy_image_is_not_degraded_though_a_client_faded(metrics):
    metrics.observe(make_answer(truncated=(1,)), seconds=0.1)
    assert not any(value for name, value in samples(metrics).items() if name.startswith("airmoe_degraded"))


def test_no_label_grows_with_what_strangers_send(metrics):
    metrics.observe(make_answer(), seconds=0.1)
    metrics.request_started()
    metrics.request_finished(777, 0.1)
    before = samples(metrics).keys()
    for i in range(50):
        stages = {f"stage {i}": 1.0}
        metrics.observe(make_answer(skipped={1: f"reason {i}"}, timings_ms=stages), seconds=0.1)
        metrics.request_started()
        metrics.request_finished(800 + i, 0.1)
    assert samples(metrics).keys() == before
    assert samples(metrics)["airmoe_requests_total{code=other}"] == 51


def test_clients_that_disappear_lose_every_series(metrics):
    metrics.observe(make_answer(4), seconds=0.1)
    metrics.set_experts(make_state(j) for j in range(4))
    assert any("expert=3" in name for name in samples(metrics))
    metrics.set_experts(make_state(j) for j in range(3))
    assert not any("expert=3" in name for name in samples(metrics))
    assert sum("expert_up" in name for name in samples(metrics)) == 3


def test_a_late_image_of_a_removed_client_raises_no_alarm_and_is_swept_up(metrics):
    metrics.set_experts([make_state(0)])
    metrics.observe(make_answer(2), seconds=0.1)
    assert "airmoe_expert_up{expert=1}" not in samples(metrics), "0 would mean dead"
    metrics.set_experts([make_state(0)])
    assert not any("expert=1}" in name for name in samples(metrics))
    assert samples(metrics)["airmoe_expert_selected_total{expert=0}"] == 1, "the others keep their counts"


def test_restarts_follow_the_absolute_number_and_never_go_back(metrics):
    read = []
    for restarts in (2, 3, 1, 3, 5):
        metrics.set_experts([make_state(0, restarts=restarts)])
        read.append(samples(metrics)["airmoe_expert_restarts_total{expert=0}"])
    assert read == [2, 3, 3, 3, 5]


def test_only_up_is_up_and_unknown_drift_is_absent(metrics):
    gone = {"state": "quarantined", "drift": None}
    states = [make_state(0, replicas=3, load_ratio=1.5), make_state(1, replicas=0, **gone), make_state(2, **gone)]
    metrics.set_experts(states)
    got = samples(metrics)
    assert [got[f"airmoe_expert_up{{expert={j}}}"] for j in range(3)] == [1, 0, 1]  # 2: by its replica
    assert got["airmoe_expert_replicas{expert=0}"] == 3
    assert got["airmoe_expert_load_ratio{expert=0}"] == 1.5
    assert got["airmoe_frl_drift{expert=0}"] == 0.1
    assert "airmoe_frl_drift{expert=1}" not in got
    metrics.set_experts([make_state(0, drift=None)])
    assert "airmoe_frl_drift{expert=0}" not in samples(metrics)


def test_gauges_hold_what_was_set_last(metrics):
    assert np.isnan(samples(metrics)["airmoe_routing_balancedness"]), "unknown before the first image"
    metrics.set_balancedness(0.8)
    metrics.set_queue(7)
    metrics.set_queue(3)
    metrics.observe_batch(4)
    metrics.observe_stage("decode", seconds=0.2)
    got = samples(metrics)
    assert got["airmoe_routing_balancedness"] == 0.8
    assert (got["airmoe_queue_depth"], got["airmoe_queue_limit"]) == (3, CONFIG.serve.queue)
    assert (got["airmoe_batch_size_sum"], got["airmoe_batch_size_count"]) == (4, 1)
    assert got["airmoe_stage_duration_seconds_sum{stage=decode}"] == 0.2


def test_two_services_in_one_process_do_not_share_counts(metrics):
    other = Metrics(CONFIG)
    metrics.observe(make_answer(), seconds=0.1)
    assert samples(metrics)["airmoe_channel_nmse_count"] == 1
    assert samples(other)["airmoe_channel_nmse_count"] == 0


def test_the_page_is_prometheus_text_without_creation_times(metrics):
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=")
    assert b"# TYPE airmoe_requests_total counter" in body
    assert b"_created" not in body


# the middleware


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
    answer = make_answer(truncated=(1,), skipped={9: "is quarantined"})
    costs = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(100):
            metrics.observe(answer, seconds=0.1)
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

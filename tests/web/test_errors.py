"""What cannot be answered, on the real application over a system that is not there: codes, keys and headers."""

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings
from pydantic import ValidationError

from actors.load import LoadWindow
from airmoe_ray.config import Config
from airmoe_ray.errors import CheckpointError
from api.app import create_app
from api.images import decode
from api.security import ADMIN, HEALTH, _matches
from api.service import Service
from tests.test_images import photo, saved

PHOTO = saved(photo())
PNG = {"Content-Type": "image/png"}
TOKEN = "the-admin-token"


class Experts:
    """A supervisor of experts that do not exist."""

    def __init__(self, *, up: bool = True) -> None:
        self.total, self.someone_is_up, self.renewals_lost = 4, up, 0
        self.load = LoadWindow(4, 10)

    def status(self) -> list[Any]:
        return []

    async def watch(self) -> None:
        """Nobody to watch."""

    def close(self) -> None:
        """Nobody to end."""

    async def scale(self, experts: int) -> None:
        if experts > 4:
            raise CheckpointError("/home/somebody/run/checkpoint/experts/expert_04.safetensors: missing")

    async def replicate(self, client: int, instances: int) -> None:
        assert 0 <= client < 4


def make_service(*, up: bool = True, **serve: Any) -> Service:
    config = Config.model_validate({"experts": {"count": 4}, "routing": {"top_k": 2}, "serve": serve})
    card = SimpleNamespace(classes=["road", "sky"], palette=[[128, 64, 128], [70, 130, 180]])
    system = SimpleNamespace(config=config, card=card, pad_multiple=16, stop=lambda: None)
    return Service(system, Experts(up=up))


def ask(service: Service, method: str = "POST", path: str = "/segment", **options: Any) -> httpx.Response:
    return ask_often(service, 1, method, path, **options)[0]


def ask_often(
    service: Service, times: int, method: str = "POST", path: str = "/segment", **options: Any
) -> list[httpx.Response]:
    """Requests at the same time; nothing takes them off the queue."""
    if method == "POST" and path == "/segment":
        options = {"content": PHOTO, "headers": PNG} | options
    transport = httpx.ASGITransport(create_app(service, admin_token=TOKEN))

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.request(method, path, **options) for _ in range(times)))

    return asyncio.run(run())


def assert_is_an_error(response: httpx.Response, code: int) -> dict[str, Any]:
    """Our form, our headers, and nothing about the inside."""
    assert response.status_code == code, response.text
    body = response.json()
    assert body.keys() == {"error", "detail"}
    assert body["error"]
    assert not [
        leak for leak in ("Traceback", 'File "', ".py", "site-packages", "/home", "/tmp") if leak in response.text
    ]
    assert response.headers["x-request-id"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "server" not in response.headers
    return body


# nobody can answer


def test_a_full_queue_is_429_with_retry_after_and_who_waits_in_vain_gets_504():
    answers = ask_often(make_service(queue=1, deadline_s=0.2), 3)
    refused = [answer for answer in answers if answer.status_code == 429]
    (late,) = (answer for answer in answers if answer.status_code != 429)
    assert [answer.headers["retry-after"] for answer in refused] == ["1", "1"]
    assert_is_an_error(refused[0], 429)
    assert_is_an_error(late, 504)


def test_nothing_is_decoded_beyond_the_places_there_are(monkeypatch):
    service, at_once = make_service(queue=2, in_flight=1, max_batch=1, deadline_s=0.3), []
    monkeypatch.setattr("api.service.decode", lambda *a, **kw: at_once.append(service.in_progress) or decode(*a, **kw))
    codes = sorted(answer.status_code for answer in ask_often(service, 8))
    assert codes == [429] * 6 + [504] * 2  # one of three that were let in found the queue itself full
    assert max(at_once) == 3
    assert len(at_once) < 8
    assert service.in_progress == 0


def test_who_sends_too_slowly_gets_504_and_leaves_its_place(monkeypatch):
    monkeypatch.setattr("api.service._CODEC_S", 0.1)
    service = make_service(queue=1, in_flight=1, max_batch=1, deadline_s=0.2)

    async def trickle():
        for byte in PHOTO:
            yield bytes([byte])
            await asyncio.sleep(0.1)

    assert_is_an_error(ask(service, content=trickle()), 504)
    assert service.in_progress == 0


def test_no_expert_up_is_503_with_retry_after():
    response = ask(make_service(up=False))
    assert "restart by themselves" in assert_is_an_error(response, 503)["error"]
    assert int(response.headers["retry-after"]) > 0


def test_a_stopping_service_is_503_with_retry_after():
    service = make_service()
    service.orchestrator._stopping = True
    response = ask(service)
    assert_is_an_error(response, 503)
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/readyz", "/v2/health/ready", "/v2/models/airmoe/ready"])
def test_not_ready_is_503_and_says_why(path):
    response = ask(make_service(up=False), "GET", path)
    assert "no expert is up" in assert_is_an_error(response, 503)["detail"]
    assert int(response.headers["retry-after"]) > 0


def test_a_defect_is_500_without_a_word_about_it_but_in_the_log(monkeypatch, caplog):
    service = make_service()
    monkeypatch.setattr(service, "settings", lambda _: 1 / 0)
    response = ask(service, headers={**PNG, "X-Request-ID": "find-me"})
    assert assert_is_an_error(response, 500) == {"error": "internal error", "detail": None}
    assert response.headers["x-request-id"] == "find-me"
    assert "find-me" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_defect_is_counted_as_500(monkeypatch):
    service = make_service()
    monkeypatch.setattr(service, "settings", lambda _: 1 / 0)
    ask(service)
    assert b'airmoe_requests_total{code="500"} 1.0' in service.metrics.render()[0]


def test_a_client_that_goes_away_while_sending_is_neither_a_defect_nor_a_500(caplog):
    service = make_service()
    app, sent = create_app(service, admin_token=TOKEN), []
    messages = iter([{"type": "http.request", "body": b"\x89PNG", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/segment", "query_string": b"", "http_version": "1.1"}
    asyncio.run(app(scope | {"headers": [(b"content-type", b"image/png")]}, receive, send))
    assert b'airmoe_requests_total{code="499"} 1.0' in service.metrics.render()[0]
    assert not caplog.text


# keys

KEYED = {"api_keys": ["first", "zweiter-schlüssel"]}
BASIC = base64.b64encode(b"anyone:first").decode()


def opened() -> list[tuple[str, str]]:
    app = create_app(make_service(), admin_token=TOKEN)
    routes = [(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]
    routes = routes or [
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods
    ]
    return [
        *routes,
        ("GET", "/openapi.json"),
        ("GET", "/static/app.js"),
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/no"),
    ]


@pytest.mark.parametrize(("method", "path"), opened())
def test_every_route_but_health_needs_a_key(method, path):
    response = ask(make_service(up=False, **KEYED), method, path)
    if path in HEALTH:
        assert response.status_code in {200, 503}
    else:
        assert_is_an_error(response, 401)
        assert response.headers["www-authenticate"].startswith("Basic")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first"},
        {"authorization": "bearer  first"},
        {"X-API-Key": "first"},
        {"X-API-Key": "zweiter-schlüssel".encode()},
        {"Authorization": f"Basic {BASIC}"},
        {"Authorization": f"Bearer {TOKEN}"},
    ],
    ids=["bearer", "small letters", "header", "second key", "basic", "the admin's token"],
)
def test_a_right_key_opens(headers):
    assert ask(make_service(**KEYED), "GET", "/config", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "first"},
        {"Authorization": "Basic Zmlyc3Q="},
        {"Authorization": "Basic %%%"},
        {"X-API-Key": "firs"},
        {"X-API-Key": "first first"},
        {"X-API-Key": b"\xff\xfe"},
    ],
    ids=["wrong", "empty", "no scheme", "only a name", "not base64", "a part", "twice", "bytes"],
)
def test_a_wrong_key_does_not_open(headers):
    assert_is_an_error(ask(make_service(**KEYED), "GET", "/config", headers=headers), 401)


def test_an_empty_key_is_none():
    with pytest.raises(ValidationError, match="at least 1 character"):
        make_service(api_keys=[""])
    assert not _matches(b"", [b""])


def test_a_refused_key_is_counted():
    service = make_service(**KEYED)
    ask(service)
    assert b'airmoe_requests_total{code="401"} 1.0' in service.metrics.render()[0]


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "first"}, {"Authorization": "Bearer nope"}])
def test_the_admin_route_takes_the_admin_token_only(headers):
    for service in (make_service(), make_service(**KEYED)):
        assert_is_an_error(ask(service, "POST", "/experts/scale", headers=headers, json={"experts": 3}), 401)
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(make_service(), "POST", "/experts/scale", headers=right, json={"experts": 3}).status_code == 200
    assert {"/experts/scale"} == ADMIN


def test_secrets_and_paths_are_not_in_the_public_configuration():
    response = ask(make_service(admin_token="hidden-1", **KEYED), "GET", "/config", headers={"X-API-Key": "first"})
    assert not [name for name in ("hidden-1", "first", "schl", "cache_dir", "storage", "root") if name in response.text]


# scaling


def scale(wish: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    content = wish if isinstance(wish, bytes) else json.dumps(wish).encode()
    return ask(make_service(), "POST", "/experts/scale", headers=headers, content=content)


def test_more_experts_than_the_checkpoint_holds_is_409_without_a_path():
    assert "does not hold 9" in assert_is_an_error(scale({"experts": 9}), 409)["error"]


@pytest.mark.parametrize(
    "wish",
    [{}, {"experts": 0}, {"experts": True}, {"experts": "x"}, {"replicas": {"4": 2}}, {"replicas": {"0": 0}}, {"x": 1}],
    ids=json.dumps,
)
def test_a_wish_that_makes_no_sense_is_422(wish):
    assert_is_an_error(scale(wish), 422)


def test_a_wish_that_is_not_text_is_400():
    assert_is_an_error(scale(b'{"\xff": 1}'), 400)


def test_replicas_of_an_expert_that_leaves_are_refused_before_anything_changes():
    assert_is_an_error(scale({"experts": 3, "replicas": {"3": 2}}), 422)


# as declared

admin_schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(make_service(), admin_token=TOKEN))


@admin_schema.include(path="/experts/scale").parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_scaling_answers_as_declared(case):
    beyond_a_schema = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]  # which experts there are
    case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, excluded_checks=beyond_a_schema)

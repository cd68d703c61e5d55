"""What cannot be answered, on the real application over a system that is not there."""

import asyncio
import math
import time
from typing import Any

import pytest

from actors.serving.orchestrator import Orchestrator
from airmoe_ray.inference.decode import decode
from api.http.app import create_app
from tests.api.http.stub_service import PHOTO, PNG, TOKEN, ask, ask_often, assert_is_an_error, make_service


def test_a_full_queue_is_429_with_retry_after_and_who_waits_in_vain_gets_504():
    answers = ask_often(make_service(queue=1, deadline_s=0.2), 3)
    refused = [answer for answer in answers if answer.status_code == 429]
    (late,) = (answer for answer in answers if answer.status_code != 429)
    assert [answer.headers["retry-after"] for answer in refused] == ["1", "1"]
    assert_is_an_error(refused[0], 429)
    assert_is_an_error(late, 504)


def test_nothing_is_decoded_beyond_the_places_there_are(monkeypatch):
    service, at_once = make_service(queue=2, in_flight=1, max_batch=1, deadline_s=0.3), []
    monkeypatch.setattr(
        "api.http.service.decode", lambda *a, **kw: at_once.append(service.in_progress) or decode(*a, **kw)
    )
    codes = sorted(answer.status_code for answer in ask_often(service, 8))
    assert codes == [429] * 6 + [504] * 2  # one of three that were let in found the queue itself full
    assert max(at_once) == 3
    assert len(at_once) < 8
    assert service.in_progress == 0


def test_each_file_of_several_needs_a_place_of_its_own():
    service = make_service(queue=2, in_flight=1, max_batch=1, deadline_s=0.3)
    files = [("file", (f"{n}.png", PHOTO, "image/png")) for n in range(6)]
    response = ask(service, content=None, headers={}, files=files)
    assert response.status_code == 200
    codes = [answer["status"] for answer in response.json()]
    assert codes[3:] == [429] * 3  # there are three places, and the queue behind them has two
    assert sorted(codes[:3]) == [429, 504, 504]
    assert service.in_progress == 0


def test_a_defect_met_by_one_file_is_500_for_it_alone(monkeypatch):
    service = make_service(deadline_s=0.2)
    whole = service.decode

    def decode_or_break(data: bytes, keep_rgb: bool) -> Any:
        if data == b"poison":
            raise RuntimeError("/home/somebody/secret.py")
        return whole(data, keep_rgb)

    monkeypatch.setattr(service, "decode", decode_or_break)
    files = [("file", ("a.png", data, "image/png")) for data in (b"poison", PHOTO, b"text")]
    response = ask(service, content=None, headers={}, files=files)
    assert [answer["status"] for answer in response.json()] == [500, 504, 400]
    assert "secret" not in response.text


def test_who_sends_too_slowly_gets_504_and_leaves_its_place(monkeypatch):
    monkeypatch.setattr("api.http.service._CODEC_S", 0.1)
    service = make_service(queue=1, in_flight=1, max_batch=1, deadline_s=0.2)

    async def trickle():
        for byte in PHOTO:
            yield bytes([byte])
            await asyncio.sleep(0.1)

    assert_is_an_error(ask(service, content=trickle()), 504)
    assert service.in_progress == 0


def test_no_expert_up_is_503_with_retry_after():
    response = ask(make_service(up=False))
    assert "no expert is up" in assert_is_an_error(response, 503)["error"]
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


def test_overload_is_not_unreadiness_while_answers_leave(monkeypatch):
    service = make_service(queue=1)
    monkeypatch.setattr(service.orchestrator, "_waiting", [None] * 9)  # and one more would be refused
    service.orchestrator.answered_at = time.monotonic() - 1
    assert ask(service, "GET", "/readyz").status_code == 200
    assert_is_an_error(ask(service), 429)
    service.orchestrator.answered_at = -math.inf
    monkeypatch.setattr(service.supervisor, "up", False)
    service.readiness._checked_at = -math.inf
    assert_is_an_error(ask(service, "GET", "/readyz"), 503)


@pytest.mark.parametrize("path", ["/livez", "/v2/health/live"])
def test_a_server_whose_loop_has_died_is_not_alive(path, monkeypatch):
    assert ask(make_service(), "GET", path).status_code == 200
    monkeypatch.setattr(Orchestrator, "dead_loop", "dispatcher")
    told = assert_is_an_error(ask(make_service(), "GET", path), 503)
    assert told["error"] == "the dispatcher has died; start the server again"


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

"""Codes and headers of a real server: a test per code, and what every answer carries."""

import base64
import re

import pytest

from tests.api.http.images import photo, png, saved
from tests.api.http.server_requests import PHOTO, PNG, assert_error, exchange, segment
from tests.api.support import EXPERTS


@pytest.mark.parametrize(
    "data",
    [b"", b"plain text, called photo.png", PHOTO[:60], PHOTO[:-40], b"\x89PNG\r\n\x1a\n" + b"\0" * 100],
    ids=["empty", "text", "header only", "truncated", "zeros"],
)
def test_what_is_not_an_image_is_400(client, data):
    assert_error(client.post("/segment", files={"file": ("photo.png", data, "image/png")}), 400)
    assert_error(segment(client, data), 400)


def test_a_form_without_a_file_is_400(client):
    assert "`file`" in assert_error(client.post("/segment", files={"picture": PHOTO}), 400)
    assert_error(client.post("/segment", content=b"x", headers={"Content-Type": "multipart/form-data"}), 400)
    broken = {"Content-Type": "multipart/form-data; boundary=b"}
    assert_error(client.post("/segment", content=b"--b\r\nno header\r\n\r\n--b--", headers=broken), 400)


@pytest.mark.parametrize("body", [b"{", b'{"inputs": "%%%"}', b"\xff\xfe", b'{"inputs": ""}'])
def test_json_that_cannot_be_read_is_400(client, body):
    assert_error(client.post("/segment", content=body, headers={"Content-Type": "application/json"}), 400)


def test_an_unknown_address_is_404(client):
    for path in (
        "/nothing",
        "/static/../../pyproject.toml",
        "/static/%2e%2e/app.py",
        "/samples/../x.png",
        "/v2/models/x",
    ):
        assert_error(client.get(path), 404)


def test_another_method_is_405_and_says_which_is_allowed(client):
    response = client.get("/segment")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_body_that_states_too_many_bytes_is_413_before_it_is_sent(server):
    head = b"POST /segment HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 9999999999\r\n\r\n"
    answer = exchange(server, head)
    assert b" 413 " in answer.splitlines()[0]
    assert b'"max_bytes":20000000' in answer


def test_a_body_that_states_nothing_is_413_while_it_is_read(client):
    chunks = (b"\x89PNG\r\n\x1a\n" if n == 0 else bytes(1 << 20) for n in range(24))
    assert "20000000" in assert_error(client.post("/segment", content=chunks, headers=PNG), 413)


@pytest.mark.parametrize("form", ["form", "json"])
def test_a_large_image_is_413_in_every_form(client, form):
    data = PHOTO + bytes(20_000_000)
    sent = {"files": {"file": data}} if form == "form" else {"json": {"inputs": base64.b64encode(data).decode()}}
    assert "20000000" in assert_error(client.post("/segment", **sent), 413)


def test_a_decompression_bomb_is_413_by_its_stated_pixels(client):
    assert "400000000 pixels" in assert_error(segment(client, png(20_000, 20_000)), 413)


@pytest.mark.parametrize("content_type", ["text/plain", "image/gif", "application/x-www-form-urlencoded", "a" * 300])
def test_a_type_that_is_not_taken_is_415(client, content_type):
    error = assert_error(client.post("/segment", content=PHOTO, headers={"Content-Type": content_type}), 415)
    assert len(error) < 150


def test_a_gif_a_pdf_and_a_polyglot_called_png_are_415_or_400(client):
    gif = saved(photo(), "GIF")
    assert "image/gif" in assert_error(segment(client, gif), 415)
    assert "application/pdf" in assert_error(segment(client, b"%PDF-1.7\n" + PHOTO), 415)
    assert_error(segment(client, b"<html><script>alert(1)</script>" + PHOTO), 400)


def test_a_picture_with_a_page_behind_it_is_only_a_picture(client):
    response = segment(client, PHOTO + b"<script>alert(1)</script>", accept="image/png")
    assert response.status_code == 200
    assert b"script" not in response.content


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_k": 0},
        {"top_k": EXPERTS + 1},
        {"top_k": 1.5},
        {"snr_db": "nan"},
        {"snr_db": "inf"},
        {"snr_db": 121},
        {"channel": "water"},
        {"seed": -1},
        {"seed": 2**63},
        {"view": "x-ray"},
        {"tok_k": 2},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_422_and_named(client, parameters):
    assert next(iter(parameters)) in assert_error(segment(client, **parameters), 422)


@pytest.mark.parametrize("parameters", [{"top_k": True}, {"seed": "x"}, {"snr_db": False}, {"extra": 1}], ids=str)
def test_a_wrong_parameter_in_json_is_422_and_named(client, parameters):
    sent = {"inputs": base64.b64encode(PHOTO).decode(), "parameters": parameters}
    assert next(iter(parameters)) in assert_error(client.post("/segment", json=sent), 422)


def test_a_request_id_is_echoed_in_header_and_body(client):
    response = client.post("/segment", content=PHOTO, headers={**PNG, "X-Request-ID": "order-66/a"})
    assert response.headers["x-request-id"] == response.json()["id"] == "order-66/a"


@pytest.mark.parametrize("hostile", [b"a b", b"x" * 129, b"\xc3\xbc", b"", b"tab\there"], ids=str)
def test_a_hostile_request_id_is_replaced(client, hostile):
    given = client.get("/livez", headers={"X-Request-ID": hostile}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", given)


@pytest.mark.parametrize("path", ["/", "/docs", "/static/app.js", "/livez", "/nothing", "/metrics", "/segment"])
def test_security_headers_are_on_every_answer(client, path):
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["script-src"] == "'self'"
    assert policy["object-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "server" not in headers


def test_broken_http_does_not_end_the_server(server, client):
    assert b" 400 " in exchange(server, b"NOT HTTP AT ALL\r\n\r\n")
    assert client.get("/livez").json() == {"status": "alive"}

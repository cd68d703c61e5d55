"""Whom the server lets in: its own names and pages, and programs; no page of anybody else."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from playwright.sync_api import expect

from api.http.middleware.front_door import HEALTH, FrontDoor
from tests.api.http.conftest import REBOUND
from tests.api.http.page import upload
from tests.api.http.server_requests import PHOTO, PNG, assert_error, exchange, segment
from tests.api.http.stub_service import ask, assert_is_an_error, make_service
from tests.api.support import ADMIN_TOKEN, samples, wait_for

OURS = "http://127.0.0.1:8000"
MACHINE = socket.gethostname()
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def code(
    headers: dict[str, str], method: str = "POST", path: str = "/segment", *, bound: str = "127.0.0.1", hosts: Any = ()
) -> int:
    """The status with which a request is turned away; 0 for one that is let in."""
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    refusal = FrontDoor(bound, hosts).refusal({"method": method, "path": path, "headers": raw})
    return 0 if refusal is None else refusal.status_code


# Host

LOOPBACK = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "localhost",
    "LocalHost:9",
    "localhost.:9",
    "a.localhost",
]
ADDRESSES = ["10.0.0.5:8000", "203.0.113.7", "0.0.0.0:8000", "[2001:db8::7]:8000"]
STRANGERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "127.1",
]
NONSENSE = [
    "a b",
    "[::1",
    "[evil.example]",
    "localhost:8000:8000",
    "localhost:x",
    "evil.example@localhost:8000",
    "ü",
    "*",
]


@pytest.mark.parametrize("host", [*LOOPBACK, MACHINE, f"{MACHINE.upper()}:80", ""])
@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.5"])
def test_loopback_and_the_machines_own_name_are_ours_wherever_the_server_listens(host, bound):
    assert code({"Host": host}, bound=bound) == 0


@pytest.mark.parametrize("host", [*STRANGERS, *NONSENSE])
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_strangers_name_is_421_wherever_the_server_listens(host, bound):
    assert code({"Host": host}, bound=bound) == 421
    assert code({"Host": host}, "GET", "/", bound=bound) == 421


@pytest.mark.parametrize("host", ADDRESSES)
def test_an_address_is_ours_where_others_reach_us_and_not_on_loopback(host):
    for bound in ("0.0.0.0", "::", "192.0.2.1", "airmoe.example.org"):
        assert code({"Host": host}, bound=bound) == 0
    assert code({"Host": host}) == 421


def test_the_name_that_was_bound_to_is_ours():
    assert code({"Host": "Airmoe.example.org:8000"}, bound="airmoe.example.org") == 0


@pytest.mark.parametrize(
    ("hosts", "ours", "strange"),
    [
        (["Airmoe.Example.org."], "airmoe.example.org:8000", "www.airmoe.example.org"),
        (["airmoe.example.org:8443"], "airmoe.example.org", "example.org"),
        (["*.example.org"], "a.b.example.org", "example.org"),
        (["*.example.org"], "a.example.org.", "aexample.org"),
        (["10.0.0.5"], "10.0.0.5:8000", "10.0.0.6"),
        (["2001:DB8::7"], "[2001:db8::7]:8000", "[2001:db8::8]"),
    ],
)
def test_configured_names_are_ours_as_well(hosts, ours, strange):
    hosts = make_service(hosts=hosts).config.serve.hosts
    assert [code({"Host": host}, hosts=hosts) for host in (ours, strange, "localhost")] == [0, 421, 0]


def test_a_star_is_any_name_but_no_other_page():
    assert code({"Host": "evil.example"}, hosts=["*"]) == 0
    assert code({"Host": "localhost", "Origin": "http://evil.example"}, hosts=["*"]) == 403


def test_health_is_answered_under_every_name_and_to_no_other_page():
    for path in HEALTH:
        assert code({"Host": "lb.internal"}, "GET", path) == 0
        assert code({"Host": "lb.internal", "Origin": "http://evil.example"}, "GET", path) == 403


def test_a_request_without_a_host_is_no_browsers():
    assert code({}) == 0


# Origin and Sec-Fetch-Site


@pytest.mark.parametrize(
    ("host", "origin", "hosts"),
    [
        ("127.0.0.1:8000", OURS, []),
        ("LOCALHOST:8000", "http://localhost:8000", []),
        ("[::1]:8000", "http://[::1]:8000", []),
        ("localhost", "http://localhost", []),
        ("localhost:80", "http://localhost", []),
        ("airmoe.example.org:443", "https://airmoe.example.org", ["airmoe.example.org"]),
        ("airmoe.example.org", "https://airmoe.example.org", ["*.example.org"]),
        ("127.0.0.1:8000", "https://airmoe.example.org", ["airmoe.example.org"]),  # a proxy that passes on its own Host
        ("airmoe.example.org", "https://airmoe.example.org:8443", ["airmoe.example.org:8443"]),  # or no port
    ],
)
def test_our_own_page_may_ask(host, origin, hosts):
    given = {"Host": host, "Origin": origin}
    assert code(given, hosts=hosts) == code(given | {"Sec-Fetch-Site": "same-origin"}, hosts=hosts) == 0


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "", "https://evil.example", "http://localhost:8000", "http://127.0.0.1", "http://127.0.0.1:3000"),
        *("http://127.0.0.1:8000.evil.example", "http://evil.example/127.0.0.1:8000", "127.0.0.1:8000", "http://"),
        *("chrome-extension://127.0.0.1:8000", "file://", "http://*.example.org", "https://sub.example.org"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/segment"),
        ("POST", "/v2/models/airmoe/infer"),
        ("POST", "/experts/scale"),
        ("OPTIONS", "/segment"),
        ("GET", "/config"),
    ],
)
def test_a_page_of_somebody_else_is_403(method, path, origin):
    assert code({"Host": "127.0.0.1:8000", "Origin": origin}, method, path, hosts=["*.example.org"]) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything-new"])
@pytest.mark.parametrize(
    ("method", "path", "more", "expected"),
    [
        ("POST", "/segment", {}, 403),
        ("POST", "/segment", LINK, 403),  # a form
        ("GET", "/", {}, 403),
        ("GET", "/samples/rain.png", {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ("GET", "/readyz", {"sec-fetch-mode": "no-cors"}, 403),
        ("GET", "/", LINK | {"sec-fetch-dest": "iframe"}, 403),
        ("GET", "/", LINK, 0),
        ("HEAD", "/docs", LINK, 0),
        ("GET", "/", {"sec-fetch-mode": "navigate"}, 0),
    ],
)
def test_another_site_may_link_here_and_nothing_else(method, path, more, expected, site):
    assert code({"Host": "localhost"} | more | {"sec-fetch-site": site}, method, path) == expected


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_our_page_and_a_typed_address_are_let_in(site):
    assert code({"Host": "localhost", "Sec-Fetch-Site": site}) == 0


# the application


@pytest.mark.parametrize(("headers", "expected"), [({"Host": "evil.example"}, 421), ({"Origin": "null"}, 403)])
def test_a_refusal_is_an_error_like_any_other_declared_and_counted(headers, expected):
    service = make_service(api_keys=["a key does not help"])
    body = assert_is_an_error(
        ask(service, "POST", headers=PNG | headers | {"X-API-Key": "a key does not help"}), expected
    )
    assert "serve.hosts" in body["detail"]
    assert f'airmoe_requests_total{{code="{expected}"}} 1.0'.encode() in service.metrics.render()[0]
    schema = ask(make_service(), "GET", "/openapi.json").json()
    assert all({"403", "421"} <= one["responses"].keys() for path in schema["paths"].values() for one in path.values())


def test_a_long_name_is_not_repeated_at_length():
    assert len(ask(make_service(), headers={"Host": "e" * 5000}).content) < 300


# a real server


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "10.9.8.7"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
    ids=str,
)
def test_who_may_segment(client, headers, expected):
    response = client.post("/segment", content=PHOTO, headers=PNG | headers)
    if expected == 200:
        assert response.status_code == 200
    else:
        assert_error(response, expected)


def test_http_1_0_without_a_host_is_answered(server):
    assert b" 200 " in exchange(server, b"GET /livez HTTP/1.0\r\n\r\n").splitlines()[0]
    assert b" 200 " in exchange(server, b"GET /config HTTP/1.0\r\n\r\n").splitlines()[0]


@contextmanager
def strange_page(content: str) -> Iterator[str]:
    """Address of a page that another program serves on this machine: of another site than 127.0.0.1."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever).start()
        yield f"http://localhost:{other.server_port}/"
        other.shutdown()


def test_a_browser_keeps_to_it_and_a_strange_page_can_only_link_here(browser, server):
    attack = "fetch(url, {method: 'POST', mode: 'no-cors', body: new Blob(['x'], {type: 'text/plain'})})"
    page = browser.new_page()

    def refused() -> float:
        return samples(server.url).get('airmoe_requests_total{code="403"}', 0)

    with strange_page(f'<a href="{server.url}">here</a><img src="{server.url}/samples/rain.png">') as strange:
        before = refused()
        page.goto(strange, wait_until="load")
        page.evaluate(f"url => {attack}.then(() => null, () => null)", f"{server.url}/segment")
        assert wait_for(lambda: refused() == before + 2)  # the picture and the post
        page.get_by_text("here").click()
        expect(page.get_by_test_id("sample-rain")).to_be_visible()
        upload(page)
    page.close()


def test_a_name_that_was_rebound_to_this_machine_gets_no_page(browser, server):
    page = browser.new_page()
    response = page.goto(f"http://{REBOUND}:{server.port}/")
    assert response is not None
    assert response.status == 421
    page.close()


def test_no_process_that_the_server_started_inherits_its_token(server, client):
    assert segment(client).status_code == 200
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert any(process.name().startswith("ray::") for process in family)
    assert [process.name() for process in family if ADMIN_TOKEN in str(process.environ())] == []
    answer = client.post("/experts/scale", json={"experts": 4}, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
    assert answer.status_code == 200  # and it is the server's

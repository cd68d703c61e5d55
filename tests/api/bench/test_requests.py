"""Figures about requests answer to what they measure: each is shown a server with a known fault."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from api.bench import life
from api.bench.overhead import count_calls, measure_overhead
from api.bench.overload import Load, overload_ratio
from api.bench.requests import jpegs, mixed_ratio, photo_ratios


def silent(_: str) -> None:
    pass


@contextmanager
def server(answer: Callable[[dict[str, Any], bytes], str | None]) -> Iterator[int]:
    """Takes as long as `answer` does; the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(body)

        def do_GET(self) -> None:
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            said = answer({"accept": self.headers["Accept"], **parse_qs(urlsplit(self.path).query)}, body) or "ok"
            self.send_response(200)
            self.send_header("Server-Timing", "backbone;dur=1.0, read;dur=2.0")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128  # a crowd comes at once; the usual 5 resets those beyond

    with Listener(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()


def test_a_large_photo_that_takes_five_times_as_long_as_json_is_seen_as_that() -> None:
    def answer(asked: dict[str, Any], body: bytes) -> None:
        slow = body == b"large" and asked["accept"] == "application/json"
        time.sleep(0.25 if slow else 0.05)

    with server(answer) as port:
        found = photo_ratios(port, b"large", b"small", rounds=3, seconds=0.05, note=silent)
    assert 3 < found["photo_12mp_json"].value < 6
    assert 0.5 < found["photo_12mp_png"].value < 1.8
    assert not found["photo_12mp_json"].as_dict()["pass"]


def test_a_server_that_is_slower_with_every_other_setting_is_found_out() -> None:
    def answer(asked: dict[str, Any], body: bytes) -> None:
        time.sleep(0.05 if asked.get("snr_db", ["15"]) == ["15"] else 0.4)

    with server(answer) as port:
        found = mixed_ratio(port, b"image", rounds=2, seconds=0.5)
    assert found.value < 0.7


def test_the_overhead_is_that_of_a_whole_request_and_http_what_no_hop_accounts_for() -> None:
    with server(lambda asked, body: time.sleep(0.03)) as port:
        found = measure_overhead(port, b"image", rounds=2, seconds=0.2, target=40)
    assert 30 < found.value < 200
    assert found.detail["budget_ms"]["read"] == 2.0
    assert found.detail["budget_ms"]["http"] == pytest.approx(found.value - 3, abs=0.01)


def test_calls_are_counted_per_image() -> None:
    count = [0]

    def answer(asked: dict[str, Any], body: bytes) -> str:
        count[0] += 11 if body else 0
        return f"# HELP airmoe_actor_calls_total Calls\nairmoe_actor_calls_total {count[0]}.0\n"

    with server(answer) as port:
        assert count_calls(port, b"image", target=22).value == 11


def test_memory_that_requests_leave_behind_is_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [0]
    monkeypatch.setattr(life, "family", lambda: [None])
    monkeypatch.setattr(life, "own_mb", lambda _: 100.0 + images[0])

    def answer(asked: dict[str, Any], body: bytes) -> None:
        images[0] += 1
        time.sleep(0.01)

    with server(answer) as port:
        found = life.memory_growth(port, b"image", rounds=2, seconds=0.2)
    assert found.value > 1.05
    assert not found.as_dict()["pass"]


def test_own_memory_of_a_process_grows_with_what_it_holds() -> None:
    before = life.own_mb(psutil.Process())
    with mmap.mmap(-1, 50_000_000) as held:  # pages of its own: the heap may have room from what was freed before
        held.write(b"x" * len(held))
        assert life.own_mb(psutil.Process()) - before > 40


def test_the_pictures_are_one_in_several_sizes() -> None:
    from airmoe_ray.inference.decode import decode

    large, small = (decode(data, max_pixels=1 << 26) for data in jpegs((300, 400), (75, 100)))
    assert (large.size, small.size, large.format) == ((300, 400), (75, 100), "JPEG")


def test_goodput_counts_answers_in_time_and_nothing_else() -> None:
    load = Load(answered=[(9.0, 1.0), (10.0, 1.0), (11.0, 4.5), (12.0, 3.0), (14.0, 1.0)])
    assert load.goodput(10.0, 14.0, 4.0) == 2 / 4
    assert load.late(4.0) == 1


def test_a_server_that_collapses_under_a_crowd_is_found_out() -> None:
    at_once, lock = [0], threading.Lock()

    def answer(asked: dict[str, Any], body: bytes) -> str:
        with lock:
            at_once[0] += bool(body)
        time.sleep(0.04 if at_once[0] <= 8 else 0.02 * at_once[0])
        with lock:
            at_once[0] -= bool(body)
        return '{"settings": {"serve": {"deadline_s": 30}}}'

    with server(answer) as port:
        found = overload_ratio(port, b"image", rounds=1, seconds=1.0, crowd=40)
    assert found.value < 0.8
    assert (found.detail["late"], found.detail["wrong"], found.detail["refused"]) == (0, {}, 0)

"""Clients against a server that says what a test tells it to; a real one is in tests/api/http/test_python_client.py."""

import asyncio
import base64
import http.server
import io
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import airmoe_ray
from airmoe_ray import AsyncClient, Client, ServerError
from airmoe_ray.client import image_file
from airmoe_ray.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def index_png(mask: np.ndarray) -> str:
    picture = Image.fromarray(mask).convert("P")
    picture.putpalette([10, 20, 30, 40, 50, 60])
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def answer(label: str = "sky") -> dict[str, Any]:
    mask = np.array([[1, 1, 0]], np.uint8)
    return {
        "segments": [{"label": label, "id": 1, "score": 0.5, "area": 2, "mask": {"size": [1, 3], "counts": "02"}}],
        "mask": index_png(mask),
        **{part: {"of": part} for part in ("routing", "channel", "communication", "timings_ms")},
    }


class Scripted:
    """A server on loopback: replies by path, in order, the last one again and again."""

    def __init__(self) -> None:
        self.replies: dict[str, list[tuple[int, dict[str, str], Any]]] = {}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        script = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                script.seen.append((self.path, dict(self.headers), body))
                waiting = script.replies[self.path.partition("?")[0]]
                code, headers, content = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(sent))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(sent)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def says(self, path: str, *replies: tuple[int, dict[str, str], Any]) -> None:
        self.replies[path] = list(replies)

    def asked(self, path: str) -> int:
        return sum(seen.partition("?")[0] == path for seen, _, _ in self.seen)


@pytest.fixture
def script() -> Iterator[Scripted]:
    script = Scripted()
    script.says("/config", (200, {}, {"classes": [{"name": "road"}, {"name": "sky"}]}))
    script.says("/segment", (200, {}, answer()))
    yield script
    script.server.shutdown()
    script.server.server_close()


def sync_way(url: str, **settings: Any) -> Callable[..., Any]:
    def call(method: str, *arguments: Any, **parameters: Any) -> Any:
        with Client(url, **settings) as client:
            return getattr(client, method)(*arguments, **parameters)

    return call


def async_way(url: str, **settings: Any) -> Callable[..., Any]:
    def call(method: str, *arguments: Any, **parameters: Any) -> Any:
        async def run() -> Any:
            async with AsyncClient(url, **settings) as client:
                return await getattr(client, method)(*arguments, **parameters)

        return asyncio.run(run())

    return call


WAYS = pytest.mark.parametrize("way", [sync_way, async_way])


@WAYS
def test_an_answer_is_arrays_and_the_servers_own_account(script, way):
    found = way(script.url)("segment", b"file", seed=3, top_k=None)
    assert found.mask.tolist() == [[1, 1, 0]]
    assert found.mask.dtype == np.uint8
    assert found.classes == ("road", "sky")
    assert found.palette.tolist() == [[10, 20, 30], [40, 50, 60]]
    (segment,) = found.segments
    assert (segment.label, segment.id, segment.score, segment.area) == ("sky", 1, 0.5, 2)
    assert segment.mask.tolist() == [[True, True, False]]
    assert [found.routing, found.channel, found.communication, found.timings_ms] == [
        {"of": part} for part in ("routing", "channel", "communication", "timings_ms")
    ]
    assert found.raw == answer()
    path, headers, body = script.seen[0]
    assert (path, body) == ("/segment?format=rle&seed=3", b"file")
    assert "X-API-Key" not in {name.title() for name in headers}


@WAYS
def test_the_key_goes_with_every_request(script, way):
    script.says("/experts", (200, {}, {"experts": [{"id": 0}]}))
    assert way(script.url + "/", api_key="secret")("status") == [{"id": 0}]
    assert {name.lower(): value for name, value in script.seen[0][1].items()}["x-api-key"] == "secret"


def test_classes_are_asked_for_once_and_again_when_another_model_answers(script):
    with Client(script.url) as client:
        client.segment(b"1"), client.segment(b"2")
        assert script.asked("/config") == 1
        script.says("/segment", (200, {}, answer("tree")))
        script.says("/config", (200, {}, {"classes": [{"name": "road"}, {"name": "tree"}]}))
        assert client.segment(b"3").classes == ("road", "tree")


@WAYS
def test_a_busy_server_is_asked_again_when_it_says_so(script, way):
    busy = {"error": "64 images are under way already", "detail": None}
    script.says("/segment", (429, {"Retry-After": "0"}, busy), (503, {"Retry-After": "0"}, busy), (200, {}, answer()))
    assert way(script.url)("segment", b"file").mask.shape == (1, 3)
    assert script.asked("/segment") == 3


@WAYS
def test_a_server_that_stays_busy_is_given_up_with_its_own_words(script, way):
    script.says("/segment", (429, {"Retry-After": "0"}, {"error": "64 images are under way already", "detail": None}))
    with pytest.raises(ServerError, match="429, 64 images are under way already") as refused:
        way(script.url)("segment", b"file")
    assert refused.value.status == 429
    assert script.asked("/segment") == 10


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "3600"}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}])
def test_no_time_too_long_a_time_and_a_date_are_not_waited_for(script, headers):
    script.says("/segment", (503, headers, {"error": "no expert is up", "detail": "why"}))
    with pytest.raises(ServerError, match=r"503, no expert is up \(why\)"):
        Client(script.url).segment(b"file")
    assert script.asked("/segment") == 1


@WAYS
def test_a_refusal_has_its_status_and_is_one_line_even_after_pickling(script, way):
    script.says("/segment", (400, {}, {"error": "the body is not an image", "detail": None}))
    with pytest.raises(ServerError) as refused:
        way(script.url)("segment", b"file")
    error = pickle.loads(pickle.dumps(refused.value))
    assert (error.status, str(error)) == (400, f"{script.url}/segment: 400, the body is not an image")
    assert isinstance(error, UserError)


@WAYS
def test_where_nobody_listens_is_one_line_and_not_ready(way):
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"{url}: no server answers .*airmoe serve") as refused:
            way(url)("segment", b"file")
        assert refused.value.status is None
        assert len(str(refused.value).splitlines()) == 1
        assert way(url)("ready") is False


@pytest.mark.parametrize("url", ["http://localhost:abc", "no scheme", "ftp://localhost", ""])
def test_an_address_without_sense_is_one_line(url):
    with pytest.raises(ServerError, match="no server answers"):
        Client(url).status()


@WAYS
def test_ready_is_what_the_server_says(script, way):
    script.says("/readyz", (503, {"Retry-After": "2"}, {"error": "not ready"}), (200, {}, {"status": "ready"}))
    assert [way(script.url)("ready") for _ in range(2)] == [False, True]


def test_another_web_server_is_told_apart(script):
    script.says("/segment", (200, {}, b"<p>hello"))
    with pytest.raises(ServerError, match="not an AirMoE server"):
        Client(script.url).segment(b"file")


def test_an_image_may_be_a_file_bytes_a_picture_or_an_array(tmp_path):
    place = tmp_path / "photo.png"
    Image.fromarray(PIXELS).save(place)
    file = place.read_bytes()
    assert image_file(place) == image_file(str(place)) == image_file(file) == file
    for image in (PIXELS, Image.fromarray(PIXELS), Image.fromarray(PIXELS).convert("RGBA")):
        assert (np.asarray(Image.open(io.BytesIO(image_file(image))).convert("RGB")) == PIXELS).all()
    assert Image.open(io.BytesIO(image_file(PIXELS[..., 0]))).mode == "L"
    assert Image.open(io.BytesIO(image_file(Image.new("CMYK", (2, 2))))).mode == "RGB"


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Path("nowhere.png"), "nowhere.png: No such file"),
        (PIXELS.astype(float), "float64"),
        (PIXELS[None], r"\(1, 4, 6, 3\)"),
        (7, "int; expected a path"),
    ],
    ids=str,
)
def test_what_is_no_image_is_one_line(image, words):
    with pytest.raises(UserError, match=words):
        image_file(image)


def test_other_mistakes_are_one_line(script):
    with pytest.raises(UserError, match="huggingface"):
        Client(script.url).segment(b"file", format="huggingface")
    with pytest.raises(UserError, match="api_key"):
        Client(script.url, "schlüssel")
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = airmoe_ray.Clint
    assert {"Client", "AsyncClient"} <= set(dir(airmoe_ray))

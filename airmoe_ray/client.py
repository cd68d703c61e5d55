"""Clients of a running server, for programs: `Client(url).segment(image)`, and `AsyncClient` for event loops.

The one module of this package that speaks HTTP, and `httpx` is imported only when a client is made. What is asked, and
what to make of the replies, stands once, in generators that yield each request and each pause; the two clients differ
in how they carry these out.
"""

import asyncio
import base64
import io
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.errors import UserError

if TYPE_CHECKING:
    import httpx
    from PIL.Image import Image

ImageLike: TypeAlias = Union[str, Path, bytes, NDArray[np.uint8], "Image"]
"""The path or the bytes of an image file, pixels (H, W, 3) or (H, W), or a PIL image."""
T = TypeVar("T")

_TRIES = 10  # of a request while the server is busy and says when to come back
_LONGEST_WAIT_S = 30.0  # that a server may ask for


class ServerError(UserError):
    """A server refused a request (`status` is the HTTP status), or none answered (`status` is None)."""

    def __init__(self, message: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, status, retry_after_s)  # all, so that it survives pickling
        self.status, self.retry_after_s = status, retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, eq=False)
class Segment:
    """One class that is present in an image."""

    label: str
    id: int
    score: float  # mean softmax over its pixels
    area: int  # pixels
    ids: NDArray[np.uint8] = field(repr=False)  # class ids of the whole image (H, W)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True where the class is, (H, W)."""
        return self.ids == self.id


@dataclass(frozen=True, eq=False)
class Segmentation:
    """What a server says about one image; the account of it is as in its JSON."""

    mask: NDArray[np.uint8] = field(repr=False)  # class ids (H, W)
    classes: tuple[str, ...]  # names by class id
    palette: NDArray[np.uint8] = field(repr=False)  # RGB by class id
    segments: tuple[Segment, ...]
    raw: Mapping[str, Any] = field(repr=False)  # the whole answer

    @property
    def routing(self) -> Mapping[str, Any]:
        """Every expert's part, and whether the answer is degraded."""
        return self.raw["routing"]

    @property
    def channel(self) -> Mapping[str, Any]:
        """What the air did; its `seed` gives the same answer again."""
        return self.raw["channel"]

    @property
    def communication(self) -> Mapping[str, Any]:
        """Bits and channel uses on each link."""
        return self.raw["communication"]

    @property
    def timings_ms(self) -> Mapping[str, float]:
        """Time of each stage on the server [ms]."""
        return self.raw["timings_ms"]


@dataclass(frozen=True)
class _Request:
    """One request to send."""

    method: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)


_Flow: TypeAlias = Generator[_Request | float, Any, T]  # requests, each of which gets its reply, and pauses [s]


class _Asker:
    """What both clients ask, and how they read the replies."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        if api_key is not None and not api_key.isascii():
            raise UserError("api_key: a header cannot hold it; expected ASCII")
        self.url = url.rstrip("/")
        self._settings: dict[str, Any] = {"timeout": timeout_s, "headers": {"X-API-Key": api_key} if api_key else {}}
        self._classes: tuple[str, ...] = ()

    def _segmented(self, file: bytes, parameters: Mapping[str, Any]) -> _Flow[Segmentation]:
        """Ask for one image, with masks in the form that is made fastest; the names of all classes are kept."""
        if parameters.get("format") == "huggingface":
            raise UserError("format: huggingface leaves out all but labels and masks; expected png, rle or polygons")
        options = {
            "content": file,
            "params": {"format": "rle"} | {name: value for name, value in parameters.items() if value is not None},
            "headers": {"Content-Type": "application/octet-stream", "Accept": "application/json"},
        }
        raw = yield from self._object("POST", "/segment", has="mask", options=options)
        if any((found["label"],) != self._classes[found["id"] : found["id"] + 1] for found in raw["segments"]):
            config = yield from self._object("GET", "/config", has="classes")  # at first, or after another model came
            self._classes = tuple(entry["name"] for entry in config["classes"])
        return _segmentation(raw, self._classes)

    def _experts(self) -> _Flow[list[dict[str, Any]]]:
        body = yield from self._object("GET", "/experts", has="experts")
        return list(body["experts"])

    def _object(
        self, method: str, path: str, *, has: str, options: Mapping[str, Any] | None = None
    ) -> _Flow[dict[str, Any]]:
        """Ask for a JSON object with the field `has`; again if the server is busy and says after how many seconds."""
        for tries_left in reversed(range(_TRIES)):
            reply = yield _Request(method, path, options or {})
            try:
                return read_object(reply, self.url + path, has=has)
            except ServerError as error:
                if error.retry_after_s is None or error.retry_after_s > _LONGEST_WAIT_S or not tries_left:
                    raise
                wait_s = error.retry_after_s
            yield wait_s
        raise AssertionError("the last try returns or raises")


class Client(_Asker):
    """A client of the server at `url`; threads may share it. It closes its connections at the end of a `with` block.

    `Client("http://127.0.0.1:8000").segment("photo.jpg", snr_db=0).mask`
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 120.0) -> None:
        super().__init__(url, api_key, timeout_s)
        import httpx

        self._http = httpx.Client(**self._settings)

    def segment(self, image: ImageLike, **parameters: Any) -> Segmentation:
        """Segment one image; parameters are those of `POST /segment`: top_k, snr_db, channel, seed, …"""
        return self._run(self._segmented(image_file(image), parameters))

    def status(self) -> list[dict[str, Any]]:
        """Every expert with its node, GPUs, state, version, load, restarts and replicas."""
        return self._run(self._experts())

    def ready(self) -> bool:
        """Whether an image would be answered now; False where no server is."""
        try:
            return bool(self._send(_Request("GET", "/readyz")).is_success)
        except ServerError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, flow: _Flow[T]) -> T:
        reply: Any = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, float):
                reply = None
                time.sleep(step)
            else:
                reply = self._send(step)

    def _send(self, request: _Request) -> Any:
        with one_line(self.url):
            return self._http.request(request.method, self.url + request.path, **request.options)


class AsyncClient(_Asker):
    """`Client` for event loops: the same methods, to be awaited; `async with` closes its connections."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 120.0) -> None:
        super().__init__(url, api_key, timeout_s)
        import httpx

        self._http = httpx.AsyncClient(**self._settings)

    async def segment(self, image: ImageLike, **parameters: Any) -> Segmentation:
        """Segment one image; parameters are those of `POST /segment`: top_k, snr_db, channel, seed, …"""
        return await self._run(self._segmented(await asyncio.to_thread(image_file, image), parameters))

    async def status(self) -> list[dict[str, Any]]:
        """Every expert with its node, GPUs, state, version, load, restarts and replicas."""
        return await self._run(self._experts())

    async def ready(self) -> bool:
        """Whether an image would be answered now; False where no server is."""
        try:
            return bool((await self._send(_Request("GET", "/readyz"))).is_success)
        except ServerError:
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, flow: _Flow[T]) -> T:
        reply = None
        while True:
            try:
                step = flow.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            reply = await (asyncio.sleep(step) if isinstance(step, float) else self._send(step))

    async def _send(self, request: _Request) -> Any:
        with one_line(self.url):
            return await self._http.request(request.method, self.url + request.path, **request.options)


@contextmanager
def one_line(url: str) -> Iterator[None]:
    """Turn what goes wrong on the way to a server into one line."""
    import httpx

    try:
        yield
    except (httpx.RequestError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ServerError(
            f"{url}: no server answers ({why}); start one with `airmoe serve`, or give its address"
        ) from None


def check(reply: "httpx.Response", url: str) -> None:
    """Raise a server's refusal as one line, in the server's own words."""
    if reply.is_success:
        return
    body = _json(reply)
    told = reply.reason_phrase
    if isinstance(body, dict) and "error" in body:
        told = f"{body['error']}" + (f" ({body['detail']})" if body.get("detail") else "")
    wait = reply.headers.get("retry-after", "")
    raise ServerError(
        f"{url}: {reply.status_code}, {told}", reply.status_code, float(wait) if wait.isdecimal() else None
    )


def read_object(reply: "httpx.Response", url: str, *, has: str) -> dict[str, Any]:
    """The JSON object of a reply, which has the field `has`; an error, or another server's reply, is one line."""
    check(reply, url)
    body = _json(reply)
    if not isinstance(body, dict) or has not in body:
        raise ServerError(f"{url}: what answers there is not an AirMoE server; give the address of one")
    return body


def _json(reply: "httpx.Response") -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def image_file(image: ImageLike) -> bytes:
    """An image as the bytes of a file: those it has, or a PNG of its pixels."""
    from PIL import Image

    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise UserError(f"{image}: {error.strerror or error}; expected the path of an image file") from None
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
            raise UserError(f"image: {image.dtype} {image.shape}; expected uint8 (height, width, 3) or (height, width)")
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise UserError(f"image: {type(image).__name__}; expected a path, bytes, a PIL image or an array")
    buffer = io.BytesIO()
    (image if image.mode in ("L", "RGB", "RGBA", "P") else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _segmentation(raw: Mapping[str, Any], classes: tuple[str, ...]) -> Segmentation:
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(raw["mask"])))
    mask = np.asarray(picture)
    palette = np.array(picture.getpalette(), dtype=np.uint8).reshape(-1, 3)[: len(classes)]
    segments = tuple(
        Segment(found["label"], found["id"], found["score"], found["area"], mask) for found in raw["segments"]
    )
    return Segmentation(mask, classes, palette, segments, raw)

"""Requests to a real server, and what their answers must look like."""

import io
import re
import socket
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.api.http.images import photo, saved
from tests.api.support import Server

PHOTO = saved(photo(48, 80))
PNG = {"Content-Type": "image/png"}


def segment(client: httpx.Client, data: bytes = PHOTO, *, accept: str = "*/*", **parameters: Any) -> httpx.Response:
    return client.post("/segment", content=data, headers={**PNG, "Accept": accept}, params=parameters)


def mask_of(client: httpx.Client, data: bytes = PHOTO, **parameters: Any) -> np.ndarray:
    response = segment(client, data, accept="application/x-npy", **parameters)
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(response.content))


def picture(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def assert_error(response: httpx.Response, code: int) -> str:
    assert response.status_code == code, response.text
    body = response.json()
    assert body.keys() == {"error", "detail"}
    assert not re.search(r"Traceback|\.py\b|site-packages|/tmp/|/home/|/root/", response.text)
    return body["error"]


def exchange(server: Server, request: bytes) -> bytes:
    """Bytes out, bytes in, until the other side has nothing more to say."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received or not received.rstrip().endswith((b"}", b">")):
            part = connection.recv(65536)
            if not part:
                break
            received += part
    return received

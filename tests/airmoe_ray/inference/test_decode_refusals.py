"""Bytes that are no image, too large a one, or a trap: one clear line, and never much memory."""

import contextlib
import pickle
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import PngImagePlugin

from airmoe_ray.inference.decode import (
    MEDIA_TYPES,
    ImageError,
    NotAnImageError,
    TooManyPixelsError,
    UnsupportedTypeError,
    decode,
    sniff,
)
from tests.api.http.images import LOSSLESS, photo, png, rgb, saved

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # pytest undoes the filter of `decode`


@pytest.mark.parametrize("kind", [*LOSSLESS, "JPEG"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_truncated_image_is_refused(kind: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = saved(noise, kind, **LOSSLESS.get(kind, {}))
    with pytest.raises(NotAnImageError, match="truncated"):
        rgb(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"", b"\0", b"hello, I am a .png", b"BMW", b"II*\0", b"\xff\xd8\xff", b"RIFF1234WEBP",
                                  png(0, 5), png(5, 5), png(5, 5, (b"IDAT", b"junk"))])  # fmt: skip
def test_what_is_not_an_image_is_told_in_one_line(data: bytes) -> None:
    with pytest.raises(NotAnImageError) as caught:
        rgb(data)
    message = str(caught.value)
    assert 10 < len(message) < 120
    assert not any(mark in message for mark in ("\n", "/", "0x", "Traceback", "PIL"))
    assert caught.value.status == 400


@pytest.mark.parametrize(("data", "name"), [
    (saved(photo(), "GIF"), "image/gif"),
    (b"\0\0\0\x18ftypheic", "image/heic"),
    (b"\0\0\0\x18ftypavif", "image/avif"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", "application/postscript"),
    (b"%PDF-1.7", "application/pdf"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
])  # fmt: skip
def test_other_kinds_are_named_and_refused(data: bytes, name: str) -> None:
    assert sniff(data) == name
    assert name not in MEDIA_TYPES
    with pytest.raises(UnsupportedTypeError, match=f"^{re.escape(name)} is not taken; send PNG") as caught:
        rgb(data)
    assert caught.value.status == 415


@pytest.mark.parametrize("kind", [*LOSSLESS, "JPEG"])
def test_too_many_pixels_are_counted_and_refused(kind: str) -> None:
    data = saved(photo(50, 40), kind)
    assert decode(data, max_pixels=2000).rgb.shape == (50, 40, 3)
    with pytest.raises(TooManyPixelsError, match="2000 pixels, the limit is 1999") as caught:
        decode(data, max_pixels=1999)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.pixels, again.limit, again.status, str(again)) == (2000, 1999, 413, str(caught.value))


def webp_of(side: int) -> bytes:
    """A real WebP whose header is made to state another size."""
    data = bytearray(saved(photo(), "WEBP", lossless=True))
    assert data[12:16] == b"VP8L"
    data[21:25] = (side - 1 | (side - 1) << 14).to_bytes(4, "little")
    return bytes(data)


BOMBS = {
    "png": png(60_000, 60_000, (b"IDAT", zlib.compress(b"\0" * 1000))),
    "png beyond Pillow's own limit": png(2**31 - 1, 2**31 - 1, (b"IDAT", b"")),
    "bmp": b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, 12_000, 12_000, 1, 24, 0, 0, 0, 0, 0, 0),
    "webp": webp_of(13_000),
    "webp beyond Pillow's own limit": webp_of(16_384),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(name: str) -> None:
    code = (
        "import resource, sys; from airmoe_ray.inference.decode import *; data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: decode(data, max_pixels=50_000_000)\n"
        "except TooManyPixelsError as error: print(error.pixels > 5e7)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000)  # kB"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    result = subprocess.run(command, input=BOMBS[name], capture_output=True, check=True)
    assert (result.stdout.split(), result.stderr) == ([b"True", b"True"], b"")


@pytest.mark.parametrize("chunk", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_bomb_in_a_text_chunk_is_refused(chunk: bytes) -> None:
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    body = b"a\0" + {b"zTXt": b"\0", b"iTXt": b"\1\0\0\0", b"iCCP": b"\0"}[chunk] + bomb
    with pytest.raises(NotAnImageError):
        rgb(png(1, 1, (chunk, body), (b"IDAT", zlib.compress(b"\0\1\2\3"))))
    assert PngImagePlugin.MAX_TEXT_CHUNK < 5e6


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([*LOSSLESS, "JPEG"]), st.data())
def test_damage_anywhere_gives_pixels_or_an_image_error(kind: str, draw: st.DataObject) -> None:
    data = bytearray(saved(photo(12, 16), kind))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        assert rgb(bytes(data)).ndim == 3

"""Bytes from strangers: whatever they are, they become right pixels or one clear line, and never much memory."""

import base64
import contextlib
import io
import pickle
import re
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.pictures import colour_mask, overlay
from api import encode
from api.images import (
    MEDIA_TYPES,
    ImageError,
    NotAnImageError,
    TooManyPixelsError,
    UnsupportedTypeError,
    decode,
    sniff,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # pytest undoes the filter of api.images
LIMIT = 1_000_000
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}}
CLASSES = ClassTable(("road", "sky", "car"), ((128, 64, 128), (70, 130, 180), (0, 0, 142)))


def photo(height: int = 24, width: int = 40) -> UInt8Array:
    """Smooth, with a different colour in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([y * 255 // height, x * 255 // width, (x + y) * 2], axis=2).astype(np.uint8)


def saved(image: Image.Image | UInt8Array, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> UInt8Array:
    return decode(data, max_pixels=LIMIT).rgb


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of a stated size and given further chunks."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *chunks, (b"IEND", b"")]
    body = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_lossless_image_comes_back_bit_for_bit(kind: str) -> None:
    data = saved(photo(), kind, **LOSSLESS[kind])
    picture = decode(data, max_pixels=LIMIT)
    assert (picture.rgb == photo()).all()
    assert (picture.rgb.dtype, picture.rgb.flags.c_contiguous, picture.format) == (np.uint8, True, kind)
    assert sniff(data) in MEDIA_TYPES


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_comes_back_nearly(options: dict[str, Any]) -> None:
    assert np.abs(rgb(saved(photo(), "JPEG", quality=95, **options)).astype(int) - photo()).mean() < 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_undone(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # PIL.Image.Transpose
    upright = Image.fromarray(photo())
    expected = np.asarray(upright.transpose(undo[orientation]) if orientation > 1 else upright)
    options = LOSSLESS.get(kind, {"quality": 95, "subsampling": 0})
    got = rgb(saved(upright, kind, exif=exif, **options))
    assert got.shape == expected.shape
    assert np.abs(got.astype(int) - expected).mean() < 3


def test_broken_exif_data_do_not_spoil_the_image() -> None:
    data = saved(photo(), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert (rgb(data) == photo()).all()


@pytest.mark.parametrize(("mode", "colour", "seen"), [
    ("1", 1, (255, 255, 255)),
    ("L", 100, (100, 100, 100)),
    ("LA", (100, 255), (100, 100, 100)),
    ("LA", (100, 0), (255, 255, 255)),
    ("RGBA", (200, 0, 0, 255), (200, 0, 0)),
    ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
    ("RGBA", (0, 0, 0, 51), (204, 204, 204)),
    ("I;16", 257 * 100, (100, 100, 100)),
    ("I;16", 65535, (255, 255, 255)),
])  # fmt: skip
def test_every_kind_of_png_shows_the_colour_that_people_see(mode: str, colour: Any, seen: Any) -> None:
    image = Image.new(mode, (3, 2), colour)
    assert (rgb(saved(image)) == seen).all()


def test_a_palette_shows_its_colours_and_white_where_it_is_transparent() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((0, 0), 0)
    assert rgb(saved(image))[0, :2].tolist() == [[10, 20, 30], [40, 50, 60]]
    assert rgb(saved(image, transparency=0))[0, :2].tolist() == [[255, 255, 255], [40, 50, 60]]


@pytest.mark.parametrize(("colour", "samples"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_16_bit_samples_keep_their_brightness(colour: int, samples: int) -> None:
    pixel = [0x8080] * samples if samples in {1, 3} else [*[0x8080] * (samples - 1), 0xFFFF]
    row = b"\0" + struct.pack(f">{samples}H", *pixel) * 5
    data = png(5, 2, (b"IDAT", zlib.compress(row * 2)), depth=16, colour=colour)
    assert (rgb(data) == 128).all()


@pytest.mark.parametrize(("values", "greys"), [
    ([0.0, 0.5, 1.0], [0, 128, 255]),
    ([0.0, 100.4, 255.0], [0, 100, 255]),
    ([0.0, 25700.0, 65535.0], [0, 100, 255]),
    ([-3.0, 0.0, 3.0], [0, 128, 255]),
    ([-3e38, 0.0, 3e38], [0, 128, 255]),
    ([float("nan"), 1.0, float("inf")], [0, 255, 0]),
    ([7e9, 7e9, 7e9], [0, 0, 0]),
])  # fmt: skip
def test_float_samples_are_scaled_from_the_range_they_are_in(values: list[float], greys: list[int]) -> None:
    got = rgb(saved(Image.fromarray(np.array([values], np.float32)), "TIFF"))
    assert got[0, :, 0].tolist() == greys


def test_32_bit_integers_are_scaled_and_not_clipped() -> None:
    got = rgb(saved(Image.fromarray(np.array([[0, 2**30, 2**31 - 1]], np.int32)), "TIFF"))
    assert got[0, :, 1].tolist() == [0, 128, 255]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_shows_paper_as_white_and_ink_as_dark(kind: str) -> None:
    options = {"quality": 95} if kind == "JPEG" else {}
    assert rgb(saved(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), kind, **options)).min() > 250
    assert rgb(saved(Image.new("CMYK", (16, 16), (0, 0, 0, 255)), kind, **options)).max() < 5


def test_ycck_as_photoshop_writes_it_is_understood() -> None:
    white = saved(
        Image.new("CMYK", (16, 16), (255, 127, 127, 0)), "JPEG", quality=100
    )  # stored inverted: 0 128 128 255
    at = white.index(b"Adobe") + 11  # the byte that says how colours are transformed
    assert rgb(white[:at] + b"\2" + white[at + 1 :]).min() > 250


def test_lab_becomes_rgb() -> None:
    assert np.abs(rgb(saved(Image.new("LAB", (4, 4), (255, 128, 128)), "TIFF")).astype(int) - 255).max() <= 2
    red = rgb(saved(Image.new("LAB", (4, 4), (136, 208, 195)), "TIFF"))[0, 0]
    assert red[0] > 240
    assert red[1:].max() < 20


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_taken(kind: str) -> None:
    frames = [Image.fromarray(np.full_like(photo(), 255)), Image.new("RGB", (40, 24))]
    data = saved(Image.fromarray(photo()), kind, save_all=True, append_images=frames, **LOSSLESS[kind])
    assert (rgb(data) == photo()).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1)])
def test_extreme_shapes_are_images_too(size: tuple[int, int]) -> None:
    assert rgb(saved(photo(*size))).shape == (*size, 3)


@pytest.mark.parametrize("tail", [b"PK\x03\x04" * 99, b"<html><script>alert(1)</script>", b"\0" * 5000])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_what_follows_an_image_is_not_looked_at(kind: str, tail: bytes) -> None:
    assert (rgb(saved(photo(), kind, **LOSSLESS[kind]) + tail) == photo()).all()


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
        "import resource, sys; from api.images import *; data = sys.stdin.buffer.read()\n"
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


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 3000), st.integers(0, 99))
def test_pngs_that_leave_read_back_as_what_they_show(height: int, width: int, band: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    mask = draw.integers(0, 3, (height, width), dtype=np.uint8)
    image = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_BAND_PIXELS", band)
        index = Image.open(io.BytesIO(encode.index_png(mask, CLASSES)))
        assert (index.mode, np.asarray(index).tolist()) == ("P", mask.tolist())
        assert (np.asarray(index.convert("RGB")) == colour_mask(mask, CLASSES)).all()
        assert (rgb(encode.colour_png(mask, CLASSES)) == colour_mask(mask, CLASSES)).all()
        assert (rgb(encode.overlay_png(image, mask, CLASSES)) == overlay(image, mask, CLASSES)).all()


def test_the_array_reads_back() -> None:
    mask = np.random.default_rng(0).integers(0, 3, (17, 23), dtype=np.uint8)
    back = np.load(io.BytesIO(encode.npy(mask)), allow_pickle=False)
    assert (back.dtype, back.tolist()) == (np.uint8, mask.tolist())


def test_segments_are_the_classes_present_and_their_masks_add_up() -> None:
    mask = np.zeros((20, 30), np.uint8)
    mask[5:15, 10:20] = 2
    found = encode.segments(mask, np.array([0.9, 0.0, 0.6]), np.array([500, 0, 100]), CLASSES)
    assert [(s["label"], s["id"], s["score"], s["area"]) for s in found] == [
        ("road", 0, 0.9, 500),
        ("car", 2, 0.6, 100),
    ]
    images = [Image.open(io.BytesIO(base64.b64decode(segment["mask"]))) for segment in found]
    assert all(image.mode == "L" for image in images)
    assert (np.asarray(images[1]) == 255 * (mask == 2)).all()
    assert (sum(np.asarray(image).astype(int) for image in images) == 255).all()


def test_an_overlay_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        encode.overlay_png(photo(5, 6), np.zeros((6, 5), np.uint8), CLASSES)


def test_a_mask_takes_no_more_room_than_pillow_needs() -> None:
    y, x = np.mgrid[0:360, 0:640]
    mask = ((np.hypot(x - 300, y - 100) > 90) + (y > 200 + 20 * np.sin(x / 40))).astype(np.uint8)
    assert len(encode.binary_png(mask, 1)) < len(saved(255 * (mask == 1).astype(np.uint8), compress_level=1))

"""Images from strangers: of whatever kind, they become the pixels that people see."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.inference.decode import (
    MEDIA_TYPES,
    decode,
    sniff,
)
from tests.api.http.images import LIMIT, LOSSLESS, photo, png, rgb, saved

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # pytest undoes the filter of `decode`


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

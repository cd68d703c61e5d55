"""Masks on their way out: PNGs, arrays and segments that read back as what they show."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from airmoe_ray.inference.pictures import colour_mask, overlay
from api.http.codec import encode
from tests.api.http.images import CLASSES, photo, rgb, saved


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
    assert [(s.label, s.id, s.score, s.area) for s in found] == [
        ("road", 0, 0.9, 500),
        ("car", 2, 0.6, 100),
    ]
    images = [Image.open(io.BytesIO(base64.b64decode(segment.mask))) for segment in found]
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

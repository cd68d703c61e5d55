"""Photographs of phones: fewer pixels are decoded than they have, and what is not computed changes no mask."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from airmoe_ray.config_file import load_config
from airmoe_ray.data.scenes import render_scene
from airmoe_ray.inference import masks
from airmoe_ray.inference.decode import TooManyPixelsError, decode
from airmoe_ray.inference.masks import Prepared, mask_and_scores, prepare_image
from tests.api.http.images import photo, saved

LIMIT = 50_000_000


@pytest.mark.parametrize(("long_side", "width"), [(800, 800), (201, 800), (200, 400), (101, 400), (75, 200), (1, 100)])
def test_a_jpeg_is_decoded_at_the_smallest_size_that_is_not_below_twice_what_is_wanted(
    long_side: int, width: int
) -> None:
    picture = decode(saved(photo(600, 800), "JPEG"), max_pixels=LIMIT, long_side=long_side)
    assert picture.rgb.shape == (width * 3 // 4, width, 3)
    assert picture.size == (600, 800)
    assert picture.whole == (width == 800)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_other_kinds_are_decoded_whole(kind: str) -> None:
    assert decode(saved(photo(600, 800), kind), max_pixels=LIMIT, long_side=100).whole


@pytest.mark.parametrize("orientation", range(1, 9))
def test_fewer_pixels_show_the_same_upright_picture(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(photo(600, 800), "JPEG", exif=exif, quality=95)
    whole, fewer = (decode(data, max_pixels=LIMIT, long_side=side) for side in (None, 100))
    assert fewer.size == whole.size == whole.rgb.shape[:2] == ((800, 600) if orientation > 4 else (600, 800))
    expected = np.asarray(Image.fromarray(whole.rgb).resize(fewer.rgb.shape[1::-1], Image.Resampling.BOX))
    assert np.abs(fewer.rgb.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_printers_jpegs_are_decoded_at_a_part_of_their_size_too(mode: str) -> None:
    data = saved(Image.fromarray(photo(600, 800)).convert(mode), "JPEG")
    assert decode(data, max_pixels=LIMIT, long_side=100).rgb.shape == (150, 200, 3)


def test_the_limit_counts_the_pixels_of_the_image_and_not_those_that_would_be_decoded() -> None:
    with pytest.raises(TooManyPixelsError, match="480000 pixels"):
        decode(saved(photo(600, 800), "JPEG"), max_pixels=479_999, long_side=100)


def test_what_the_model_sees_hardly_depends_on_how_many_pixels_were_decoded() -> None:
    config = load_config("quickstart", [])
    data = saved(render_scene(990_001, height=1501, width=2003).image, "JPEG", quality=90)
    side = config.data.image_size
    whole, fewer = (decode(data, max_pixels=LIMIT, long_side=at) for at in (None, side))
    assert fewer.rgb.size * 3 < whole.rgb.size
    seen = [prepare_image(picture.rgb, config, 32, original=picture.size) for picture in (whole, fewer)]
    assert (seen[0].valid, seen[0].original) == (seen[1].valid, seen[1].original)
    assert np.abs(seen[0].padded.astype(int) - seen[1].padded).mean() < 1.5


def logits_and_image(size: tuple[int, int]) -> tuple[torch.Tensor, Prepared]:
    """Large fields, and one class that wins a few pixels only."""
    logits = torch.nn.functional.interpolate(
        torch.randn(1, 6, 5, 6, generator=torch.Generator().manual_seed(0)), size=(60, 80), mode="bicubic"
    )[0]
    logits *= 6
    logits[5] = -50
    logits[5, 30, 40] = logits[:5, 30, 40].max() + 20
    return logits, Prepared(np.zeros((480, 640, 3), np.uint8), (480, 640), size)


def test_the_scores_of_a_sample_are_those_of_all_pixels_nearly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, image = logits_and_image((900, 1200))
    mask, score, area = mask_and_scores(logits, image)
    assert 0 < area[5] < 300
    monkeypatch.setattr(masks, "_SCORED_PIXELS", 40_000)
    again, sampled, area_too = mask_and_scores(logits, image)
    assert (mask == again).all()
    assert area.tolist() == area_too.tolist()
    assert sampled[:5] == pytest.approx(score[:5], abs=3e-3)
    assert sampled[5] == pytest.approx(score[5], abs=0.1)
    assert (sampled != score).any(), "all pixels were counted"


def test_a_class_smaller_than_the_gaps_of_the_sample_has_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SCORED_PIXELS", 100)
    logits, image = logits_and_image((900, 1200))
    mask, score, area = mask_and_scores(logits, image)
    every = int((mask.size / 100) ** 0.5)
    assert area[5]
    assert not (mask[::every, ::every] == 5).any()
    assert 1 / 6 < score[5] <= 1


def test_logits_that_are_no_numbers_do_not_stop_the_mask() -> None:
    logits, image = logits_and_image((300, 400))
    logits[2, 10, 10] = float("nan")
    assert mask_and_scores(logits, image)[0].shape == (300, 400)


def test_a_photograph_of_a_phone_is_decoded_in_little_memory() -> None:
    code = (
        "import resource, sys; from airmoe_ray.inference.decode import *; data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "decode(data, max_pixels=50_000_000, long_side=640)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)  # kB"
    )
    data = saved(photo(3000, 4000), "JPEG")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], input=data, capture_output=True, check=True)
    assert int(result.stdout) < 24_000  # all its pixels take 36 MB, and are there twice

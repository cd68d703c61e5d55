"""From logits to masks and scores: the tiled, separable way is the plain formula, in bounded memory and less time."""

import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.transforms import fit_size
from airmoe_ray.inference import masks as inference
from airmoe_ray.inference.masks import Prepared, mask_and_scores, mask_of

SIZES = [(1, 1), (1, 700), (700, 1), (37, 53), (192, 256), (300, 411), (129, 257), (521, 77)]


def fitted(original: tuple[int, int], *, long_side: int | None = 64, multiple: int = 16) -> Prepared:
    """An image of a given size, fitted (None keeps its size) and padded."""
    valid = original if long_side is None else fit_size(*original, long_side)
    padded = tuple(-(-side // multiple) * multiple for side in valid)
    return Prepared(np.zeros((*padded, 3), np.uint8), valid, original)


def random_logits(image: Prepared, *, classes: int = 5, stride: int = 8, seed: int = 0) -> Tensor:
    height, width = (side // stride for side in image.padded.shape[:2])
    return 3 * torch.randn(classes, height, width, generator=torch.Generator().manual_seed(seed))


def plain(logits_Chw: Tensor, image: Prepared, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits (C, H, W) at the original size, all at once."""
    logits = interpolate(logits_Chw[None].to(dtype), size=image.padded.shape[:2], mode="bilinear")
    logits = logits[..., : image.valid[0], : image.valid[1]]
    return interpolate(logits, size=image.original, mode="bilinear")[0]


def assert_same_mask(mask: UInt8Array, logits_CHW: Tensor) -> None:
    """Equal to the argmax, but where the two best logits differ by less than float32 can tell."""
    first, second = logits_CHW.topk(2, dim=0).values
    decided = (first - second > 1e-5).numpy()
    assert decided.mean() > 0.99
    assert (mask == logits_CHW.argmax(dim=0).numpy())[decided].all()


@pytest.mark.parametrize("long_side", [64, 100, None])
@pytest.mark.parametrize("size", SIZES)
def test_the_mask_is_that_of_the_plain_formula(size: tuple[int, int], long_side: int | None) -> None:
    image = fitted(size, long_side=long_side)
    logits = random_logits(image)
    mask = mask_of(logits, image)
    assert (mask.shape, mask.dtype) == (size, np.uint8)
    assert_same_mask(mask, plain(logits, image))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 70), st.sampled_from([1, 7, 40]), st.integers(0, 99))
def test_the_mask_does_not_depend_on_the_tiles(height: int, width: int, long_side: int, tile: int, seed: int) -> None:
    image = fitted((height, width), long_side=long_side)
    logits = random_logits(image, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "_TILE_ROWS", tile)
        patch.setattr(inference, "_TILE_PIXELS", 3 * tile)
        assert_same_mask(mask_of(logits, image), plain(logits, image))


def test_the_first_of_equal_classes_wins() -> None:
    image = fitted((40, 60))
    assert (mask_of(torch.zeros(4, 8, 8), image) == 0).all()
    mask, score, area = mask_and_scores(torch.zeros(4, 8, 8), image)
    assert (mask == 0).all()
    assert score.tolist() == [0.25, 0, 0, 0]
    assert area.tolist() == [2400, 0, 0, 0]


@pytest.mark.parametrize("size", SIZES)
def test_a_score_is_the_mean_softmax_over_the_pixels_a_class_won(size: tuple[int, int]) -> None:
    image = fitted(size)
    logits = random_logits(image)
    mask, score, area = mask_and_scores(logits, image)
    probability = plain(logits, image).softmax(dim=0).numpy()
    assert (mask == mask_of(logits, image)).all()
    for c in range(len(logits)):
        won = mask == c
        assert area[c] == won.sum()
        assert score[c] == pytest.approx(probability[c][won].mean() if won.any() else 0.0, abs=1e-5)


def test_logits_of_any_range_give_scores_in_the_unit_interval() -> None:
    image = fitted((90, 120))
    _, score, area = mask_and_scores(1e4 * random_logits(image), image)
    assert area.sum() == 90 * 120
    assert ((score[area > 0] > 0.2) & (score[area > 0] <= 1 + 1e-6)).all()


def test_half_precision_logits_that_require_grad_are_taken() -> None:
    image = fitted((50, 70))
    logits = random_logits(image).half().requires_grad_()
    assert (mask_of(logits, image) == mask_of(logits.detach().float(), image)).all()


@pytest.mark.parametrize("size", [(3000, 4000), (2, 1_500_000), (1_500_000, 2)])
def test_memory_is_a_few_tiles_however_large_the_image(size: tuple[int, int]) -> None:
    image = fitted(size, long_side=256)
    code = (  # in a process of its own: a peak can only be read since the start
        "import resource, numpy as np, torch; from airmoe_ray.inference.masks import *\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB\n"
        f"image = Prepared(np.zeros({image.padded.shape}, np.uint8), {image.valid}, {image.original})\n"
        f"logits = torch.randn(20, *{tuple(random_logits(image).shape[1:])})\n"
        "mask_and_scores(logits[:, :1, :1], Prepared(np.zeros((8, 8, 3), np.uint8), (8, 8), (8, 8)))\n"
        "before = peak(); mask_and_scores(logits, image); print(peak() - before)"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64_000  # all at once: 240 to 960 MB


def test_it_is_faster_than_the_plain_formula_at_serving_size() -> None:
    image = fitted((192, 256), long_side=256)
    logits = random_logits(image, classes=12)
    seconds: dict[str, list[float]] = {"tiled": [], "plain": []}
    for _ in range(9):
        begun = time.process_time()
        mask_of(logits, image)
        between = time.process_time()
        plain(logits, image, torch.float32).argmax(dim=0).to(torch.uint8)
        seconds["tiled"].append(between - begun)
        seconds["plain"].append(time.process_time() - between)
    assert statistics.median(seconds["tiled"]) < statistics.median(seconds["plain"])

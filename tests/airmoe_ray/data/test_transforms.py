"""Image and label stay aligned under every transform, and randomness comes from the generator alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from airmoe_ray.data.base import IGNORE, UInt8Array
from airmoe_ray.data.transforms import Augmentation, apply_view, augment, fit, fit_size, pad_to_multiple
from airmoe_ray.errors import ConfigError

NO_COLOUR = Augmentation(brightness=0, contrast=0, saturation=0, hue=0)


def two_tone(height: int = 48, width: int = 64) -> tuple[UInt8Array, UInt8Array]:
    """A label of classes 0 and 1 in off-centre blocks, and the image that paints them 0 and 200."""
    label = np.zeros((height, width), np.uint8)
    label[5:20, 8:30] = 1
    label[30:, 40:52] = 1
    return np.repeat(200 * label[..., None], 3, axis=2), label


def agreement(image: UInt8Array, label: UInt8Array) -> float:
    """Share of the pixels whose colour says the same class as the label; interpolation blurs only the seams."""
    counted = label != IGNORE
    return float(((image[..., 0] > 100) == label)[counted].mean())


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), long_side=st.integers(1, 2000))
def test_fit_size_sets_the_long_side_and_keeps_the_aspect(height: int, width: int, long_side: int) -> None:
    new_h, new_w = fit_size(height, width, long_side)
    assert max(new_h, new_w) == long_side
    scale = long_side / max(height, width)
    assert abs(new_h - height * scale) <= 1
    assert abs(new_w - width * scale) <= 1


@pytest.mark.parametrize("long_side", [16, 64, 150])
def test_fit_keeps_image_and_label_aligned(long_side: int) -> None:
    image, label = (fit(pixels, long_side) for pixels in two_tone())
    assert image.shape[:2] == label.shape == fit_size(48, 64, long_side)
    assert set(np.unique(label)) == {0, 1}
    assert agreement(image, label) > 0.9


def test_padding_repeats_the_border_and_ignores_it_in_the_label() -> None:
    image, label = two_tone(50, 70)
    padded, valid = pad_to_multiple(image, 16)
    padded_label, _ = pad_to_multiple(label, 16)
    assert (padded.shape, padded_label.shape, valid) == ((64, 80, 3), (64, 80), (50, 70))
    assert (padded[:50, :70] == image).all()
    assert (padded[50:, :70] == image[-1]).all()
    assert (padded_label[50:] == IGNORE).all()
    assert pad_to_multiple(padded, 16)[0].shape == padded.shape


@pytest.mark.parametrize("seed", range(8))
def test_augmentation_moves_image_and_label_together(seed: int) -> None:
    image, label = two_tone()
    new_image, new_label = augment(image, label, rng=np.random.default_rng(seed), how=NO_COLOUR)
    assert (new_image.shape, new_label.shape) == (image.shape, label.shape)
    assert set(np.unique(new_label)) <= {0, 1}
    assert agreement(new_image, new_label) > 0.95


def test_a_flip_alone_is_exact_and_colour_leaves_the_label() -> None:
    image, label = two_tone()
    flip = Augmentation(1.0, (1, 1), (1, 1), brightness=0, contrast=0, saturation=0, hue=0)
    flipped = augment(image, label, rng=np.random.default_rng(0), how=flip)
    assert (flipped[0] == image[:, ::-1]).all()
    assert (flipped[1] == label[:, ::-1]).all()
    colour = Augmentation(0.0, (1, 1), (1, 1))
    jittered = augment(image, label, rng=np.random.default_rng(0), how=colour)
    assert (jittered[0] != image).any()
    assert (jittered[1] == label).all()


def test_the_same_generator_gives_the_same_augmentation_whatever_torch_has_drawn() -> None:
    image, label = two_tone()
    results = []
    for torch_seed in (1, 2):
        torch.manual_seed(torch_seed)
        results.append(augment(image, label, rng=np.random.default_rng(7)))
    other = augment(image, label, rng=np.random.default_rng(8))
    assert all((a == b).all() for a, b in zip(*results, strict=True))
    assert (results[0][0] != other[0]).any()


@pytest.mark.parametrize("view", ["identity", "hflip", "scale:1.5", "scale:0.7", "scale:1"])
def test_views_keep_the_size_and_the_alignment(view: str) -> None:
    image, label = two_tone()
    new_image, new_label = apply_view(image, label, view)
    assert (new_image.shape, new_label.shape) == (image.shape, label.shape)
    assert agreement(new_image, new_label) > 0.95


def test_views_do_what_they_are_called() -> None:
    image, label = two_tone()
    assert (apply_view(image, label, "identity")[0] == image).all()
    assert (apply_view(image, label, "hflip")[1] == label[:, ::-1]).all()
    assert (apply_view(image, label, "scale:2")[1] == label[12:36, 16:48].repeat(2, 0).repeat(2, 1)).all()
    shrunk = apply_view(image, label, "scale:0.5")[1]
    assert (shrunk[12:36, 16:48] != IGNORE).all()
    assert (shrunk != IGNORE).sum() == 24 * 32


@pytest.mark.parametrize(
    "view", ["", "flip", "scale", "scale:", "scale:x", "scale:0", "scale:nan", "scale:9", "hflip:2"]
)
def test_an_unknown_view_is_refused_with_the_known_ones(view: str) -> None:
    image, label = two_tone()
    with pytest.raises(ConfigError, match="identity, hflip, scale:<factor>"):
        apply_view(image, label, view)

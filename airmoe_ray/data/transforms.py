"""Resizing, padding, augmentation and cached views of an image (H, W, 3) and its label (H, W), always together.

Arrays are uint8. An image is a 3-d array and is interpolated; a label is a 2-d array and never is: the mean of two
class ids is a third class.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

import airmoe_ray.runtime.torchvision_import  # noqa: F401  (torchvision may not import without it)
from airmoe_ray.data.base import IGNORE, UInt8Array
from airmoe_ray.errors import ConfigError

# isort: split
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

_SCALE_RANGE = (0.25, 4.0)
_VIEWS = f"identity, hflip, scale:<factor> with a factor in {_SCALE_RANGE[0]}..{_SCALE_RANGE[1]} such as scale:1.5"


def fit_size(height: int, width: int, long_side: int) -> tuple[int, int]:
    """(height, width) with the long side as given and the aspect kept; small images grow too."""
    scale = long_side / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def fit(pixels: UInt8Array, long_side: int) -> UInt8Array:
    """An image or label scaled so that its long side is `long_side`."""
    height, width = pixels.shape[:2]
    return resize(pixels, *fit_size(height, width, long_side))


def resize(pixels: UInt8Array, height: int, width: int) -> UInt8Array:
    """Bilinear for an image (Pillow widens the kernel when shrinking, so nothing aliases), nearest for a label."""
    if pixels.shape[:2] == (height, width):
        return pixels
    how = Image.Resampling.BILINEAR if pixels.ndim == 3 else Image.Resampling.NEAREST
    return np.array(Image.fromarray(pixels).resize((width, height), how))


def pad_to_multiple(pixels: UInt8Array, multiple: int) -> tuple[UInt8Array, tuple[int, int]]:
    """Pads bottom and right until both sides divide by `multiple`; also returns the valid (height, width).

    An image repeats its last row and column: a border of constant colour would be an edge that no scene has, and
    stride-16 features next to it would answer to it. A label is padded with IGNORE.
    """
    height, width = pixels.shape[:2]
    padding = [(0, -height % multiple), (0, -width % multiple)]
    if pixels.ndim == 3:
        return np.pad(pixels, [*padding, (0, 0)], mode="edge"), (height, width)
    return np.pad(pixels, padding, constant_values=IGNORE), (height, width)


@dataclass(frozen=True)
class Augmentation:
    """Strengths of the online augmentation; zeros and (1, 1) switch a part off."""

    flip_probability: float = 0.5
    crop_area: tuple[float, float] = (0.5, 1.0)  # share of the image's area that is kept, then scaled back
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)  # relative to the image's own aspect
    brightness: float = 0.2  # a factor is drawn from 1 - x .. 1 + x; likewise contrast and saturation
    contrast: float = 0.2
    saturation: float = 0.2
    hue: float = 0.02  # shift in turns of the colour wheel, drawn from -x .. x


STANDARD = Augmentation()


def augment(
    image: UInt8Array, label: UInt8Array, *, rng: np.random.Generator, how: Augmentation = STANDARD
) -> tuple[UInt8Array, UInt8Array]:
    """A random flip, resized crop and colour jitter; sizes stay.

    The parameters are drawn here because the transform classes of torchvision draw from torch's global generator.
    The draws are the same in number whatever their outcome, so one sample never shifts the next one's.
    """
    height, width = label.shape
    flip = rng.random() < how.flip_probability
    top, left, crop_h, crop_w = _crop_box(height, width, rng, how)
    brightness, contrast, saturation = (
        rng.uniform(1 - x, 1 + x) for x in (how.brightness, how.contrast, how.saturation)
    )
    hue = rng.uniform(-how.hue, how.hue)

    picture = tv_tensors.Image(torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1))
    mask = tv_tensors.Mask(torch.from_numpy(np.ascontiguousarray(label)))
    if flip:
        picture, mask = functional.horizontal_flip(picture), functional.horizontal_flip(mask)
    if (crop_h, crop_w) != (height, width):
        box = (top, left, crop_h, crop_w)
        picture = functional.resized_crop(picture, *box, size=[height, width], antialias=True)
        mask = functional.resized_crop(mask, *box, size=[height, width], interpolation=InterpolationMode.NEAREST_EXACT)
    picture = functional.adjust_brightness(picture, brightness)
    picture = functional.adjust_contrast(picture, contrast)
    picture = functional.adjust_saturation(picture, saturation)
    picture = functional.adjust_hue(picture, hue)
    return np.ascontiguousarray(picture.permute(1, 2, 0).numpy()), np.ascontiguousarray(mask.numpy())


def _crop_box(height: int, width: int, rng: np.random.Generator, how: Augmentation) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random crop; what would not fit is cut at the image's border."""
    area = rng.uniform(*how.crop_area)
    aspect = math.exp(rng.uniform(*np.log(how.crop_aspect)))  # so that wide and tall are equally likely
    crop_h = min(max(round(height * math.sqrt(area / aspect)), 1), height)
    crop_w = min(max(round(width * math.sqrt(area * aspect)), 1), width)
    # Scaled from [0, 1) instead of integers(): one draw each, whatever the room.
    top = int(rng.random() * (height - crop_h + 1))
    left = int(rng.random() * (width - crop_w + 1))
    return top, left, crop_h, crop_w


def apply_view(image: UInt8Array, label: UInt8Array, view: str) -> tuple[UInt8Array, UInt8Array]:
    """A fixed variant of a sample, named in the configuration; sizes stay, so cached features of all views stack.

    `scale:f` magnifies about the centre by f; below 1 the frame left free repeats the border, and is IGNORE in the
    label.
    """
    factor = parse_view(view)
    if view == "hflip":
        return np.ascontiguousarray(image[:, ::-1]), np.ascontiguousarray(label[:, ::-1])
    if factor == 1.0:
        return image, label
    return _magnify(image, factor), _magnify(label, factor)


def parse_view(view: str) -> float:
    """The scale factor of a view, 1 for those that do not scale; ConfigError for a name that is no view."""
    if view in ("identity", "hflip"):
        return 1.0
    kind, _, number = view.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if kind != "scale" or not _SCALE_RANGE[0] <= factor <= _SCALE_RANGE[1]:
        raise ConfigError(f"view {view!r}: expected one of {_VIEWS}")
    return factor


def _magnify(pixels: UInt8Array, factor: float) -> UInt8Array:
    height, width = pixels.shape[:2]
    new_h, new_w = max(1, round(height * factor)), max(1, round(width * factor))
    scaled = resize(pixels, new_h, new_w)
    if factor > 1:
        top, left = (new_h - height) // 2, (new_w - width) // 2
        return np.ascontiguousarray(scaled[top : top + height, left : left + width])
    top, left = (height - new_h) // 2, (width - new_w) // 2
    padding = [(top, height - new_h - top), (left, width - new_w - left)]
    if pixels.ndim == 3:
        return np.pad(scaled, [*padding, (0, 0)], mode="edge")
    return np.pad(scaled, padding, constant_values=IGNORE)

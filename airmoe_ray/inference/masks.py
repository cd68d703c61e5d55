"""From logits on a grid to a mask at the image's own size.

Suffixes: C classes, h w grid, y x another grid (a tile of the image).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.class_map import ClassMap
from airmoe_ray.data.transforms import fit_size, pad_to_multiple, resize

Float32Array = NDArray[np.float32]

_TILE_PIXELS = 1 << 15  # 3 MB of logits at 20 classes: about what a cache holds
_TILE_ROWS, _TILE_SIDE = 128, 2048  # the usual height, and the longest side in images that are all length
_SCORED_PIXELS = 1 << 20  # at least; a softmax takes ten times as long as a comparison

_Place = tuple[slice, slice]  # rows and columns


@dataclass(frozen=True)
class Prepared:
    """An image as the backbone takes it, and the way back."""

    padded: UInt8Array  # (H', W', 3)
    valid: tuple[int, int]  # height and width of the fitted image within it
    original: tuple[int, int]  # height and width of the image as it came, and of its mask

    @property
    def fitted(self) -> UInt8Array:
        """The pixels that the model sees, without the padding."""
        return self.padded[: self.valid[0], : self.valid[1]]

    def at_model_size(self) -> "Prepared":
        """The same, with the mask wanted at the fitted size."""
        return replace(self, original=self.valid)


def prepare_image(
    image: UInt8Array, config: Config, pad_multiple: int, *, original: tuple[int, int] | None = None
) -> Prepared:
    """Fit (unless `serve.resize: native`) and pad one image; `original` is its own size where `image` has fewer pixels.

    What it is fitted to follows from its own size, so that it does not matter how many pixels were decoded.
    """
    original = original or (image.shape[0], image.shape[1])
    size = fit_size(*original, config.data.image_size) if config.serve.resize == "fit" else original
    padded, valid = pad_to_multiple(resize(image, *size), pad_multiple)
    return Prepared(padded, valid, original)


def mask_of(logits_Chw: Tensor, image: Prepared, meaning: ClassMap | None = None) -> UInt8Array:
    """Class ids at the image's own size: up to the padded size, crop, up or down to the original, argmax.

    With a `meaning`, ids of its classes: each has the summed probability of those that it stands for.
    """
    grid = _Grid(logits_Chw, image)
    mask = np.empty(image.original, dtype=np.uint8)
    for place in _tiles(image.original):
        mask[place] = grid.winners(place) if meaning is None else best_class(meaning.merge(grid.logits(place)))[0]
    return mask


def mask_and_scores(logits_Chw: Tensor, image: Prepared) -> tuple[UInt8Array, NDArray[np.float64], NDArray[np.int64]]:
    """`mask_of`; the mean softmax of each class over the pixels it won (0 if none); and their number.

    Of an image beyond 4 megapixels, the mean is over every second, third, … row and column of them.
    """
    mask = mask_of(logits_Chw, image)
    every = max(1, math.isqrt(mask.size // _SCORED_PIXELS))
    grid, classes = _Grid(logits_Chw, image), logits_Chw.shape[0]
    total_C, seen_C = np.zeros(classes), np.zeros(classes, dtype=np.int64)

    def add(place: _Place) -> None:
        ids = mask[place].ravel()
        softmax = _winning_softmax(grid.logits(place)).ravel()
        np.add(seen_C, np.bincount(ids, minlength=classes), out=seen_C)
        np.add(total_C, np.bincount(ids, weights=softmax, minlength=classes), out=total_C)

    for place in _tiles(image.original, every):
        add(place)
    area_C = seen_C if every == 1 else _areas(mask, classes)
    for c in np.flatnonzero((area_C > 0) & (seen_C == 0)):  # smaller than the gaps of the sample: one pixel speaks
        y, x = np.unravel_index(int(np.argmax(mask == c)), mask.shape)
        add((slice(y, y + 1), slice(x, x + 1)))
    return mask, total_C / np.maximum(seen_C, 1), area_C


class _Grid:
    """Logits at the image's own size, part by part: all at once, 50 megapixels of 20 classes would be 4 GB.

    Both interpolations are linear and separable, so a part is R L_c Q^T with a few of the logits L and small R, Q.
    """

    def __init__(self, logits_Chw: Tensor, image: Prepared) -> None:
        self.logits_Chw = logits_Chw.detach().float().cpu()
        (_, height, width), (padded_h, padded_w) = self.logits_Chw.shape, image.padded.shape[:2]
        self.sizes = (
            (height, padded_h, image.valid[0], image.original[0]),
            (width, padded_w, image.valid[1], image.original[1]),
        )

    def logits(self, place: _Place) -> Float32Array:
        """All logits (C, y, x) of a part."""
        nodes_Chw, R, Q = self._part(place)
        return (R @ (nodes_Chw @ Q.T)).numpy()

    def winners(self, place: _Place) -> UInt8Array | np.uint8:
        """Classes (y, x) of a part; one for all of it where no other can win.

        A pixel's logit is a mean of the nodes around it, with weights that are not negative. So a class whose largest
        node is below the smallest one of some other class wins nowhere, and its pixels need not be computed: in a
        photograph of 12 megapixels, half of the parts are of one class.
        """
        nodes_Chw, R, Q = self._part(place)
        nodes_Cn = nodes_Chw.flatten(1)
        able = torch.nonzero(~(nodes_Cn.amax(1) < nodes_Cn.amin(1).max())).flatten().tolist()
        if len(able) == 1:
            return np.uint8(able[0])
        return best_class((R @ (nodes_Chw[able] @ Q.T)).numpy(), able)[0]

    def _part(self, place: _Place) -> tuple[Tensor, Tensor, Tensor]:
        (y, R), (x, Q) = (
            _taps(part.start, part.stop, part.step or 1, sizes) for part, sizes in zip(place, self.sizes, strict=True)
        )
        return self.logits_Chw[:, y : y + R.shape[1], x : x + Q.shape[1]], R, Q


def _tiles(size: tuple[int, int], every: int = 1) -> Iterator[_Place]:
    """Parts of an image, of equal numbers of pixels; with `every`, only those rows and columns."""
    height, width = (-(-side // every) for side in size)
    step_y = every * min(height, _TILE_SIDE, max(_TILE_ROWS, _TILE_PIXELS // width))
    step_x = every * min(width, _TILE_SIDE, max(1, _TILE_PIXELS // (step_y // every)))
    for top in range(0, size[0], step_y):
        for left in range(0, size[1], step_x):
            yield (
                slice(top, min(top + step_y, size[0]), every),
                slice(left, min(left + step_x, size[1]), every),
            )


def _areas(mask: UInt8Array, classes: int) -> NDArray[np.int64]:
    """Pixels of each class; by tiles, since counting makes eight bytes of each."""
    area_C = np.zeros(classes, dtype=np.int64)
    for place in _tiles((mask.shape[0], mask.shape[1])):
        area_C += np.bincount(mask[place].ravel(), minlength=classes)
    return area_C


def best_class(logits_Cyx: Float32Array, ids: Sequence[int] | None = None) -> tuple[UInt8Array, Float32Array]:
    """First class of the largest logit, and that logit; `ids` are the classes, ascending, where they are not all.

    Running comparisons beat an argmax across planes tenfold.
    """
    ids = range(len(logits_Cyx)) if ids is None else ids
    best = logits_Cyx[0].copy()
    winner = np.full(best.shape, ids[0], dtype=np.uint8)
    for c, logits_yx in zip(ids[1:], logits_Cyx[1:], strict=True):
        better = (logits_yx > best).view(np.uint8)
        np.maximum(winner, better * np.uint8(c), out=winner)
        np.maximum(best, logits_yx, out=best)
    return winner, best


def _winning_softmax(logits_Cyx: Float32Array) -> Float32Array:
    """Softmax of the largest logit, plane by plane: intermediate results stay in the cache."""
    best = np.maximum.reduce(logits_Cyx)
    total, odds = np.zeros_like(best), np.empty_like(best)
    for logits_yx in logits_Cyx:
        np.subtract(logits_yx, best, out=odds)
        np.exp(odds, out=odds)
        total += odds
    return np.reciprocal(total, out=total)


@lru_cache(maxsize=128)
def _taps(start: int, stop: int, step: int, sizes: tuple[int, int, int, int]) -> tuple[int, Tensor]:
    """Along one axis: the first node and the weights (pixels, nodes) that give some pixels of the original.

    `sizes` are the nodes of the logits, and the pixels padded, valid and original.
    """
    nodes, padded, valid, original = sizes
    left, share = _bilinear(np.arange(start, stop, step), valid, original)
    right = np.minimum(left + 1, valid - 1)
    first = int(left[0])
    node, weights = _weights(np.arange(first, int(right[-1]) + 1), nodes, padded)
    both = (1 - share)[:, None] * weights[left - first] + share[:, None] * weights[right - first]
    return node, torch.from_numpy(both.astype(np.float32))


def _weights(pixels: NDArray[np.int64], source: int, target: int) -> tuple[int, NDArray[np.float64]]:
    """First source index that consecutive pixels need, and their weights (pixels, sources)."""
    left, share = _bilinear(pixels, source, target)
    right = np.minimum(left + 1, source - 1)
    first, row = int(left[0]), np.arange(len(pixels))
    weights = np.zeros((len(pixels), int(right[-1]) + 1 - first))
    weights[row, left - first] = 1 - share
    weights[row, right - first] += share  # the same place at the border, where share is 0
    return first, weights


def _bilinear(pixels: NDArray[np.int64], source: int, target: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Left neighbour of each pixel and the share of the right one, as of `align_corners=False`."""
    position = np.clip((pixels + 0.5) * (source / target) - 0.5, 0, source - 1)
    left = position.astype(np.int64)
    return left, position - left

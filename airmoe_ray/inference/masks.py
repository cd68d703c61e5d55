"""From logits on a grid to a mask at the image's own size.

Suffixes: C classes, h w grid, y x another grid (a tile of the image).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.class_map import ClassMap
from airmoe_ray.features.preprocess import prepare

Float32Array = NDArray[np.float32]

_TILE_PIXELS = 1 << 15  # 3 MB of logits at 20 classes: about what a cache holds
_TILE_ROWS, _TILE_SIDE = 128, 2048  # the usual height, and the longest side in images that are all length


@dataclass(frozen=True)
class Prepared:
    """An image as the backbone takes it, and the way back."""

    padded: UInt8Array  # (H', W', 3)
    valid: tuple[int, int]  # height and width of the fitted image within it
    original: tuple[int, int]  # height and width of the image as it came


def prepare_image(image: UInt8Array, config: Config, pad_multiple: int) -> Prepared:
    """Fit (unless `serve.resize: native`) and pad one image."""
    size = config.data.image_size if config.serve.resize == "fit" else None
    padded, valid = prepare(image, image_size=size, multiple=pad_multiple)
    return Prepared(padded, valid, (image.shape[0], image.shape[1]))


def mask_of(logits_Chw: Tensor, image: Prepared, meaning: ClassMap | None = None) -> UInt8Array:
    """Class ids at the image's own size: up to the padded size, crop, up or down to the original, argmax.

    With a `meaning`, ids of its classes: each has the summed probability of those that it stands for.
    """
    mask = np.empty(image.original, dtype=np.uint8)
    for place, logits_Cyx in _tiles(logits_Chw, image):
        mask[place] = best_class(logits_Cyx if meaning is None else meaning.merge(logits_Cyx))[0]
    return mask


def mask_and_scores(logits_Chw: Tensor, image: Prepared) -> tuple[UInt8Array, NDArray[np.float64], NDArray[np.int64]]:
    """`mask_of`; the mean softmax of each class over the pixels it won (0 if none); and their number."""
    mask = np.empty(image.original, dtype=np.uint8)
    classes = logits_Chw.shape[0]
    total_C, area_C = np.zeros(classes), np.zeros(classes, dtype=np.int64)
    for place, logits_Cyx in _tiles(logits_Chw, image):
        mask[place], best = best_class(logits_Cyx)
        ids = mask[place].ravel()
        area_C += np.bincount(ids, minlength=classes)
        total_C += np.bincount(ids, weights=_winning_softmax(logits_Cyx, best).ravel(), minlength=classes)
    return mask, total_C / np.maximum(area_C, 1), area_C


def _tiles(logits_Chw: Tensor, image: Prepared) -> Iterator[tuple[tuple[slice, slice], Float32Array]]:
    """Logits at the image's own size, part by part: all at once, 50 megapixels of 20 classes would be 4 GB.

    Both interpolations are linear and separable, so a part is R L_c Q^T with a few of the logits L and small R, Q.
    """
    logits_Chw = logits_Chw.detach().float().cpu()
    (height, width), (padded_h, padded_w) = image.original, image.padded.shape[:2]
    step_y = min(height, _TILE_SIDE, max(_TILE_ROWS, _TILE_PIXELS // width))
    step_x = min(width, _TILE_SIDE, max(1, _TILE_PIXELS // step_y))
    for top in range(0, height, step_y):
        rows = slice(top, min(top + step_y, height))
        y, R = _taps(top, rows.stop, (logits_Chw.shape[1], padded_h, image.valid[0], height))
        for left in range(0, width, step_x):
            columns = slice(left, min(left + step_x, width))
            x, Q = _taps(left, columns.stop, (logits_Chw.shape[2], padded_w, image.valid[1], width))
            nodes_Chw = logits_Chw[:, y : y + R.shape[1], x : x + Q.shape[1]]
            yield (rows, columns), (R @ (nodes_Chw @ Q.T)).numpy()


def best_class(logits_Cyx: Float32Array) -> tuple[UInt8Array, Float32Array]:
    """First index of the largest logit, and that logit; running comparisons beat an argmax across planes tenfold."""
    best = logits_Cyx[0].copy()
    ids = np.zeros(best.shape, dtype=np.uint8)
    for c, logits_yx in enumerate(logits_Cyx[1:], start=1):
        better = (logits_yx > best).view(np.uint8)
        np.maximum(ids, better * np.uint8(c), out=ids)
        np.maximum(best, logits_yx, out=best)
    return ids, best


def _winning_softmax(logits_Cyx: Float32Array, best: Float32Array) -> Float32Array:
    """Softmax of the largest logit, plane by plane: intermediate results stay in the cache."""
    total, odds = np.zeros_like(best), np.empty_like(best)
    for logits_yx in logits_Cyx:
        np.subtract(logits_yx, best, out=odds)
        np.exp(odds, out=odds)
        total += odds
    return np.reciprocal(total, out=total)


@lru_cache(maxsize=32)
def _taps(start: int, stop: int, sizes: tuple[int, int, int, int]) -> tuple[int, Tensor]:
    """Along one axis: the first node and the weights (pixels, nodes) that give pixels [start, stop) of the original.

    `sizes` are the nodes of the logits, and the pixels padded, valid and original.
    """
    nodes, padded, valid, original = sizes
    left, share = _bilinear(np.arange(start, stop), valid, original)
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

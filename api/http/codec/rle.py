"""Run-length encoding of masks as COCO writes it: runs down the columns, packed into text.

The runs of all classes are found in one pass over the mask, so that the cost hardly grows with their number.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.data.base import UInt8Array
from api.http.schemas import Rle

_LONGEST = 13  # characters of one number: 64 bits, five in each


def encode_classes(mask: UInt8Array, class_ids: Sequence[int]) -> list[Rle]:
    """One encoding per class, each of the pixels (H, W) that are of it."""
    height, width = mask.shape
    columns = np.ascontiguousarray(mask.T).ravel()  # COCO counts down the columns
    starts = np.concatenate(([0], np.flatnonzero(columns[1:] != columns[:-1]) + 1))
    ends = np.append(starts[1:], columns.size)
    owners = columns[starts]
    return [
        Rle(size=[height, width], counts=_packed(_counts(starts[own], ends[own], columns.size)))
        for own in (owners == class_id for class_id in class_ids)
    ]


def _counts(starts: NDArray[np.int64], ends: NDArray[np.int64], pixels: int) -> NDArray[np.int64]:
    """Lengths of runs without and with the class by turns; the first is without, and may be 0."""
    edges = np.stack([starts, ends], axis=1).ravel()
    counts = np.diff(edges, prepend=0)
    rest = pixels - (int(edges[-1]) if edges.size else 0)
    return np.append(counts, rest) if rest else counts


def _packed(counts: NDArray[np.int64]) -> str:
    """Counts as text, from the fourth on as differences to the one before last.

    A character holds five bits, the low ones first, and in its sixth whether more follow; the highest bit of a number's
    last character is its sign.
    """
    left = counts.copy()
    left[3:] -= counts[1:-2]
    characters = np.empty((left.size, _LONGEST), dtype=np.uint8)
    used = np.zeros((left.size, _LONGEST), dtype=bool)
    unfinished = np.ones(left.size, dtype=bool)
    for place in range(_LONGEST):
        used[:, place] = unfinished
        bits = left & 0x1F
        left >>= 5
        unfinished &= np.where(bits & 0x10, left != -1, left != 0)
        characters[:, place] = bits + 48 + 0x20 * unfinished
        if not unfinished.any():
            break
    return characters[used].tobytes().decode("ascii")

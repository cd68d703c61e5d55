"""Reading cached features: which chunks are there, and any image of them through a memory map.

A chunk file holds the feature maps of its images one after another (each followed by its finer maps, if any), then
their padded labels, then the padded sizes.
Suffixes: S samples (images of the dataset), D features, h w grid, H W image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.features.cache_folder import CHUNK, About, chunk_file, hold


@dataclass(frozen=True)
class Plan:
    """What is to be computed, and where it goes."""

    folder: Path
    about: About
    batch_size: int

    def sizes(self, chunk: int) -> NDArray[np.int32] | None:
        """Padded (height, width) of a chunk's images; None where it is missing, or not whole."""
        count = len(self.about.chunk_indices(chunk))
        try:
            with chunk_file(self.folder, chunk).open("rb") as file:
                end = file.seek(0, 2) - 8 * count
                if end < 0:
                    return None
                file.seek(end)
                sizes = np.frombuffer(file.read(), np.int32).reshape(count, 2)
        except (FileNotFoundError, NotADirectoryError):
            return None
        features, labels = self.bytes_of(sizes)
        return sizes if features.sum() + labels.sum() == end else None

    def bytes_of(self, sizes_S2: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of each image's feature maps and of its label."""
        pixels_S = sizes_S2.astype(np.int64).prod(axis=1)
        maps = [(self.about.dim, self.about.stride), *self.about.fine]
        numbers_S = sum(pixels_S // stride**2 * channels for channels, stride in maps)
        return numbers_S * np.dtype(self.about.dtype).itemsize, pixels_S

    def missing(self) -> list[int]:
        """Chunks still to be built, or to be built again."""
        return [chunk for chunk in range(self.about.chunks) if self.sizes(chunk) is None]


class FeatureCache:
    """One view of a dataset: features and labels by index, read through memory maps."""

    def __init__(self, plan: Plan, indices: Sequence[int] | None = None) -> None:
        """`indices`: of the images that are wanted, in the order in which they are counted here; None: all of them."""
        self._lock = hold(plan.folder)  # kept open: nobody prunes what we read
        self.folder, self.dim, self._fine = plan.folder, plan.about.dim, plan.about.fine
        chunks = [plan.sizes(chunk) for chunk in range(plan.about.chunks)]
        sizes_S2 = np.concatenate([sizes for sizes in chunks if sizes is not None])
        assert len(sizes_S2) == plan.about.images, "a cache is complete before it is read"
        wanted = slice(None) if indices is None else np.asarray(indices)
        self._row: NDArray[np.int64] = np.arange(len(sizes_S2))[wanted]
        kinds, shape_of = np.unique(sizes_S2[wanted], axis=0, return_inverse=True)
        self.sizes: list[tuple[int, int]] = [(int(height), int(width)) for height, width in kinds]
        self.shape_of: NDArray[np.int64] = shape_of.reshape(-1)  # which size an index has
        stride = plan.about.stride
        self.grids: list[tuple[int, int]] = [(height // stride, width // stride) for height, width in self.sizes]
        features_S, labels_S = plan.bytes_of(sizes_S2)
        starts = np.arange(0, plan.about.images, CHUNK)
        self._feature_at = _offsets(features_S)
        self._label_at = _offsets(labels_S) + np.repeat(np.add.reduceat(features_S, starts), CHUNK)[: len(labels_S)]
        self._dtype = np.dtype(plan.about.dtype)
        # copy-on-write rather than read-only, because torch does not take arrays that it must not write
        self._maps = [
            np.memmap(chunk_file(plan.folder, chunk), np.uint8, "c").view(np.ndarray) for chunk in range(len(chunks))
        ]

    def __len__(self) -> int:
        return len(self.shape_of)

    def get(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """Feature map (D, h, w) in the cache's number format, and padded label (H, W)."""
        row, shape = self._row[index], self.shape_of[index]
        grid, size = self.grids[shape], self.sizes[shape]
        map_ = self._maps[row // CHUNK]
        return (
            np.ndarray((self.dim, *grid), self._dtype, map_, self._feature_at[row]),
            np.ndarray(size, np.uint8, map_, self._label_at[row]),
        )

    def get_fine(self, index: int) -> list[NDArray[np.floating]]:
        """The finer maps of an image, (channels, y, x) each."""
        row, shape = self._row[index], self.shape_of[index]
        map_ = self._maps[row // CHUNK]
        height, width = self.sizes[shape]
        found: list[NDArray[np.floating]] = []
        at = int(self._feature_at[row]) + self.dim * math.prod(self.grids[shape]) * self._dtype.itemsize
        for channels, stride in self._fine:
            found.append(np.ndarray((channels, height // stride, width // stride), self._dtype, map_, at))
            at += found[-1].nbytes
        return found


def _offsets(bytes_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each image's part begins, counted from the first image of its chunk."""
    begin_S = np.cumsum(bytes_S) - bytes_S
    return begin_S - np.repeat(begin_S[::CHUNK], CHUNK)[: len(begin_S)]

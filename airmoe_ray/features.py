"""Frozen features, computed once: a memory-mapped cache on disk, keyed by all that they depend on.

One folder per (dataset, view, transform, backbone): `meta.json` and, for each image shape, the feature maps and the
padded labels as raw arrays. A folder appears by a rename when it is complete, so a cache is whole or absent.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.backbone import Backbone
from airmoe_ray.config import Config
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.transforms import apply_view, fit, pad_to_multiple
from airmoe_ray.errors import UserError

CACHE_VERSION = 1
Progress = Callable[[int, int], None]  # done, total


def prepare(image: UInt8Array, *, image_size: int | None, multiple: int) -> tuple[UInt8Array, tuple[int, int]]:
    """An image as the backbone takes it: fitted to the long side (None keeps its size), padded; and its valid size."""
    fitted = image if image_size is None else fit(image, image_size)
    return pad_to_multiple(fitted, multiple)


def to_tensor(images: Sequence[UInt8Array]) -> Tensor:
    """Equal-sized RGB images as (B, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float().div_(255.0)


class FeatureCache:
    """One view of a dataset: features and labels by index, read through memory maps."""

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.folder, self.dim = folder, int(meta["dim"])
        self.shape_of: NDArray[np.int64] = np.asarray(meta["shape_of"])  # which shape group an index belongs to
        self.row_of: NDArray[np.int64] = np.asarray(meta["row_of"])  # and which row there
        self.grids: list[tuple[int, int]] = [tuple(grid) for grid in meta["grids"]]
        self.sizes: list[tuple[int, int]] = [tuple(size) for size in meta["sizes"]]
        rows = np.bincount(self.shape_of, minlength=len(self.grids))
        dtype = np.dtype(meta["dtype"])
        self._features = [
            np.memmap(folder / f"features_{g}.bin", dtype, "r", shape=(n, self.dim, *grid))
            for g, (n, grid) in enumerate(zip(rows, self.grids, strict=True))
        ]
        self._labels = [
            np.memmap(folder / f"labels_{g}.bin", np.uint8, "r", shape=(n, *size))
            for g, (n, size) in enumerate(zip(rows, self.sizes, strict=True))
        ]

    def __len__(self) -> int:
        return len(self.row_of)

    def get(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """Feature map (D, h, w) in the cache's number format, and padded label (H, W)."""
        group, row = self.shape_of[index], self.row_of[index]
        return self._features[group][row], self._labels[group][row]


def cached_features(
    dataset: SegmentationDataset, backbone: Backbone, config: Config, view: str, *, progress: Progress | None = None
) -> FeatureCache:
    """The cache of one view, built first if it is not there."""
    data = config.data
    parts = (CACHE_VERSION, dataset.fingerprint(), view, data.image_size, data.cache_dtype, backbone.fingerprint)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = Path(data.cache_dir).expanduser() / key
    if not (folder / "meta.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_space(dataset, backbone, config, folder.parent)
        partial = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder.parent))
        try:
            _build(partial, dataset, backbone, config, view=view, progress=progress)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return FeatureCache(folder)


def cache_bytes(dataset: SegmentationDataset, backbone: Backbone, config: Config) -> int:
    """Size of one view's cache, extrapolated from the first image."""
    padded, _ = prepare(dataset[0].image, image_size=config.data.image_size, multiple=backbone.pad_multiple)
    height, width = padded.shape[:2]
    cells = (height // backbone.stride) * (width // backbone.stride)
    return len(dataset) * (cells * backbone.dim * np.dtype(config.data.cache_dtype).itemsize + height * width)


def _check_space(dataset: SegmentationDataset, backbone: Backbone, config: Config, where: Path) -> None:
    needed, free = cache_bytes(dataset, backbone, config), shutil.disk_usage(where).free
    if needed > 0.95 * free:
        raise UserError(
            f"caching features of {len(dataset)} images needs {needed / 1e9:.1f} GB, {where} has {free / 1e9:.1f} GB "
            "free; make room or point data.cache_dir elsewhere"
        )


def _build(
    folder: Path,
    dataset: SegmentationDataset,
    backbone: Backbone,
    config: Config,
    *,
    view: str,
    progress: Progress | None,
) -> None:
    group_of_size: dict[tuple[int, int], int] = {}
    grids: list[tuple[int, int]] = []
    shape_of: list[int] = []
    row_of: list[int] = []
    rows: list[int] = []
    dtype = np.dtype(config.data.cache_dtype)
    with ExitStack() as stack:
        files: list[tuple[BinaryIO, BinaryIO]] = []
        for images, labels in _batches(dataset, backbone, config, view):
            features_BDhw = backbone(to_tensor(images).to(backbone.mean.device)).cpu().numpy().astype(dtype)
            size = images[0].shape[:2]
            if size not in group_of_size:
                group_of_size[size] = len(files)
                grids.append(features_BDhw.shape[2:])
                rows.append(0)
                names = (f"features_{len(files)}.bin", f"labels_{len(files)}.bin")
                files.append(tuple(stack.enter_context((folder / name).open("wb")) for name in names))  # type: ignore[arg-type]
            group = group_of_size[size]
            files[group][0].write(features_BDhw.tobytes())
            files[group][1].write(np.stack(labels).tobytes())
            shape_of += [group] * len(images)
            row_of += range(rows[group], rows[group] + len(images))
            rows[group] += len(images)
            if progress:
                progress(len(row_of), len(dataset))
    meta: dict[str, Any] = {"dim": backbone.dim, "dtype": dtype.name, "grids": grids, "sizes": list(group_of_size)}
    (folder / "meta.json").write_text(json.dumps(meta | {"shape_of": shape_of, "row_of": row_of}))


def _batches(
    dataset: SegmentationDataset, backbone: Backbone, config: Config, view: str
) -> Iterator[tuple[list[UInt8Array], list[UInt8Array]]]:
    """Prepared images and labels in dataset order; a batch ends early where the size changes."""
    images: list[UInt8Array] = []
    labels: list[UInt8Array] = []
    for index in range(len(dataset)):
        sample = dataset[index]
        image, label = apply_view(
            fit(sample.image, config.data.image_size), fit(sample.label, config.data.image_size), view
        )
        image, _ = pad_to_multiple(image, backbone.pad_multiple)
        label, _ = pad_to_multiple(label, backbone.pad_multiple)
        if images and (image.shape != images[0].shape or len(images) == config.backbone.batch_size):
            yield images, labels
            images, labels = [], []
        images.append(image)
        labels.append(label)
    if images:
        yield images, labels


def _publish(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / "meta.json").exists():  # else another process was faster, and its cache is as good
            raise

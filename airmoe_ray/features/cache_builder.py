"""Frozen features, computed once: a memory-mapped cache on disk, keyed by all that they depend on.

One folder per (dataset, view, transform, backbone), filled in chunks of images (see `cache_folder`). Any number of
threads, processes and nodes may build at once, and whoever comes after a kill goes on with the chunks that are missing.
A chunk's bytes do not depend on who computes it: on the CPU each is the work of one thread.
Suffixes: B inputs, D features, h w grid.
"""

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from airmoe_ray.config import Config
from airmoe_ray.data.base import Sample, SegmentationDataset, Subset, UInt8Array
from airmoe_ray.data.transforms import apply_view, fit, pad_to_multiple
from airmoe_ray.errors import UserError
from airmoe_ray.features.backbone import Backbone
from airmoe_ray.features.cache_folder import About, chunk_file, claim, hold, remove, write_about
from airmoe_ray.features.cache_reader import FeatureCache, Plan
from airmoe_ray.features.preprocess import prepare, to_tensor
from airmoe_ray.runtime.progress import Progress

CACHE_VERSION = 2
_GPU_FEEDERS = 2  # threads that keep a GPU busy: one prepares images while the other's are in the backbone
_POLL_S = 0.2


def whole_of(dataset: SegmentationDataset) -> SegmentationDataset:
    """The dataset whose features are cached: of a subset, what it is cut from, so that all splits share one cache."""
    return dataset.dataset if isinstance(dataset, Subset) else dataset


def plan_features(dataset: SegmentationDataset, backbone: Backbone, config: Config, view: str) -> Plan:
    """The folder of one view's features, and what belongs there."""
    data, dataset = config.data, whole_of(dataset)
    fine = backbone.fine_maps(config.experts.refiner)
    parts = (CACHE_VERSION, dataset.fingerprint(), view, data.image_size, data.cache_dtype, backbone.fingerprint)
    more: list[object] = [fine] if fine else []  # nothing where there is nothing: older keys hold
    more += ["bfloat16"] if backbone.precision == torch.bfloat16 else []
    key = hashlib.sha256(repr((*parts, *more)).encode()).hexdigest()[:16]
    about = About(
        dataset=data.name,
        root=data.root,
        images=len(dataset),
        view=view,
        image_size=data.image_size,
        backbone=backbone.name,
        dtype=data.cache_dtype,
        dim=backbone.dim,
        stride=backbone.stride,
        fine=fine,
    )
    return Plan(Path(data.cache_dir).expanduser() / key, about, config.backbone.batch_size)


def cached_views(
    dataset: SegmentationDataset, backbone: Backbone, config: Config, bar: Callable[[str], Progress]
) -> list[FeatureCache]:
    """The caches of all configured views; what is missing is built, if there is room for all of it."""
    views = config.data.views
    check_room([plan_features(dataset, backbone, config, view) for view in views], dataset, backbone)
    return [cached_features(dataset, backbone, config, view, progress=bar(f"features ({view})")) for view in views]


def cached_features(
    dataset: SegmentationDataset, backbone: Backbone, config: Config, view: str, *, progress: Progress | None = None
) -> FeatureCache:
    """The cache of one view; what is missing is built first."""
    plan = plan_features(dataset, backbone, config, view)
    check_room([plan], dataset, backbone)
    with work_on(plan):
        _build(plan, whole_of(dataset), backbone, progress or (lambda done, total: None))
        return FeatureCache(plan, dataset.indices if isinstance(dataset, Subset) else None)


def cache_bytes(dataset: SegmentationDataset, backbone: Backbone, config: Config) -> int:
    """Size of one view's cache, extrapolated from the first image."""
    plan = plan_features(dataset, backbone, config, "identity")
    return _image_bytes(plan, dataset, backbone) * plan.about.images


def check_room(plans: Sequence[Plan], dataset: SegmentationDataset, backbone: Backbone) -> None:
    """UserError if what these views of a dataset lack will not fit on the disk."""
    images = sum(len(plan.about.chunk_indices(chunk)) for plan in plans for chunk in plan.missing())
    if not images:
        return
    where = plans[0].folder.parent
    existing = next(folder for folder in where.absolute().parents if folder.exists()) if not where.exists() else where
    needed, free = images * _image_bytes(plans[0], dataset, backbone), shutil.disk_usage(existing).free
    if needed > 0.95 * free:
        raise UserError(
            f"caching features of {images} images needs {needed / 1e9:.1f} GB, {where} has {free / 1e9:.1f} GB free; "
            "make room (`airmoe cache --prune`) or point data.cache_dir elsewhere"
        )


def _image_bytes(plan: Plan, dataset: SegmentationDataset, backbone: Backbone) -> int:
    padded, _ = prepare(dataset[0].image, image_size=plan.about.image_size, multiple=backbone.pad_multiple)
    features, labels = plan.bytes_of(np.array([padded.shape[:2]]))
    return int(features[0] + labels[0])


@contextmanager
def work_on(plan: Plan) -> Iterator[None]:
    """Keep the folder for the duration of the block; where not even one chunk came of it, no folder stays."""
    lock = hold(plan.folder)
    try:
        write_about(plan.folder, plan.about)
        yield
    finally:
        lock.close()
        if not any(plan.folder.glob("*.bin")):
            remove(plan.folder)


def build_chunk(
    plan: Plan,
    chunk: int,
    dataset: SegmentationDataset,
    backbone: Backbone,
    *,
    tick: Callable[[int], None] = lambda images: None,
) -> bool:
    """Compute a chunk and put it in its place; False where another process has it in hand, or done.

    Batches begin anew with every chunk: what a batch holds may show in the last bit. `tick` hears of each batch.
    """
    dtype = np.dtype(plan.about.dtype)
    labels: list[UInt8Array] = []
    with claim(chunk_file(plan.folder, chunk), done=lambda: plan.sizes(chunk) is not None) as file:
        if file is None:
            return False
        for images, labels_B in _batches(plan, chunk, dataset, backbone.pad_multiple):
            maps = backbone.maps(to_tensor(images, backbone.mean.device), fine=bool(plan.about.fine))
            arrays = [map_BDyx.cpu().numpy().astype(dtype) for map_BDyx in (maps.features_BDhw, *maps.fine)]
            file.writelines(map_Dyx.tobytes() for own in zip(*arrays, strict=True) for map_Dyx in own)
            labels += labels_B
            tick(len(images))
        file.write(b"".join(label.tobytes() for label in labels))
        file.write(np.array([label.shape for label in labels], np.int32).tobytes())
    return True


def _batches(
    plan: Plan, chunk: int, dataset: SegmentationDataset, multiple: int
) -> Iterator[tuple[list[UInt8Array], list[UInt8Array]]]:
    """Prepared images and labels in dataset order; a batch ends early where the size changes."""
    images: list[UInt8Array] = []
    labels: list[UInt8Array] = []
    for index in plan.about.chunk_indices(chunk):
        image, label = _prepared(dataset[index], plan.about, multiple)
        if images and (image.shape != images[0].shape or len(images) == plan.batch_size):
            yield images, labels
            images, labels = [], []
        images.append(image)
        labels.append(label)
    yield images, labels


def _prepared(sample: Sample, about: About, multiple: int) -> tuple[UInt8Array, UInt8Array]:
    """Image and label as they are cached: fitted, seen through the view, padded."""
    size = about.image_size
    image, label = apply_view(fit(sample.image, size), fit(sample.label, size), about.view)
    return pad_to_multiple(image, multiple)[0], pad_to_multiple(label, multiple)[0]


def _build(plan: Plan, dataset: SegmentationDataset, backbone: Backbone, progress: Progress) -> None:
    """Build, as many at once as torch has threads, the chunks that nobody else has in hand, until all are there."""
    total, done, stop, lock = plan.about.images, 0, threading.Event(), threading.Lock()

    def tick(images: int) -> None:
        nonlocal done
        if stop.is_set():
            raise InterruptedError("another chunk failed")
        with lock:
            done += images
            progress(done, total)

    with _single_threaded(backbone.mean.device) as workers, ThreadPoolExecutor(workers) as pool:
        while todo := plan.missing():
            done = total - sum(len(plan.about.chunk_indices(chunk)) for chunk in todo)
            jobs = [pool.submit(build_chunk, plan, chunk, dataset, backbone, tick=tick) for chunk in todo]
            try:
                built = [job.result() for job in jobs]
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
            if not any(built):  # all in other hands, which may yet die over them
                time.sleep(_POLL_S)
        if 0 < done < total:  # others did the rest
            progress(total, total)


@contextmanager
def _single_threaded(device: torch.device) -> Iterator[int]:
    """One thread per operation, because sums of several may differ in the last bit; gives the number of workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads if device.type == "cpu" else _GPU_FEEDERS
    finally:
        torch.set_num_threads(threads)

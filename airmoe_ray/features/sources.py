"""Where training batches come from: cached features of fixed views, or the backbone in the loop with augmentation.

A source is a function of (epoch, index): the same sample of the same epoch is the same on every worker and after a
resume. Suffixes: B inputs, D features, h w grid, H W image.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.transforms import augment, fit, pad_to_multiple
from airmoe_ray.errors import DataError
from airmoe_ray.features.backbone import Backbone, FeatureMaps
from airmoe_ray.features.cache_reader import FeatureCache
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.runtime.rng import generator, training_id

T = TypeVar("T")
_Pair = tuple[UInt8Array, UInt8Array]  # an image and its label
_DECODERS = 4  # threads that read images of the next batch where the backbone is in the loop
_PROBE = 8  # images whose way through the backbone is timed


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items in the same order, each fetched while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(next, items, None)
        while (item := fetched.result()) is not None:
            fetched = pool.submit(next, items, None)
            yield item


class Samples(NamedTuple):
    """Views of some samples, stacked."""

    features_BDhw: Tensor
    labels_BHW: Tensor
    fine: tuple[Tensor, ...] = ()  # finer maps, where a refiner wants them


class Source(Protocol):
    """Training samples by index."""

    shape_of: NDArray[np.int64]  # shape group of every index; a batch is drawn from one group
    grids: list[tuple[int, int]]  # feature grid of every shape group

    def plain(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """Features (D, h, w) and padded label (H, W) of a sample as it is."""
        ...

    def batch(self, epoch: int, indices: Sequence[int]) -> Samples:
        """A view of each sample."""
        ...

    def batches(self, epoch: int, indices: Iterable[Sequence[int]]) -> Iterator[Samples]:
        """Batch after batch, with what can be fetched before it is needed."""
        ...


class CachedSource:
    """Reads memory maps; each visit takes one of the cached views at random."""

    def __init__(self, views: Sequence[FeatureCache], config: Config) -> None:
        self.views, self.seed = views, config.seed
        self.shape_of, self.grids = views[0].shape_of, views[0].grids  # all views of an image have its shape
        self._drawn: tuple[int, NDArray[np.int64]] = (-1, self.shape_of)

    def plain(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """The first view."""
        return self.views[0].get(index)

    def batch(self, epoch: int, indices: Sequence[int]) -> Samples:
        """Stacked rows of the caches.

        By numpy alone, because `ahead` calls this in a thread of its own: torch would start a second team of OpenMP
        threads there, more than there are cores, and from then on every barrier of a step sleeps instead of spinning:
        training then takes half as long again.
        """
        view_of = self._views_of(epoch)
        views = [self.views[view_of[i]] for i in indices]
        features, labels = zip(*(view.get(i) for view, i in zip(views, indices, strict=True)), strict=True)
        fine = zip(*(view.get_fine(i) for view, i in zip(views, indices, strict=True)), strict=True)
        return Samples(
            torch.from_numpy(np.stack(features, dtype=np.float32)),
            torch.from_numpy(np.stack(labels)),
            tuple(torch.from_numpy(np.stack(maps, dtype=np.float32)) for maps in fine),
        )

    def batches(self, epoch: int, indices: Iterable[Sequence[int]]) -> Iterator[Samples]:
        """Batch after batch; all of it may run in a thread (`ahead`)."""
        return (self.batch(epoch, some) for some in indices)

    def _views_of(self, epoch: int) -> NDArray[np.int64]:
        if self._drawn[0] != epoch:  # once per epoch: a draw is for the whole dataset
            drawn = generator(self.seed, "view", epoch).integers(len(self.views), size=len(self.shape_of))
            self._drawn = (epoch, drawn)
        return self._drawn[1]


class OnlineSource:
    """Decodes, augments and runs the backbone at every visit: slow, but no two visits are alike."""

    def __init__(self, dataset: SegmentationDataset, backbone: Backbone, config: Config) -> None:
        self.dataset, self.backbone, self.config = dataset, backbone, config
        self.shape_of = np.zeros(len(dataset), dtype=np.int64)
        features, _ = self.plain(0)
        self.grids = [(features.shape[1], features.shape[2])]

    def plain(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """One image through the backbone, not augmented."""
        image, label = self._load(index)
        return self._maps([image]).features_BDhw[0].cpu().numpy(), label

    def batch(self, epoch: int, indices: Sequence[int]) -> Samples:
        """Augmented images through the backbone."""
        return self._samples([self._augmented(epoch, i) for i in indices])

    def batches(self, epoch: int, indices: Iterable[Sequence[int]]) -> Iterator[Samples]:
        """Batch after batch; images of the next one are decoded while the backbone and the step have this one.

        Only decoding and augmentation leave this thread, which are numpy's and PIL's: see `CachedSource.batch`.
        """
        with ThreadPoolExecutor(_DECODERS) as pool:

            def decoding(some: Sequence[int]) -> list[Future[_Pair]]:
                return [pool.submit(self._augmented, epoch, i) for i in some]

            started = map(decoding, indices)
            coming = next(started, None)
            while coming is not None:
                here, coming = coming, next(started, None)
                yield self._samples([pair.result() for pair in here])

    def _augmented(self, epoch: int, index: int) -> _Pair:
        return self._load(index, rng=generator(self.config.seed, "augment", training_id(epoch, index)))

    def _samples(self, pairs: Sequence[_Pair]) -> Samples:
        sizes = {label.shape for _, label in pairs}
        if len(sizes) > 1:
            raise DataError(
                f"images of sizes {sorted(sizes)} in one batch; set train.cache=true, which groups them by size"
            )
        maps = self._maps([image for image, _ in pairs])
        return Samples(maps.features_BDhw, torch.from_numpy(np.stack([label for _, label in pairs])), maps.fine)

    def _load(self, index: int, rng: np.random.Generator | None = None) -> _Pair:
        sample, size = self.dataset[index], self.config.data.image_size
        image, label = fit(sample.image, size), fit(sample.label, size)
        if rng is not None:
            image, label = augment(image, label, rng=rng)
        multiple = self.backbone.pad_multiple
        return pad_to_multiple(image, multiple)[0], pad_to_multiple(label, multiple)[0]

    def _maps(self, images: Sequence[UInt8Array]) -> FeatureMaps:
        fine = bool(self.backbone.fine_maps(self.config.experts.refiner))
        return self.backbone.maps(to_tensor(images, self.backbone.mean.device), fine=fine)


def loop_seconds(online: OnlineSource, like: Source) -> float:
    """Seconds per image that the backbone in the loop would cost: decoding, augmentation and features, on this machine.

    Measured on a few images of one size, as `like` groups them.
    """
    indices = np.flatnonzero(like.shape_of == like.shape_of[0])[:_PROBE].tolist()
    begun = time.monotonic()
    online.batch(0, indices)
    return (time.monotonic() - begun) / len(indices)

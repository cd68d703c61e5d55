"""Images as a network takes them: fitted, seen through the configured views, normalised.

Suffixes: B inputs, H W image.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.transforms import apply_view, fit, pad_to_multiple
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.features.sources import Samples
from airmoe_ray.runtime.rng import generator

PAD = 32  # the coarsest grid that the networks here have
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def normalised(images: Sequence[UInt8Array]) -> Tensor:
    """Equal-sized RGB images as (B, 3, H, W), with ImageNet's mean and deviation taken out."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (to_tensor(images) - mean) / std


class ImageSource:
    """Training samples as a `Source`: its features are the images themselves. Fitted images stay in memory."""

    def __init__(self, dataset: SegmentationDataset, config: Config) -> None:
        self.views, self.seed, size = config.data.views, config.seed, config.data.image_size
        samples = (dataset[i] for i in range(len(dataset)))
        self._fitted = [(fit(sample.image, size), fit(sample.label, size)) for sample in samples]
        shapes = [pad_to_multiple(label, PAD)[0].shape for _, label in self._fitted]
        kinds = sorted(set(shapes))
        self.shape_of: NDArray[np.int64] = np.array([kinds.index(shape) for shape in shapes])
        self.grids: list[tuple[int, int]] = [(height, width) for height, width in kinds]

    def plain(self, index: int) -> tuple[NDArray[np.floating], UInt8Array]:
        """A sample as it is."""
        image, label = self._padded(index, "identity")
        return normalised([image])[0].numpy(), label

    def batch(self, epoch: int, indices: Sequence[int]) -> Samples:
        """A view of each sample, drawn as for cached features."""
        drawn = generator(self.seed, "view", epoch).integers(len(self.views), size=len(self.shape_of))
        pairs = [self._padded(i, self.views[drawn[i]]) for i in indices]
        labels_BHW = torch.from_numpy(np.stack([label for _, label in pairs]))
        return Samples(normalised([image for image, _ in pairs]), labels_BHW)

    def batches(self, epoch: int, indices: Iterable[Sequence[int]]) -> Iterator[Samples]:
        """Batch after batch."""
        return (self.batch(epoch, some) for some in indices)

    def _padded(self, index: int, view: str) -> tuple[UInt8Array, UInt8Array]:
        image, label = apply_view(*self._fitted[index], view)
        return pad_to_multiple(image, PAD)[0], pad_to_multiple(label, PAD)[0]

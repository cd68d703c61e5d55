"""What every dataset is: an indexable set of labelled images, with classes, a palette and domains."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORE = 255  # label of pixels that count neither in the loss nor in any metric ("void")

UInt8Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One labelled image at its own size."""

    image: UInt8Array  # (H, W, 3) RGB
    label: UInt8Array  # (H, W), class id or IGNORE
    domain: int  # index into the dataset's `domains`
    name: str  # unique within the dataset, used in messages and output file names


@dataclass(frozen=True)
class ClassTable:
    """The classes of a dataset, in label order, with the colour each is drawn in."""

    names: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    unions: tuple[tuple[int, ...], ...] = ()  # labels after the classes: each stands for several that nobody told apart

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.palette), "one colour per class"


class SegmentationDataset(Protocol):
    """Random access to `Sample`s; cheap to construct, reads files only in `__getitem__`."""

    classes: ClassTable
    domains: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def domain_of(self, index: int) -> int:
        """Domain of a sample without decoding its image."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever any image or label may have changed (names, sizes, modification times, parameters)."""
        ...

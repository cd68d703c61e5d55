"""What every dataset is: an indexable set of labelled images, with classes, a palette and domains."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.errors import DataError

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


class Subset:
    """Some samples of a dataset, with its classes and domains; cached features of the whole serve any subset."""

    def __init__(self, dataset: SegmentationDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, list(indices)
        self.classes, self.domains = dataset.classes, dataset.domains

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[self.indices[index]]

    def domain_of(self, index: int) -> int:
        return self.dataset.domain_of(self.indices[index])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.dataset.fingerprint()}|{self.indices}".encode()).hexdigest()


def by_domain(dataset: SegmentationDataset, domains: Sequence[str], *, inside: bool) -> Subset:
    """The samples of some domains, or all but those."""
    for name in domains:
        if name not in dataset.domains:
            raise DataError(f"hold_out: no domain {name!r}; there are {', '.join(dataset.domains)}")
    chosen = {dataset.domains.index(name) for name in domains}
    return Subset(dataset, [i for i in range(len(dataset)) if (dataset.domain_of(i) in chosen) == inside])

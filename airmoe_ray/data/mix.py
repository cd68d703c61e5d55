"""Several datasets as one: each brings its own classes, which a common table joins.

Labels of a mix are the common classes, then unions of them: what a part's class stands for where it is more than one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from airmoe_ray.config import Meaning
from airmoe_ray.data.base import IGNORE, ClassTable, Sample, SegmentationDataset, UInt8Array
from airmoe_ray.data.class_map import ClassMap, map_classes
from airmoe_ray.errors import DataError


@dataclass(frozen=True)
class Part:
    """One dataset of a mix."""

    name: str
    dataset: SegmentationDataset
    meaning: ClassMap
    share: float = 1.0  # of its images that an epoch visits
    words: str = "{}"  # what a domain of it is called in a sentence


class Mix:
    """The parts one after another; a domain is a part's own domain, such as `camvid/0016E5`."""

    def __init__(self, parts: Sequence[Part], classes: ClassTable) -> None:
        self.parts = tuple(parts)
        self.left_out: tuple[str, ...] = ()  # parts whose images were all trained on, where others are scored
        groups = dict.fromkeys(group for part in parts for group in part.meaning.groups if len(group) > 1)
        self.classes = ClassTable(classes.names, classes.palette, tuple(groups))
        self.domains = tuple(f"{part.name}/{domain}" for part in parts for domain in part.dataset.domains)
        self._starts = [0, *accumulate(len(part.dataset) for part in parts)]
        self._first_domain = [0, *accumulate(len(part.dataset.domains) for part in parts)]
        self._tables = [self._label_table(part.meaning) for part in parts]

    def _label_table(self, meaning: ClassMap) -> UInt8Array:
        """Label of the mix for each label of a part."""
        groups: list[tuple[int, ...]] = [(c,) for c in range(len(self.classes.names))]
        labels = {group: i for i, group in enumerate([*groups, *self.classes.unions])}
        table = np.full(256, IGNORE, dtype=np.uint8)
        for i, row in enumerate(meaning.row_of):
            table[i] = IGNORE if row == IGNORE else labels[meaning.groups[row]]
        return table

    def restricted(self, keep: Sequence[int]) -> "Mix":
        """The same mix with some of its parts: classes and labels keep their meaning."""
        smaller = Mix([self.parts[p] for p in keep], self.classes)
        smaller.classes = self.classes
        smaller.left_out = tuple(part.name for p, part in enumerate(self.parts) if p not in keep)
        smaller._tables = [self._tables[p] for p in keep]
        return smaller

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Sample:
        part = self.part_of(index)
        sample = self.parts[part].dataset[index - self._starts[part]]
        return Sample(
            sample.image,
            self._tables[part][sample.label],
            self._first_domain[part] + sample.domain,
            f"{self.parts[part].name}/{sample.name}",
        )

    def part_of(self, index: int) -> int:
        """Which part a sample belongs to."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def part_of_domain(self, domain: int) -> int:
        """Which part a domain belongs to."""
        return int(np.searchsorted(self._first_domain, domain, side="right")) - 1

    def domain_of(self, index: int) -> int:
        part = self.part_of(index)
        return self._first_domain[part] + self.parts[part].dataset.domain_of(index - self._starts[part])

    def rows(self, label: UInt8Array, part: int) -> UInt8Array:
        """A label of the mix as rows of its part's classes, for scoring there."""
        row_of, table = self.parts[part].meaning.row_of, np.full(256, IGNORE, dtype=np.uint8)
        table[self._tables[part][: len(row_of)]] = row_of
        table[IGNORE] = IGNORE
        return table[label]

    def words_for(self, domain: int) -> tuple[str, str]:
        """How a domain is spoken of, and its name: ("{} drawings", "night")."""
        part = self.part_of_domain(domain)
        own = self.parts[part].dataset.domains[domain - self._first_domain[part]]
        return self.parts[part].words, own.replace("_", " ")

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(("mix", self.classes.names, self.classes.unions)).encode())
        for part, table in zip(self.parts, self._tables, strict=True):
            digest.update(f"{part.name}|{part.dataset.fingerprint()}|".encode() + table.tobytes())
        return digest.hexdigest()


def meaning_of(dataset: SegmentationDataset, index: int) -> ClassMap | None:
    """How a sample's label reads a model's classes; None: as they are."""
    return dataset.parts[dataset.part_of(index)].meaning if isinstance(dataset, Mix) else None


def not_scored(dataset: SegmentationDataset) -> str | None:
    """A line about the parts of a mix that have nothing to score; None where all have."""
    if not isinstance(dataset, Mix) or not dataset.left_out:
        return None
    return f"not scored: {', '.join(dataset.left_out)}, whose images were all trained on (--split train scores those)"


def adopt(dataset: SegmentationDataset, classes: ClassTable, *, given: Mapping[str, Meaning], source: str) -> Mix:
    """A dataset by itself, for a model of other classes."""
    meaning = map_classes(dataset.classes, classes, given=given, source=source)
    return Mix([Part(source, dataset, meaning)], classes)


def check_mix(parts: Sequence[Part], classes: ClassTable) -> None:
    """DataError where a class is labelled by nobody, a name stands twice, or a part has nothing to do with the rest."""
    names = [part.name for part in parts]
    if double := [name for name in names if names.count(name) > 1]:
        raise DataError(f"data.parts: two parts are called {double[0]!r}; give one of them another `title`")
    known = [{c for group in part.meaning.groups for c in group} for part in parts]
    if orphans := [name for c, name in enumerate(classes.names) if not any(c in own for own in known)]:
        raise DataError(
            f"data.classes: no part labels {orphans[0]!r}; take it out of data.classes, or map a part's class to it"
        )
    for p, own in enumerate(known):
        others = set().union(*(other for q, other in enumerate(known) if q != p))
        if len(parts) > 1 and not own & others:
            raise DataError(
                f"data.parts: {names[p]} has no class in common with the others; "
                "map one of its classes to theirs, or train it by itself"
            )

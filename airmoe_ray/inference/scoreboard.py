"""What is counted while a model is scored: pixels by class, by part, by domain and by image, and who was routed.

Suffixes: S samples, B inputs, C classes.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.mix import Mix
from airmoe_ray.errors import DataError
from airmoe_ray.inference.scores import ConfusionMatrix, Counts, RoutingStats, confusion_tables
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.runtime.workers import Workers

BATCH = 8


class PartScores:
    """Pixels of each part of a dataset by its own classes; a dataset that is no mix is its only part."""

    def __init__(self, dataset: SegmentationDataset) -> None:
        self.dataset = dataset
        parts = dataset.parts if isinstance(dataset, Mix) else ()
        self.names = [part.name for part in parts] or [""]
        self.classes = [part.meaning.classes.names for part in parts] or [dataset.classes.names]
        self.matrices = [ConfusionMatrix(len(names)) for names in self.classes]

    def add(self, index: int, mask: NDArray[np.integer], label: UInt8Array) -> Counts:
        """Count a sample and return its own matrix; the mask is of its part's classes, the label of the dataset's."""
        part = self.part_of(index)
        own = ConfusionMatrix(len(self.classes[part]))
        own.add(self.dataset.rows(label, part) if isinstance(self.dataset, Mix) else label, mask)
        self.matrices[part].counts += own.counts
        return own.counts

    def part_of(self, index: int) -> int:
        """Which part a sample belongs to."""
        return self.dataset.part_of(index) if isinstance(self.dataset, Mix) else 0

    def add_others(self, workers: Workers) -> None:
        """What every worker counted, on every worker."""
        for matrix in self.matrices:
            matrix.add_others(workers)

    def scores(self) -> dict[str, float]:
        """mIoU, mF1, mPre, mRec in 0-100, the mean over parts: each counts the same, however many images it has."""
        parts = [matrix.scores() for matrix in self.matrices if matrix.counts.any()] or [self.matrices[0].scores()]
        return {name: float(np.mean([scores[name] for scores in parts])) for name in parts[0]}

    def per_class(self) -> dict[str, dict[str, float | None]]:
        """Scores of every class; those of a mix are named after their part as well."""
        rows: dict[str, dict[str, float | None]] = {}
        for part, names, matrix in zip(self.names, self.classes, self.matrices, strict=True):
            prefix = f"{part}/" if len(self.names) > 1 else ""
            scores = matrix.per_class()
            rows |= {f"{prefix}{name}": {key: row[c] for key, row in scores.items()} for c, name in enumerate(names)}
        return rows

    def per_part(self) -> dict[str, dict[str, float]]:
        """Scores of the parts of a mix; empty where there is but one."""
        if len(self.names) == 1:
            return {}
        return {name: matrix.scores() for name, matrix in zip(self.names, self.matrices, strict=True)}

    def not_scored(self) -> dict[str, list[str]]:
        """Parts of a mix that were left out, and the model's classes that no label here stands for."""
        if not isinstance(self.dataset, Mix):
            return {}
        meant = {
            c
            for part, matrix in zip(self.dataset.parts, self.matrices, strict=True)
            for group, pixels in zip(part.meaning.groups, matrix.counts.sum(axis=1), strict=True)
            for c in group
            if pixels
        }
        classes = [name for c, name in enumerate(self.dataset.classes.names) if c not in meant]
        return {"parts": list(self.dataset.left_out), "classes": classes}


class Scoreboard:
    """Collects batches of outputs, masks and truths."""

    def __init__(self, dataset: SegmentationDataset, *, clients: int) -> None:
        self.dataset = dataset
        self.total = PartScores(dataset)
        self.by_domain = [ConfusionMatrix(self._classes_of(domain)) for domain in range(len(dataset.domains))]
        self.stats = RoutingStats(clients, len(dataset.domains))
        # hit, truth and predicted of each image; C are the classes of all parts, one part after another
        self._first_class = [0, *accumulate(len(names) for names in self.total.classes)]
        self.per_image_S3C: Counts = np.zeros((len(dataset), 3, self._first_class[-1]), dtype=np.int64)

    def _classes_of(self, domain: int) -> int:
        """How many classes the labels of a domain tell apart."""
        part = self.dataset.part_of_domain(domain) if isinstance(self.dataset, Mix) else 0
        return len(self.total.classes[part])

    def add(
        self,
        output: AirMoEOutput[Any] | None,
        indices: Sequence[int],
        masks: Sequence[NDArray[np.integer]],
        labels: Sequence[UInt8Array],
    ) -> None:
        """Count one batch of the samples `indices`; no output where nobody is routed."""
        domain_B = np.array([self.dataset.domain_of(i) for i in indices])
        if output is not None:
            self.stats.add(output, domain_B)
        for index, domain, mask, label in zip(indices, domain_B, masks, labels, strict=True):
            counts = self.total.add(index, mask, label)
            self.by_domain[domain].counts += counts
            # all scores follow from these three, in an eleventh of a matrix's numbers
            margins_3C = np.stack([counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)])
            first = self._first_class[self.total.part_of(index)]
            self.per_image_S3C[index, :, first : first + len(counts)] += margins_3C

    def add_others(self, workers: Workers) -> None:
        """What every worker counted, on every worker."""
        self.total.add_others(workers)
        for matrix in self.by_domain:
            matrix.add_others(workers)
        self.per_image_S3C = workers.total(torch.from_numpy(self.per_image_S3C)).numpy()
        self.stats.add_others(workers)

    def result(self) -> dict[str, Any]:
        """What `airmoe eval --json` prints; refused where no pixel was labelled, as 0 would look like a score."""
        if not any(matrix.counts.any() for matrix in self.total.matrices):
            raise DataError(
                f"every pixel of the {len(self.dataset)} images is void, so there is nothing to score; "
                "check the label files, the classes file and data.map"
            )
        scored = np.flatnonzero(self.per_image_S3C.any(axis=(1, 2)))
        in_domain = Counter(self.dataset.domain_of(int(i)) for i in scored)
        in_part = Counter(self.total.names[self.total.part_of(int(i))] for i in scored)
        domains = enumerate(zip(self.dataset.domains, self.by_domain, strict=True))
        per_part = {name: {**row, "images": in_part[name]} for name, row in self.total.per_part().items()}
        not_scored = self.total.not_scored()
        return {
            **self.total.scores(),
            "per_class": self.total.per_class(),
            **({"per_part": per_part} if per_part else {}),
            "per_domain": {
                name: {**matrix.scores(), "images": in_domain[domain]}
                for domain, (name, matrix) in domains
                if matrix.counts.any()
            },
            **({"not_scored": not_scored} if not_scored else {}),
            "confusion": confusion_tables(self.total.names, self.total.classes, self.total.matrices),
            **({"routing": self.stats.summary()} if self.stats.inputs else {}),
            "images": len(scored),
        }

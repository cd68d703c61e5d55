"""Scores of a model on a dataset: segmentation overall, per class and per domain, and the router's health."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.mix import Mix, meaning_of
from airmoe_ray.errors import UserError
from airmoe_ray.inference.masks import Prepared, mask_of
from airmoe_ray.inference.scores import ConfusionMatrix, RoutingStats
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.ledger import Ledger, account, mean_ledger
from airmoe_ray.runtime.progress import Progress
from airmoe_ray.runtime.rng import evaluation_id
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

    def add(self, index: int, mask: NDArray[np.integer], label: UInt8Array) -> None:
        """Count a sample; the mask is of its part's classes, the label of the dataset's."""
        part = self.dataset.part_of(index) if isinstance(self.dataset, Mix) else 0
        self.matrices[part].add(self.truth(index, label), mask)

    def truth(self, index: int, label: UInt8Array) -> UInt8Array:
        """A sample's label in its part's classes."""
        return self.dataset.rows(label, self.dataset.part_of(index)) if isinstance(self.dataset, Mix) else label

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


class Scoreboard:
    """Collects batches of outputs, masks and truths."""

    def __init__(self, dataset: SegmentationDataset, *, clients: int) -> None:
        self.dataset = dataset
        self.total = PartScores(dataset)
        self.by_domain = [ConfusionMatrix(self._classes_of(domain)) for domain in range(len(dataset.domains))]
        self.stats = RoutingStats(clients, len(dataset.domains))

    def _classes_of(self, domain: int) -> int:
        """How many classes the labels of a domain tell apart."""
        part = self.dataset.part_of_domain(domain) if isinstance(self.dataset, Mix) else 0
        return len(self.total.classes[part])

    def add(
        self,
        output: AirMoEOutput[Any],
        indices: Sequence[int],
        masks: Sequence[NDArray[np.integer]],
        labels: Sequence[UInt8Array],
    ) -> None:
        """Count one batch of the samples `indices`."""
        domain_B = np.array([self.dataset.domain_of(i) for i in indices])
        self.stats.add(output, domain_B)
        for index, domain, mask, label in zip(indices, domain_B, masks, labels, strict=True):
            self.total.add(index, mask, label)
            self.by_domain[domain].add(self.total.truth(index, label), mask)

    def add_others(self, workers: Workers) -> None:
        """What every worker counted, on every worker."""
        self.total.add_others(workers)
        for matrix in self.by_domain:
            matrix.add_others(workers)
        self.stats.add_others(workers)

    def result(self) -> dict[str, Any]:
        """What `airmoe eval --json` prints."""
        domains = zip(self.dataset.domains, self.by_domain, strict=True)
        per_part = self.total.per_part()
        return {
            **self.total.scores(),
            "per_class": self.total.per_class(),
            **({"per_part": per_part} if per_part else {}),
            "per_domain": {name: matrix.scores() for name, matrix in domains if matrix.counts.any()},
            "routing": self.stats.summary(),
            "images": self.stats.inputs,
        }


def leave_refiner_alone(segmenter: Segmenter) -> None:
    """A control: from now on the refiner gets logits of zero, and must do without what heads and experts found."""
    refiner = segmenter.model.refiner
    if refiner is None:
        raise UserError("this model has no refiner (experts.refiner); there is nothing to leave alone")
    refiner.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))


def evaluate(segmenter: Segmenter, dataset: SegmentationDataset, *, progress: Progress | None = None) -> dict[str, Any]:
    """The whole way from image to mask for every sample, scored at the images' own size."""
    board = Scoreboard(dataset, clients=segmenter.config.experts.count)
    ledgers: list[Ledger] = []
    for indices, images, labels in _batches(segmenter, dataset):
        output = segmenter.run(images, [evaluation_id(i) for i in indices])
        masks = [
            mask_of(logits, image, meaning_of(dataset, index))
            for logits, image, index in zip(output.logits_BChw, images, indices, strict=True)
        ]
        board.add(output, indices, masks, labels)
        if progress:
            progress(indices[-1] + 1, len(dataset))
        ledgers += _ledgers(segmenter, output)
    return board.result() | {"communication": mean_ledger(ledgers)}


def _ledgers(segmenter: Segmenter, output: AirMoEOutput[LocalRound]) -> Iterator[Ledger]:
    """What each image of a batch cost, with those of its clients that transmitted and their fading."""
    routing, (height, width) = output.routing, output.coarse_BChw.shape[2:]
    gain_BK = output.round.gains(routing.transmit_BK)
    for gain_K, active_K in zip(gain_BK, routing.active_BK, strict=True):
        gains = gain_K[active_K].tolist()
        yield account(
            segmenter.config,
            feature_dim=segmenter.card.feature_dim,
            classes=len(segmenter.card.classes),
            grid=(height, width),
            top_k=len(gains),
            gains_K=gains,
        )


def _batches(
    segmenter: Segmenter, dataset: SegmentationDataset
) -> Iterator[tuple[list[int], list[Prepared], list[UInt8Array]]]:
    """Consecutive samples of equal padded size."""
    indices: list[int] = []
    images: list[Prepared] = []
    labels: list[UInt8Array] = []
    for index in range(len(dataset)):
        sample = dataset[index]
        image = segmenter.prepare(sample.image)
        if images and (image.padded.shape != images[0].padded.shape or len(images) == BATCH):
            yield indices, images, labels
            indices, images, labels = [], [], []
        indices.append(index)
        images.append(image)
        labels.append(sample.label)
    if images:
        yield indices, images, labels

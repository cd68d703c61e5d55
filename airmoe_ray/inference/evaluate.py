"""Scores of a model on a dataset: segmentation overall, per class and per domain, and the router's health."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.data.base import SegmentationDataset, UInt8Array
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


class Scoreboard:
    """Collects batches of outputs, masks and truths."""

    def __init__(self, dataset: SegmentationDataset, *, clients: int) -> None:
        self.dataset = dataset
        classes = len(dataset.classes.names)
        self.total = ConfusionMatrix(classes)
        self.by_domain = [ConfusionMatrix(classes) for _ in dataset.domains]
        self.stats = RoutingStats(clients, len(dataset.domains))

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
        for domain, mask, label in zip(domain_B, masks, labels, strict=True):
            self.total.add(label, mask)
            self.by_domain[domain].add(label, mask)

    def add_others(self, workers: Workers) -> None:
        """What every worker counted, on every worker."""
        for matrix in (self.total, *self.by_domain):
            matrix.add_others(workers)
        self.stats.add_others(workers)

    def result(self) -> dict[str, Any]:
        """What `airmoe eval --json` prints."""
        per_class = self.total.per_class()
        names = self.dataset.classes.names
        domains = zip(self.dataset.domains, self.by_domain, strict=True)
        return {
            **self.total.scores(),
            "per_class": {name: {key: rows[c] for key, rows in per_class.items()} for c, name in enumerate(names)},
            "per_domain": {name: matrix.scores() for name, matrix in domains if matrix.counts.any()},
            "routing": self.stats.summary(),
            "images": self.stats.inputs,
        }


def evaluate(segmenter: Segmenter, dataset: SegmentationDataset, *, progress: Progress | None = None) -> dict[str, Any]:
    """The whole way from image to mask for every sample, scored at the images' own size."""
    board = Scoreboard(dataset, clients=segmenter.config.experts.count)
    ledgers: list[Ledger] = []
    for indices, images, labels in _batches(segmenter, dataset):
        output = segmenter.run(images, [evaluation_id(i) for i in indices])
        masks = [mask_of(logits, image) for logits, image in zip(output.logits_BChw, images, strict=True)]
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

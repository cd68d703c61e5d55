"""Scores of a model on a dataset: segmentation overall, per class and per domain, and the router's health."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from airmoe_ray.clients import LocalRound
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.feature_cache import FeatureCache
from airmoe_ray.features import Progress
from airmoe_ray.inference import Prepared, Segmenter, mask_of
from airmoe_ray.ledger import account
from airmoe_ray.metrics import ConfusionMatrix, RoutingStats
from airmoe_ray.moe import AirMoE, AirMoEOutput
from airmoe_ray.rng import evaluation_id

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
        output: AirMoEOutput[LocalRound],
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
    extra: dict[str, Any] = {}
    for indices, images, labels in _batches(segmenter, dataset):
        output = segmenter.run(images, [evaluation_id(i) for i in indices])
        masks = [mask_of(logits, image) for logits, image in zip(output.logits_BChw, images, strict=True)]
        board.add(output, indices, masks, labels)
        if progress:
            progress(indices[-1] + 1, len(dataset))
        if "communication" not in extra:
            extra["communication"] = _ledger(segmenter, output)
    return board.result() | extra


def _ledger(segmenter: Segmenter, output: AirMoEOutput[LocalRound]) -> dict[str, int | None]:
    """What the first image cost, with its own fading."""
    routing, config = output.routing, segmenter.config
    gains_K = output.round.gains(routing.transmit_BK)[0][routing.active_BK[0]].tolist()
    height, width = output.logits_BChw.shape[2:]
    ledger = account(
        config,
        feature_dim=segmenter.card.feature_dim,
        classes=len(segmenter.card.classes),
        grid=(height, width),
        top_k=config.routing.top_k,
        gains_K=gains_K,
    )
    return asdict(ledger)


@torch.inference_mode()
def validate(model: AirMoE, view: FeatureCache, dataset: SegmentationDataset) -> dict[str, Any]:
    """The same scores from cached features, at the fitted size: quick enough for every epoch."""
    device = model.query.linear.weight.device
    board = Scoreboard(dataset, clients=model.config.experts.count)
    model.eval()
    for shape in range(len(view.grids)):
        members = np.flatnonzero(view.shape_of == shape).tolist()
        for indices in (members[start : start + BATCH] for start in range(0, len(members), BATCH)):
            rows = [view.get(i) for i in indices]
            features_BDhw = torch.from_numpy(np.stack([row[0] for row in rows])).to(device, torch.float32)
            output = model(features_BDhw, [evaluation_id(i) for i in indices])
            size = rows[0][1].shape
            logits = interpolate(output.logits_BChw, size=size, mode="bilinear", align_corners=False)
            board.add(output, indices, list(logits.argmax(dim=1).cpu().numpy()), [row[1] for row in rows])
    return board.result()


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

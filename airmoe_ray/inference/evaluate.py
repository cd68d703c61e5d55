"""Scores of a model on a dataset: segmentation overall, per class and per domain, and the router's health."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from airmoe_ray.config import ChannelConfig
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.mix import meaning_of
from airmoe_ray.errors import UserError
from airmoe_ray.inference.masks import Prepared, mask_of
from airmoe_ray.inference.scoreboard import BATCH, Scoreboard
from airmoe_ray.inference.scores import Counts
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.inference.validate import Inputs, OnceEach, through
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.ledger import Ledger, account, mean_ledger
from airmoe_ray.runtime.progress import Progress
from airmoe_ray.runtime.rng import evaluation_id


class Evaluation(NamedTuple):
    """Scores on one channel."""

    scores: dict[str, Any]  # what `airmoe eval --json` prints
    per_image_S3C: Counts  # pixels of each image and class: hit, of the truth, predicted; summed over draws


def leave_refiner_alone(segmenter: Segmenter) -> None:
    """A control: from now on the refiner gets logits of zero, and must do without what heads and experts found."""
    refiner = segmenter.model.refiner
    if refiner is None:
        raise UserError("this model has no refiner (experts.refiner); there is nothing to leave alone")
    refiner.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))


def evaluate(
    segmenter: Segmenter, dataset: SegmentationDataset, *, draws: int = 1, progress: Progress | None = None
) -> dict[str, Any]:
    """The scores on the configured channel; see `evaluate_on`."""
    (found,) = evaluate_on(segmenter, dataset, [segmenter.config.channel], draws=draws, progress=progress)
    return found.scores


@torch.inference_mode()
def evaluate_on(
    segmenter: Segmenter,
    dataset: SegmentationDataset,
    channels: Sequence[ChannelConfig],
    *,
    draws: int = 1,
    progress: Progress | None = None,
) -> list[Evaluation]:
    """The whole way from image to mask for every sample, scored at the images' own size, on each of the channels.

    Each image crosses a channel `draws` times, with fading and noise of its own each time, and the pixels of all
    crossings are counted; backbone and experts run once for all of them.
    """
    boards = [Scoreboard(dataset, clients=segmenter.config.experts.count) for _ in channels]
    ledgers: list[list[Ledger]] = [[] for _ in channels]
    for indices, images, labels in batches_of(segmenter.prepare, dataset):
        maps = segmenter.maps(images)
        domains_B = torch.tensor([dataset.domain_of(i) for i in indices], device=maps.features_BDhw.device)
        clients = OnceEach(segmenter.model.clients)
        for draw in range(draws):
            inputs = Inputs(maps, [evaluation_id(i, draw) for i in indices], domains_B)
            # an exact sum is the same every time
            due = [c for c, channel in enumerate(channels) if draw == 0 or channel.kind != "ideal"]
            outputs = through([channels[c] for c in due], segmenter.model, inputs, clients)
            for c, output in zip(due, outputs, strict=True):
                masks = [
                    mask_of(logits, image, meaning_of(dataset, index))
                    for logits, image, index in zip(output.logits_BChw, images, indices, strict=True)
                ]
                boards[c].add(output, indices, masks, labels)
                ledgers[c] += _ledgers(segmenter, output)
        if progress:
            progress(indices[-1] + 1, len(dataset))
    return [
        Evaluation(
            board.result() | {"communication": mean_ledger(own), "draws": 1 if channel.kind == "ideal" else draws},
            board.per_image_S3C,
        )
        for board, own, channel in zip(boards, ledgers, channels, strict=True)
    ]


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


def batches_of(
    prepare: Callable[[UInt8Array], Prepared], dataset: SegmentationDataset
) -> Iterator[tuple[list[int], list[Prepared], list[UInt8Array]]]:
    """Consecutive samples of equal padded size."""
    indices: list[int] = []
    images: list[Prepared] = []
    labels: list[UInt8Array] = []
    for index in range(len(dataset)):
        sample = dataset[index]
        image = prepare(sample.image)
        if images and (image.padded.shape != images[0].padded.shape or len(images) == BATCH):
            yield indices, images, labels
            indices, images, labels = [], [], []
        indices.append(index)
        images.append(image)
        labels.append(sample.label)
    if images:
        yield indices, images, labels

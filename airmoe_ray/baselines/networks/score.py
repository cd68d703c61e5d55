"""Scores of a network: the whole way from image to mask, as for any other model; nothing crosses a channel."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from airmoe_ray.baselines.networks.images import PAD, normalised
from airmoe_ray.config import Config
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.mix import meaning_of
from airmoe_ray.inference.evaluate import Evaluation, batches_of
from airmoe_ray.inference.masks import Prepared, mask_of, prepare_image
from airmoe_ray.inference.scoreboard import Scoreboard
from airmoe_ray.radio.ledger import Ledger
from airmoe_ray.runtime.progress import Progress


class TrainedNetwork(NamedTuple):
    """A network with its settings."""

    config: Config
    network: nn.Module

    def prepare(self, image: UInt8Array) -> Prepared:
        """Fit and pad one image."""
        return prepare_image(image, self.config, PAD)

    @torch.inference_mode()
    def logits(self, images: list[Prepared]) -> Tensor:
        """(B, C, H, W) of images of one padded size."""
        device = next(self.network.parameters()).device
        self.network.eval()
        logits_BCHW: Tensor = self.network(normalised([image.padded for image in images]).to(device))
        return logits_BCHW


def evaluate_network(
    trained: TrainedNetwork, dataset: SegmentationDataset, *, progress: Progress | None = None
) -> Evaluation:
    """Scored at the images' own size."""
    board = Scoreboard(dataset, clients=1)
    for indices, images, labels in batches_of(trained.prepare, dataset):
        masks = [
            mask_of(logits, image, meaning_of(dataset, index))
            for logits, image, index in zip(trained.logits(images), images, indices, strict=True)
        ]
        board.add(None, indices, masks, labels)
        if progress:
            progress(indices[-1] + 1, len(dataset))
    nothing = dict.fromkeys(Ledger.__dataclass_fields__, 0.0)
    return Evaluation(board.result() | {"communication": nothing, "draws": 1}, board.per_image_S3C)

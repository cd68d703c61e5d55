"""From an image to its mask: fit, pad, backbone, AirMoE, crop, upsample to the image's own size, argmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from airmoe_ray.backbone import Backbone, load_backbone
from airmoe_ray.checkpoint import ModelCard, load_checkpoint, load_weights
from airmoe_ray.clients import LocalRound
from airmoe_ray.config import Config
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.device import pick_device
from airmoe_ray.errors import CheckpointError
from airmoe_ray.features import prepare, to_tensor
from airmoe_ray.moe import AirMoE, AirMoEOutput


@dataclass(frozen=True)
class Prepared:
    """An image as the backbone takes it, and the way back."""

    padded: UInt8Array  # (H', W', 3)
    valid: tuple[int, int]  # height and width of the fitted image within it
    original: tuple[int, int]  # height and width of the image as it came


class Segmenter:
    """A trained model with its backbone, in one process."""

    def __init__(self, config: Config, card: ModelCard, backbone: Backbone, model: AirMoE) -> None:
        self.config, self.card, self.backbone, self.model = config, card, backbone, model
        self.model.eval()

    @classmethod
    def load(cls, checkpoint: Path, config: Config | None = None) -> "Segmenter":
        """From a checkpoint folder; `config` takes the place of the stored one, architecture unchanged."""
        stored, card = load_checkpoint(checkpoint)
        config = config or stored
        device = pick_device(config.train.device, threads=config.train.threads)
        backbone = load_backbone(config.backbone).to(device)
        if backbone.fingerprint != card.backbone_fingerprint:
            raise CheckpointError(
                f"{checkpoint}: was trained on features of another backbone ({card.backbone_name} "
                f"{card.backbone_fingerprint[:8]}, this one is {backbone.fingerprint[:8]}); restore it or retrain"
            )
        model = AirMoE(
            config, feature_dim=card.feature_dim, classes=len(card.classes), dilations=_triple(card.dilations)
        )
        load_weights(checkpoint, model)
        return cls(config, card, backbone, model.to(device))

    def prepare(self, image: UInt8Array) -> Prepared:
        """Fit (unless `serve.resize: native`) and pad one image."""
        size = self.config.data.image_size if self.config.serve.resize == "fit" else None
        padded, valid = prepare(image, image_size=size, multiple=self.backbone.pad_multiple)
        return Prepared(padded, valid, (image.shape[0], image.shape[1]))

    @torch.inference_mode()
    def run(self, images: Sequence[Prepared], ids_B: Sequence[int]) -> AirMoEOutput[LocalRound]:
        """Backbone and AirMoE on images of one padded size."""
        images_B3HW = to_tensor([image.padded for image in images]).to(self.backbone.mean.device)
        features_BDhw = self.backbone(images_B3HW)
        output: AirMoEOutput[LocalRound] = self.model(features_BDhw, ids_B)
        return output


def mask_of(logits_Chw: Tensor, image: Prepared) -> UInt8Array:
    """Class ids at the image's own size: up to the padded size, crop, up or down to the original, argmax."""
    logits = interpolate(logits_Chw[None], size=image.padded.shape[:2], mode="bilinear", align_corners=False)
    logits = logits[..., : image.valid[0], : image.valid[1]]
    if image.valid != image.original:
        logits = interpolate(logits, size=image.original, mode="bilinear", align_corners=False)
    return logits[0].argmax(dim=0).to(torch.uint8).cpu().numpy()


def _triple(values: Sequence[int]) -> tuple[int, int, int]:
    first, second, third = values
    return first, second, third

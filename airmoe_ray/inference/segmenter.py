"""From an image to its mask: fit, pad, backbone, AirMoE, crop, upsample to the image's own size, argmax."""

from collections.abc import Sequence
from pathlib import Path

import torch

from airmoe_ray.config import Config
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.errors import CheckpointError
from airmoe_ray.features.backbone import Backbone, load_backbone
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.masks import Prepared, prepare_image
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import Participant, Participants
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.runtime.device import pick_device
from airmoe_ray.storage.checkpoint import ModelCard, load_checkpoint, load_weights


def load_matching_backbone(config: Config, card: ModelCard) -> Backbone:
    """The backbone that the configuration names; refused where the run was trained on another one's features."""
    backbone = load_backbone(config.backbone)
    if backbone.fingerprint != card.backbone_fingerprint:
        raise CheckpointError(
            f"the run was trained on features of another backbone ({card.backbone_name} "
            f"{card.backbone_fingerprint[:8]}, this one is {backbone.fingerprint[:8]}); restore it or retrain"
        )
    return backbone


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
        backbone = load_matching_backbone(config, card).to(device)
        model = AirMoE(
            config,
            feature_dim=card.feature_dim,
            classes=len(card.classes),
            dilations=card.dilation_rates,
            fine_dims=card.fine_dims,
        )
        load_weights(checkpoint, model)
        return cls(config, card, backbone, model.to(device))

    def prepare(self, image: UInt8Array) -> Prepared:
        """Fit and pad one image for this model."""
        return prepare_image(image, self.config, self.backbone.pad_multiple)

    @torch.inference_mode()
    def run(
        self,
        images: Sequence[Prepared],
        ids_B: Sequence[int],
        *,
        only: Participant | None = None,
        without: Participant | None = None,
    ) -> AirMoEOutput[LocalRound]:
        """Backbone and AirMoE on images of one padded size; `only` one participant's answer, or that `without` one."""
        participants = Participants(only, without)
        participants.check(self.config.experts.count, shared=self.model.shared is not None)
        images_B3HW = to_tensor([image.padded for image in images]).to(self.backbone.mean.device)
        maps = self.backbone.maps(images_B3HW, fine=self.model.refiner is not None)
        output: AirMoEOutput[LocalRound] = self.model(
            maps.features_BDhw, ids_B, fine=maps.fine, participants=participants
        )
        return output

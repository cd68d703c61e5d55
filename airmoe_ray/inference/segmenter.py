"""From an image to its mask: fit, pad, backbone, AirMoE, crop, upsample to the image's own size, argmax."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from airmoe_ray.config import ChannelConfig, Config, RoutingConfig
from airmoe_ray.config_file import parse_config
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.features.backbone import Backbone, FeatureMaps, load_backbone
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.features.serving_form import for_serving
from airmoe_ray.inference.inputs import ImageInput, read_pixels
from airmoe_ray.inference.masks import Prepared, prepare_image
from airmoe_ray.inference.result import Segmentation, segmentation_of
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import Participant, Participants, RoutingRule
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.runtime.device import pick_device
from airmoe_ray.storage.checkpoint import ModelCard, load_checkpoint, load_weights
from airmoe_ray.storage.shipped import find_model


def load_matching_backbone(config: Config, card: ModelCard, weights: bytes | None = None) -> Backbone:
    """The backbone that the configuration names, as serving wants it.

    Refused where the run was trained on another one's features. `weights` are the bytes of its file, where that is on
    another machine.
    """
    backbone = load_backbone(config.backbone, weights=weights)
    if backbone.fingerprint != card.backbone_fingerprint:
        raise CheckpointError(
            f"the run was trained on features of another backbone ({card.backbone_name} "
            f"{card.backbone_fingerprint[:8]}, this one is {backbone.fingerprint[:8]}); restore it or retrain"
        )
    return for_serving(backbone, config.serve.precision)


class Segmenter:
    """A trained model with its backbone, in one process.

    >>> segmenter = Segmenter.from_pretrained("street")
    >>> answer = segmenter("photo.jpg", snr_db=10, seed=7)
    >>> answer.mask.shape, [segment.label for segment in answer.segments]
    >>> answer.overlay().save("overlay.png")
    """

    def __init__(self, config: Config, card: ModelCard, backbone: Backbone, model: AirMoE) -> None:
        self.config, self.card, self.backbone, self.model = config, card, backbone, model
        self.model.eval()

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *, rule: RoutingRule | None = None) -> "Segmenter":
        """From a run or checkpoint folder, by the name of a shipped model, or by a hub id (`org/name`), in this order.

        `rule` sorts the clients of each image in the place of the configured one.
        """
        segmenter = cls.load(find_model(name).checkpoint)
        segmenter.model.rule = rule
        return segmenter

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

    def prepare(self, image: UInt8Array, *, original: tuple[int, int] | None = None) -> Prepared:
        """Fit and pad one image for this model; `original` is its own size where these are fewer pixels."""
        return prepare_image(image, self.config, self.backbone.pad_multiple, original=original)

    def maps(self, images: Sequence[Prepared]) -> FeatureMaps:
        """Features of images of one padded size, Eq. (7), and the finer maps where there is a refiner."""
        images_B3HW = to_tensor([image.padded for image in images], self.backbone.mean.device)
        return self.backbone.maps(images_B3HW, fine=self.model.refiner is not None)

    def __call__(
        self,
        image: ImageInput,
        *,
        snr_db: float | None = None,
        top_k: int | None = None,
        channel: str | None = None,
        seed: int = 0,
    ) -> Segmentation:
        """Segment one image: a path, the bytes of a file, a PIL image, or an array (H, W, 3).

        The same image with the same `seed` meets the same fading and noise, here and at a server of the same model.
        """
        if seed < 0:
            raise UserError(f"seed = {seed}: expected 0 or more")
        config = self._changed(snr_db=snr_db, top_k=top_k, channel=channel)
        long_side = config.data.image_size if config.serve.resize == "fit" else None
        rgb, seen = read_pixels(image, max_pixels=config.serve.max_pixels, long_side=long_side)
        prepared = self.prepare(seen, original=(rgb.shape[0], rgb.shape[1]))
        output = self.run([prepared], [seed], routing_config=config.routing, channel=config.channel)
        return segmentation_of(output, prepared, image=rgb, card=self.card, config=config, seed=seed)

    def _changed(self, *, snr_db: float | None, top_k: int | None, channel: str | None) -> Config:
        """The configuration with what one call chooses, checked as any other."""
        given = {("channel", "snr_db"): snr_db, ("routing", "top_k"): top_k, ("channel", "kind"): channel}
        chosen = {place: value for place, value in given.items() if value is not None}
        if not chosen:
            return self.config
        tree = self.config.model_dump(mode="json")
        for (block, key), value in chosen.items():
            tree[block][key] = value
        return parse_config(tree)

    @torch.inference_mode()
    def run(
        self,
        images: Sequence[Prepared],
        ids_B: Sequence[int],
        *,
        routing_config: RoutingConfig | None = None,
        channel: ChannelConfig | None = None,
        only: Participant | None = None,
        without: Participant | None = None,
    ) -> AirMoEOutput[LocalRound]:
        """Backbone and AirMoE on images of one padded size; as configured, unless other settings are given.

        `only` one participant's answer, or that `without` one.
        """
        participants = Participants(only, without)
        participants.check(self.config.experts.count, shared=self.model.shared is not None)
        maps = self.maps(images)
        output: AirMoEOutput[LocalRound] = self.model(
            maps.features_BDhw,
            ids_B,
            fine=maps.fine,
            routing_config=routing_config,
            channel=channel,
            participants=participants,
        )
        return output

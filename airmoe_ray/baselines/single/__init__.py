"""Segmentation networks of others, one file each, to be trained from scratch beside AirMoE.

Each is `Model(classes)`; `forward(images_B3HW)` takes images that the caller has normalised and gives logits at their
own size, (B, C, H, W). In training mode, models with auxiliary heads give `(logits_BCHW, [auxiliary logits_BCHW, …])`;
their papers add the losses of all with weight one. Normalisation is by batch, as published: train with batches > 1.
"""

import importlib
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class SingleModel:
    """What is known of a network before it is built."""

    key: str
    title: str  # as its paper writes it
    variant: str
    published_millions: float  # parameters without auxiliary heads: stated, or summed over the published layers
    published_classes: int  # which that count is for: the last layer grows with the classes
    published_where: str
    path: str  # module:class

    def build(self, classes: int) -> nn.Module:
        """Import the network's module and make it, with fresh weights from torch's generator."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)(classes)


def inference_parameters(model: nn.Module) -> int:
    """How many parameters a network keeps once trained: all but those of auxiliary heads."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("aux."))


_HERE = "airmoe_ray.baselines.single"
SINGLE_MODELS: dict[str, SingleModel] = {
    model.key: model
    for model in (
        SingleModel(
            "bisenetv2",
            "BiSeNetV2",
            "the standard size: alpha 1, lambda 1/4, d 1, a head of 1024 channels; four auxiliary heads",
            3.36,
            19,
            "no published count found; the sum over its layers as reimplementations have them, which a test does",
            f"{_HERE}.bisenetv2:BiSeNetV2",
        ),
        SingleModel(
            "segnet",
            "SegNet",
            "the full network on VGG-16's 13 convolutions, not SegNet-Basic",
            29.46,
            19,
            "Table III of the ENet paper (Paszke et al. 2016), which does not name the classes; SegNet's own has 14.7 "
            "for the encoder. A test sums VGG-16's layers and their mirror; of these, 8 thousand are biases that "
            "normalisation makes idle, and which ours lacks",
            f"{_HERE}.segnet:SegNet",
        ),
        SingleModel(
            "segformer",
            "SegFormer",
            "SegFormer-B0, transformers' implementation",
            3.8,
            150,
            "Table 1 of the paper, for 150 classes of ADE20K",
            f"{_HERE}.segformer:SegFormer",
        ),
        SingleModel(
            "attanet",
            "AttaNet",
            "on ResNet-18, two auxiliary heads",
            12.64,
            19,
            "no published count found; torchvision's ResNet-18 without its classifier (11.18) and the layers of the "
            "authors' code, which a test sums",
            f"{_HERE}.attanet:AttaNet",
        ),
        SingleModel(
            "hrda",
            "HRDA",
            "its network alone, on MiT-B0 (published: MiT-B5), from labels; the original adapts between domains",
            85.7,
            19,
            "of the published size, on MiT-B5: SegFormer's paper for the encoder (81.4) and the layers of the authors' "
            "heads, which a test sums",
            f"{_HERE}.hrda:HRDA",
        ),
        SingleModel(
            "topformer",
            "TopFormer",
            "TopFormer-Base",
            5.1,
            150,
            "the table of the authors' repository, for 150 classes of ADE20K",
            f"{_HERE}.topformer:TopFormer",
        ),
        SingleModel(
            "seaformer",
            "SeaFormer",
            "SeaFormer-Base",
            8.6,
            150,
            "the table of the authors' repository, for 150 classes of ADE20K",
            f"{_HERE}.seaformer:SeaFormer",
        ),
    )
}

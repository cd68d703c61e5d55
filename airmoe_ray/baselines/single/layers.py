"""Layers that several single models share: convolution with batch normalisation, resizing, initialisation."""

import math

import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(
    inputs: int, outputs: int, size: int = 1, *, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Sequential:
    """Convolution without bias and batch normalisation; the grid shrinks by the stride alone."""
    padding = dilation * (size // 2)
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, dilation=dilation, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def conv_bn_relu(inputs: int, outputs: int, size: int = 3, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU."""
    return conv_bn(inputs, outputs, size, stride=stride, dilation=dilation).append(nn.ReLU(inplace=True))


class Classifier(nn.Conv2d):
    """The last layer; starts near zero, so that no class is ahead whatever the scale of the features."""

    def __init__(self, inputs: int, classes: int, *, size: int = 1, bias: bool = True):
        super().__init__(inputs, classes, size, padding=size // 2, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.01)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def resize(maps_BCyx: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolate bilinearly to a size."""
    return F.interpolate(maps_BCyx, size, mode="bilinear", align_corners=False)


def grid_of(maps_BCyx: Tensor) -> tuple[int, int]:
    """Height and width of a map or an image."""
    height, width = maps_BCyx.shape[-2:]
    return height, width


def initialise(model: nn.Module) -> None:
    r"""Draw convolutions from :math:`\mathcal N(0, 2 / (k^2 C_{out} / groups))`; normalisations start as the identity.

    All of these models start from scratch here; most of the papers start from ImageNet weights.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and not isinstance(module, Classifier):
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)

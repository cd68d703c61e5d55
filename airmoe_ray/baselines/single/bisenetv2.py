"""BiSeNetV2: a wide shallow branch for detail, a narrow deep one for meaning, each gating the other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import Classifier, conv_bn, conv_bn_relu, grid_of, initialise, resize

EXPANSION = 6
HEAD_CHANNELS, AUX_CHANNELS = 1024, 128
WIDTHS = (16, 32, 64, 128)  # of the semantic branch at strides 4, 8, 16, 32


class Stem(nn.Module):
    """To stride 4 by two ways, a strided convolution and a pooling, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv_bn_relu(3, 16, stride=2)
        self.convolved = nn.Sequential(conv_bn_relu(16, 8, 1), conv_bn_relu(8, 16, stride=2))
        self.pooled = nn.MaxPool2d(3, stride=2, padding=1)
        self.join = conv_bn_relu(32, 16)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        maps_BCyx = self.first(images_B3HW)
        return self.join(torch.cat([self.convolved(maps_BCyx), self.pooled(maps_BCyx)], dim=1))


class GatherExpand(nn.Module):
    """Gather-and-expansion layer: a 3x3 convolution gathers, a depthwise one expands, a pointwise one projects."""

    def __init__(self, inputs: int, outputs: int, *, stride: int):
        super().__init__()
        hidden = inputs * EXPANSION
        expand = [conv_bn(inputs, hidden, 3, stride=stride, groups=inputs)]
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            expand.append(conv_bn(hidden, hidden, 3, groups=hidden))
            down = conv_bn(inputs, inputs, 3, stride=2, groups=inputs)
            self.shortcut = nn.Sequential(down, conv_bn(inputs, outputs))
        self.layers = nn.Sequential(conv_bn_relu(inputs, inputs), *expand, nn.ReLU(), conv_bn(hidden, outputs))

    def forward(self, maps_BCyx: Tensor) -> Tensor:
        return F.relu(self.layers(maps_BCyx) + self.shortcut(maps_BCyx))


class ContextEmbedding(nn.Module):
    """Adds what the whole image is about to every place. Its statistics are over the batch alone."""

    def __init__(self, channels: int):
        super().__init__()
        # scale and shift of its own would be idle: the next convolution takes up the one, its normalisation the other
        self.normalise = nn.BatchNorm2d(channels, affine=False)
        self.context = conv_bn_relu(channels, channels, 1)
        self.last = conv_bn_relu(channels, channels)

    def forward(self, maps_BCyx: Tensor) -> Tensor:
        context_BC11 = self.context(self.normalise(maps_BCyx.mean(dim=(2, 3), keepdim=True)))
        return self.last(maps_BCyx + context_BC11)


class GuidedAggregation(nn.Module):
    """Detail is gated by meaning at stride 8, meaning by detail at stride 32; both are summed at stride 8."""

    def __init__(self, channels: int):
        super().__init__()
        self.detail_keep = conv_bn(channels, channels, 3, groups=channels).append(_pointwise(channels))
        self.detail_down = conv_bn(channels, channels, 3, stride=2).append(nn.AvgPool2d(3, stride=2, padding=1))
        self.semantic_up = conv_bn(channels, channels, 3)
        self.semantic_keep = conv_bn(channels, channels, 3, groups=channels).append(_pointwise(channels))
        self.join = conv_bn_relu(channels, channels)

    def forward(self, detail_BCyx: Tensor, semantic_BChw: Tensor) -> Tensor:
        size = grid_of(detail_BCyx)
        gate_BCyx = F.interpolate(self.semantic_up(semantic_BChw), size).sigmoid()
        fine_BCyx = self.detail_keep(detail_BCyx) * gate_BCyx
        coarse_BChw = self.detail_down(detail_BCyx) * self.semantic_keep(semantic_BChw).sigmoid()
        return self.join(fine_BCyx + F.interpolate(coarse_BChw, size))


def _pointwise(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 1, bias=False)


def _head(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(conv_bn_relu(inputs, hidden), nn.Dropout(0.1), Classifier(hidden, classes))


def _detail_branch() -> nn.Sequential:
    rows = [(3, 64, 2), (64, 64, 1), (64, 64, 2), (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1)]
    return nn.Sequential(*(conv_bn_relu(inputs, outputs, stride=stride) for inputs, outputs, stride in rows))


class BiSeNetV2(nn.Module):
    """BiSeNetV2 (Yu et al. 2021), the standard size: alpha 1, lambda 1/4, d 1, a head of 1024 channels.

    While training, four auxiliary heads along the semantic branch give logits too (the paper's booster). Two ReLUs that
    the paper's figures leave open, after the depthwise expansion and the aggregation, are there as in public versions.
    """

    def __init__(self, classes: int):
        super().__init__()
        self.detail = _detail_branch()
        stages: list[nn.Module] = [Stem()]
        for inputs, outputs, blocks in zip(WIDTHS, WIDTHS[1:], (2, 2, 4), strict=False):
            first, rest = GatherExpand(inputs, outputs, stride=2), range(blocks - 1)
            stages.append(nn.Sequential(first, *(GatherExpand(outputs, outputs, stride=1) for _ in rest)))
        self.semantic = nn.ModuleList(stages)
        self.context = ContextEmbedding(WIDTHS[-1])
        self.aggregate = GuidedAggregation(WIDTHS[-1])
        self.head = _head(WIDTHS[-1], HEAD_CHANNELS, classes)
        self.aux = nn.ModuleList([_head(width, AUX_CHANNELS, classes) for width in WIDTHS])
        initialise(self)

    def forward(self, images_B3HW: Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
        size = grid_of(images_B3HW)
        maps_BCyx, levels = images_B3HW, []
        for stage in self.semantic:
            maps_BCyx = stage(maps_BCyx)
            levels.append(maps_BCyx)
        joined_BCyx = self.aggregate(self.detail(images_B3HW), self.context(maps_BCyx))
        logits_BCHW = resize(self.head(joined_BCyx), size)
        if not self.training:
            return logits_BCHW
        return logits_BCHW, [resize(head(level), size) for head, level in zip(self.aux, levels, strict=True)]

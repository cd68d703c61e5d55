"""Blocks of the mobile transformers, TopFormer and SeaFormer: inverted residuals and a convolutional feed-forward."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import conv_bn

# kernel, expansion, output channels, stride: a row of the papers' tables
Row = tuple[int, int, int, int]


class InvertedResidual(nn.Module):
    """Widen, convolve depthwise, narrow (MobileNetV2); added to its input where the shape stays."""

    def __init__(self, inputs: int, outputs: int, *, size: int, stride: int, expansion: int):
        super().__init__()
        hidden = inputs * expansion
        widen = [conv_bn(inputs, hidden), nn.ReLU()] if expansion != 1 else []
        depthwise = conv_bn(hidden, hidden, size, stride=stride, groups=hidden)
        self.layers = nn.Sequential(*widen, depthwise, nn.ReLU(), conv_bn(hidden, outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, maps_BCyx: Tensor) -> Tensor:
        out_BCyx = self.layers(maps_BCyx)
        return maps_BCyx + out_BCyx if self.residual else out_BCyx


def inverted_residuals(inputs: int, rows: Sequence[Row]) -> nn.Sequential:
    """Inverted residuals one after the other, as a table's rows say."""
    blocks = nn.Sequential()
    for size, expansion, outputs, stride in rows:
        blocks.append(InvertedResidual(inputs, outputs, size=size, stride=stride, expansion=expansion))
        inputs = outputs
    return blocks


class FeedForward(nn.Sequential):
    """Two pointwise convolutions with a depthwise one between them, which tells positions apart."""

    def __init__(self, channels: int, ratio: int):
        hidden = channels * ratio
        between = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        super().__init__(conv_bn(channels, hidden), between, nn.ReLU6(), conv_bn(hidden, channels))


class DropPath(nn.Module):
    """Leaves a residual branch out for some images while training (stochastic depth), and scales up the others."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch_BCyx: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch_BCyx
        keep_B111 = torch.rand(len(branch_BCyx), 1, 1, 1, device=branch_BCyx.device) >= self.rate
        return branch_BCyx * keep_B111 / (1 - self.rate)


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each added to its input."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, *, drop_rate: float):
        super().__init__()
        self.attention, self.feed_forward, self.drop_path = attention, feed_forward, DropPath(drop_rate)

    def forward(self, maps_BCyx: Tensor) -> Tensor:
        maps_BCyx = maps_BCyx + self.drop_path(self.attention(maps_BCyx))
        return maps_BCyx + self.drop_path(self.feed_forward(maps_BCyx))


def drop_rates(blocks: int, most: float) -> list[float]:
    """Rates that rise linearly from zero to the most with depth."""
    return [most * index / max(1, blocks - 1) for index in range(blocks)]

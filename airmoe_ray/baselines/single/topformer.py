"""TopFormer: a pyramid of tokens, pooled to one small grid, through a transformer, and injected back level by level."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import Classifier, conv_bn, conv_bn_relu, grid_of, initialise, resize
from airmoe_ray.baselines.single.mobile_blocks import Block, FeedForward, Row, drop_rates, inverted_residuals

STEM = 16
LEVELS: tuple[tuple[Row, ...], ...] = (  # to strides 4, 8, 16, 32
    ((3, 1, 16, 1), (3, 4, 32, 2), (3, 3, 32, 1)),
    ((5, 3, 64, 2), (5, 3, 64, 1)),
    ((3, 3, 128, 2), (3, 3, 128, 1)),
    ((5, 6, 160, 2), (5, 6, 160, 1), (3, 6, 160, 1)),
)
CHANNELS = tuple(rows[-1][2] for rows in LEVELS)
BLOCKS, HEADS, KEY, VALUE, RATIO, DROP_PATH = 4, 8, 16, 32, 2, 0.1
DECODED, FUSED = (1, 2, 3), 256  # stride 4 is not decoded


class Attention(nn.Module):
    """Multi-head attention over all places of a grid; linear maps are convolutions with batch normalisation.

    As in the authors' code, products of queries and keys are not scaled: their normalisations learn the scale.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.query, self.key = conv_bn(channels, HEADS * KEY), conv_bn(channels, HEADS * KEY)
        self.value = conv_bn(channels, HEADS * VALUE)
        self.project = nn.Sequential(nn.ReLU6(), conv_bn(HEADS * VALUE, channels))

    def forward(self, maps_BChw: Tensor) -> Tensor:
        query, key, value = (  # (B, heads, channels, places)
            layer(maps_BChw).flatten(2).unflatten(1, (HEADS, -1)) for layer in (self.query, self.key, self.value)
        )
        weights = (query.transpose(2, 3) @ key).softmax(dim=-1)  # (B, heads, places, places)
        mixed_BCT = (value @ weights.transpose(2, 3)).flatten(1, 2)
        return self.project(mixed_BCT.unflatten(2, grid_of(maps_BChw)))


class Injection(nn.Module):
    """Local tokens, gated by the semantics of their level, plus those semantics."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.local, self.semantics, self.gate = (conv_bn(inputs, outputs) for _ in range(3))

    def forward(self, local_BCyx: Tensor, semantics_BChw: Tensor) -> Tensor:
        size = grid_of(local_BCyx)
        gate_BCyx = resize(F.hardsigmoid(self.gate(semantics_BChw)), size)
        return self.local(local_BCyx) * gate_BCyx + resize(self.semantics(semantics_BChw), size)


class TopFormer(nn.Module):
    """TopFormer-Base (Zhang et al. 2022), from scratch instead of from ImageNet weights."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem = conv_bn_relu(3, STEM, stride=2)
        inputs = (STEM, *CHANNELS[:-1])
        self.levels = nn.ModuleList(
            [inverted_residuals(first, rows) for first, rows in zip(inputs, LEVELS, strict=True)]
        )
        width = sum(CHANNELS)
        self.transformer = nn.Sequential(
            *(
                Block(Attention(width), FeedForward(width, RATIO), drop_rate=rate)
                for rate in drop_rates(BLOCKS, DROP_PATH)
            )
        )
        self.injections = nn.ModuleList([Injection(CHANNELS[level], FUSED) for level in DECODED])
        self.head = nn.Sequential(conv_bn_relu(FUSED, FUSED, 1), nn.Dropout(0.1), Classifier(FUSED, classes))
        initialise(self)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        maps_BCyx, levels = self.stem(images_B3HW), []
        for stage in self.levels:
            maps_BCyx = stage(maps_BCyx)
            levels.append(maps_BCyx)
        height, width = grid_of(maps_BCyx)
        grid = ((height + 1) // 2, (width + 1) // 2)  # stride 64
        pooled_BChw = torch.cat([F.adaptive_avg_pool2d(level, grid) for level in levels], dim=1)
        semantics = self.transformer(pooled_BChw).split(CHANNELS, dim=1)
        injected = [
            injection(levels[level], semantics[level])
            for injection, level in zip(self.injections, DECODED, strict=True)
        ]
        summed_BCyx = torch.stack([resize(maps, grid_of(injected[0])) for maps in injected]).sum(dim=0)
        return resize(self.head(summed_BCyx), grid_of(images_B3HW))

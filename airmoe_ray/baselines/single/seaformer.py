"""SeaFormer: attention squeezed to one row and one column, enhanced by convolutions; a light head on two branches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import Classifier, conv_bn, conv_bn_relu, grid_of, initialise, resize
from airmoe_ray.baselines.single.mobile_blocks import Block, FeedForward, Row, drop_rates, inverted_residuals

STEM = 16
SHARED: tuple[Row, ...] = ((3, 1, 16, 1), (3, 4, 32, 2), (3, 3, 32, 1), (5, 3, 64, 2), (5, 3, 64, 1))  # to stride 8
DOWN: tuple[tuple[Row, ...], ...] = (  # to strides 32 and 64; a transformer follows each
    ((3, 3, 128, 2), (3, 3, 128, 1), (5, 4, 192, 2)),
    ((3, 6, 256, 2),),
)
CHANNELS = (SHARED[-1][2], *(rows[-1][2] for rows in DOWN))
KEYS, RATIOS, BLOCKS, HEADS, DROP_PATH = (16, 24), (2, 4), 4, 8, 0.1
FUSED = (128, 160)
POSITIONS = 16  # of an axis, interpolated to the grid's


class AxialQueries(nn.Module):
    """Attention along one axis, on averages over the other."""

    def __init__(self, key: int):
        super().__init__()
        self.key = key
        self.query_places, self.key_places = (nn.Parameter(torch.randn(1, HEADS * key, POSITIONS)) for _ in range(2))
        self.project = nn.Sequential(nn.ReLU6(), conv_bn(HEADS * 2 * key, HEADS * 2 * key))

    def forward(self, query_BCx: Tensor, key_BCx: Tensor, value_BCx: Tensor) -> Tensor:
        length = query_BCx.shape[-1]
        query = _heads(query_BCx + F.interpolate(self.query_places, length, mode="linear"))
        key = _heads(key_BCx + F.interpolate(self.key_places, length, mode="linear"))
        weights = (query.transpose(2, 3) @ key * self.key**-0.5).softmax(dim=-1)  # (B, heads, places, places)
        mixed_BCx = (_heads(value_BCx) @ weights.transpose(2, 3)).flatten(1, 2)
        return self.project(mixed_BCx.unsqueeze(-1)).squeeze(-1)


def _heads(maps_BCx: Tensor) -> Tensor:
    return maps_BCx.unflatten(1, (HEADS, -1))


class SqueezeEnhancedAttention(nn.Module):
    """Squeezed attention along rows and columns gates what a depthwise convolution sees of queries, keys and values."""

    def __init__(self, channels: int, key: int):
        super().__init__()
        keys, values = HEADS * key, HEADS * 2 * key
        self.query, self.key, self.value = conv_bn(channels, keys), conv_bn(channels, keys), conv_bn(channels, values)
        self.rows, self.columns = AxialQueries(key), AxialQueries(key)
        self.project = nn.Sequential(nn.ReLU6(), conv_bn(values, channels))
        local = 2 * keys + values
        self.enhance = nn.Sequential(conv_bn(local, local, 3, groups=local), nn.ReLU6(), conv_bn(local, channels))

    def forward(self, maps_BChw: Tensor) -> Tensor:
        parts = [layer(maps_BChw) for layer in (self.query, self.key, self.value)]
        rows_BCh = self.rows(*(part.mean(dim=3) for part in parts))
        columns_BCw = self.columns(*(part.mean(dim=2) for part in parts))
        context_BChw = parts[2] + rows_BCh.unsqueeze(3) + columns_BCw.unsqueeze(2)
        return F.hardsigmoid(self.project(context_BChw)) * self.enhance(torch.cat(parts, dim=1))


class Fusion(nn.Module):
    """Detail, gated by the context of a coarser level."""

    def __init__(self, detail: int, context: int, outputs: int):
        super().__init__()
        self.detail, self.gate = conv_bn(detail, outputs), conv_bn(context, outputs)

    def forward(self, detail_BCyx: Tensor, context_BChw: Tensor) -> Tensor:
        return self.detail(detail_BCyx) * resize(F.hardsigmoid(self.gate(context_BChw)), grid_of(detail_BCyx))


class SeaFormer(nn.Module):
    """SeaFormer-Base (Wan et al. 2023), from scratch instead of from ImageNet weights."""

    def __init__(self, classes: int):
        super().__init__()
        self.shared = nn.Sequential(conv_bn_relu(3, STEM, stride=2), inverted_residuals(STEM, SHARED))
        self.context = nn.ModuleList()
        for inputs, rows, key, ratio in zip(CHANNELS, DOWN, KEYS, RATIOS, strict=False):
            width = rows[-1][2]
            blocks = (
                Block(SqueezeEnhancedAttention(width, key), FeedForward(width, ratio), drop_rate=rate)
                for rate in drop_rates(BLOCKS, DROP_PATH)
            )
            self.context.append(nn.Sequential(inverted_residuals(inputs, rows), *blocks))
        detail = (CHANNELS[0], FUSED[0])
        self.fusions = nn.ModuleList([Fusion(*channels) for channels in zip(detail, CHANNELS[1:], FUSED, strict=True)])
        fuse = conv_bn(FUSED[-1], FUSED[-1], groups=FUSED[-1])
        self.head = nn.Sequential(fuse, nn.ReLU(), nn.Dropout(0.1), Classifier(FUSED[-1], classes))
        initialise(self)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        detail_BCyx = context_BChw = self.shared(images_B3HW)
        for stage, fusion in zip(self.context, self.fusions, strict=True):
            context_BChw = stage(context_BChw)
            detail_BCyx = fusion(detail_BCyx, context_BChw)
        return resize(self.head(detail_BCyx), grid_of(images_B3HW))

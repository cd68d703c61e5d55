"""HRDA's network: context at half the resolution, detail from a crop at the full one, and attention between the two.

HRDA (Hoyer, Dai and Van Gool 2022) is a method of domain adaptation: it trains this network on labelled images of one
domain and unlabelled ones of another, with a teacher's pseudo-labels. Only its network is here, trained from labels
alone as the other models are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import Classifier, conv_bn, conv_bn_relu, grid_of, initialise, resize
from airmoe_ray.baselines.single.mix_transformer import SIZES, segformer_config, transformers_segformer

EMBEDDED, DILATIONS = 256, (1, 6, 12, 18)
STRIDE = 4  # of the heads' logits
MULTIPLE = 16  # of the image's sides: halves, crops and their quarters then lie on the grid of logits


class Embedding(nn.Module):
    """Maps of all levels, each through a linear layer, side by side on the finest grid."""

    def __init__(self, channels: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(inputs, EMBEDDED, 1) for inputs in channels])

    def forward(self, levels: list[Tensor]) -> Tensor:
        embedded = [layer(level) for layer, level in zip(self.layers, levels, strict=True)]
        return torch.cat([resize(maps, grid_of(levels[0])) for maps in embedded], dim=1)


class ContextFusion(nn.Module):
    """ASPP of depthwise separable convolutions over all levels at once, DAFormer's fusion."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branches = nn.ModuleList([_dilated(inputs, dilation) for dilation in DILATIONS])
        self.join = conv_bn_relu(EMBEDDED * len(DILATIONS), EMBEDDED)

    def forward(self, maps_BCyx: Tensor) -> Tensor:
        return self.join(torch.cat([branch(maps_BCyx) for branch in self.branches], dim=1))


def _dilated(inputs: int, dilation: int) -> nn.Module:
    if dilation == 1:
        return conv_bn_relu(inputs, EMBEDDED, 1)
    depthwise = conv_bn(inputs, inputs, 3, groups=inputs, dilation=dilation)
    return nn.Sequential(depthwise, nn.ReLU(), conv_bn_relu(inputs, EMBEDDED, 1))


def _head(channels: tuple[int, ...], fusion: nn.Module, classes: int) -> nn.Sequential:
    return nn.Sequential(Embedding(channels), fusion, nn.Dropout(0.1), Classifier(EMBEDDED, classes))


class HRDA(nn.Module):
    """HRDA's network on MiT-B0, where the paper has MiT-B5: beside SegFormer-B0 it shows what two resolutions give.

    In training the detail comes from one crop of half the sides, the same for the batch, at a place drawn from torch's
    generator as dropout is; in evaluation from nine crops that overlap by half, averaged. The paper's extra loss on the
    crop alone (weight 0.1) is left out: the loss on the fused logits reaches the head through both resolutions.
    """

    def __init__(self, classes: int, *, size: str = "b0"):
        super().__init__()
        channels, width = SIZES[size][0], EMBEDDED * len(SIZES[size][0])
        self.segment = _head(channels, ContextFusion(width), classes)
        self.attend = _head(channels, conv_bn_relu(width, EMBEDDED, 1), classes)
        initialise(self)
        self.encoder = transformers_segformer().SegformerModel(segformer_config(size))

    def forward(self, images_B3HW: Tensor) -> Tensor:
        height, width = grid_of(images_B3HW)
        padded_B3HW = F.pad(images_B3HW, (0, -width % MULTIPLE, 0, -height % MULTIPLE))
        full = grid_of(padded_B3HW)
        half = (full[0] // 2, full[1] // 2)
        levels = self._encode(resize(padded_B3HW, half))
        context_BCyx, share_BCyx = self.segment(levels), self.attend(levels).sigmoid()  # at twice the stride
        grid = (full[0] // STRIDE, full[1] // STRIDE)
        detail_BCyx, seen_11yx = self._detail(padded_B3HW, half, grid)
        if self.training:  # where no crop lies, context alone
            share_BCyx = share_BCyx * F.interpolate(seen_11yx, grid_of(share_BCyx))
        fused_BCyx = resize(share_BCyx, grid) * detail_BCyx + resize((1 - share_BCyx) * context_BCyx, grid)
        return resize(fused_BCyx, full)[..., :height, :width]

    def _encode(self, images_B3HW: Tensor) -> list[Tensor]:
        return list(self.encoder(images_B3HW, output_hidden_states=True).hidden_states)

    def _detail(self, images_B3HW: Tensor, crop: tuple[int, int], grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Logits of the crops, where they belong and averaged where they overlap; and where there are any."""
        corners = [_random_corner(crop)] if self.training else _overlapping_corners(crop)
        crops = [images_B3HW[..., top : top + crop[0], left : left + crop[1]] for top, left in corners]
        logits = self.segment(self._encode(torch.cat(crops))).chunk(len(corners))
        total_BCyx = logits[0].new_zeros(len(images_B3HW), logits[0].shape[1], *grid)
        count_11yx = logits[0].new_zeros(1, 1, *grid)
        for (top, left), logits_BCyx in zip(corners, logits, strict=True):
            rows, columns = grid_of(logits_BCyx)
            place = (..., slice(top // STRIDE, top // STRIDE + rows), slice(left // STRIDE, left // STRIDE + columns))
            total_BCyx[place] += logits_BCyx
            count_11yx[place] += 1
        return total_BCyx / count_11yx.clamp_min(1), count_11yx.clamp_max(1)


def _random_corner(crop: tuple[int, int]) -> tuple[int, int]:
    """Anywhere within the image whose half the crop is, on the grid of the context's logits."""
    step = 2 * STRIDE
    top, left = (int(torch.randint(side // step + 1, ())) * step for side in crop)
    return top, left


def _overlapping_corners(crop: tuple[int, int]) -> list[tuple[int, int]]:
    return [(top, left) for top in (0, crop[0] // 2, crop[0]) for left in (0, crop[1] // 2, crop[1])]

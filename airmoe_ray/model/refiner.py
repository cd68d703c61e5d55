"""The cloud's refiner: sharper masks from maps that the cloud has anyway, at no cost in radio (not in the paper).

Fused logits arrive on a grid of 16 pixels, where thin things are lost. The refiner takes them up to the finest map and
corrects them there. It sees logits and low-level maps only, a few pixels wide: what things are is the experts' work.
Suffixes: B inputs, C classes, D features, h w grid, y x another grid (of the finest map).
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, relu

from airmoe_ray.model.experts import ConvNormRelu


class Refiner(nn.Module):
    """logits -> up(logits) + correction; the correction starts at zero, so an untrained refiner only interpolates.

    Logits and fine maps are each brought to `width` channels on their own grid, where that is cheap, and added on the
    finest one.
    """

    def __init__(self, fine_dims: Sequence[int], *, classes: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.reduce = nn.ModuleList(nn.Conv2d(dim, width, 1, bias=False) for dim in (classes, *fine_dims))
        self.group_norm = nn.GroupNorm(8, width)
        self.sharpen = nn.Sequential(ConvNormRelu(width, width, kernel=3), ConvNormRelu(width, width, kernel=3))
        self.correct = nn.Conv2d(width, classes, 1)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.normal_(std=(2.0 / module.weight[0].numel()) ** 0.5, generator=generator)
            for parameter in self.correct.parameters():
                parameter.zero_()

    def forward(self, logits_BChw: Tensor, fine: Sequence[Tensor]) -> Tensor:
        """Logits on the grid of the first, finest map."""
        size = fine[0].shape[2:]
        maps = zip(self.reduce, (logits_BChw, *fine), strict=True)
        mixed_BDyx = functools.reduce(torch.add, (_to_size(reduce(map_BDyx), size) for reduce, map_BDyx in maps))
        correction_BCyx: Tensor = self.correct(self.sharpen(relu(self.group_norm(mixed_BDyx))))
        return _to_size(logits_BChw, size) + correction_BCyx


def _to_size(map_BDyx: Tensor, size: torch.Size) -> Tensor:
    if map_BDyx.shape[2:] == size:
        return map_BDyx
    return interpolate(map_BDyx, size=size, mode="bilinear", align_corners=False)

"""SegNet: VGG-16 without its classifier, mirrored; unpooling puts values back where the maxima were."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from airmoe_ray.baselines.single.layers import Classifier, conv_bn_relu, grid_of, initialise

STAGES = (
    (64, 64),
    (128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (512, 512, 512),
)  # outputs of VGG-16's 13 convolutions


def _stack(channels: list[int]) -> nn.Sequential:
    return nn.Sequential(*(conv_bn_relu(inputs, outputs) for inputs, outputs in pairwise(channels)))


class SegNet(nn.Module):
    """SegNet (Badrinarayanan, Kendall and Cipolla 2017), the full network of 26 convolutions, not SegNet-Basic.

    Convolutions carry no bias, as batch normalisation follows each but the last; images of 32 x 32 at least.
    """

    def __init__(self, classes: int):
        super().__init__()
        inputs = [3, *(stage[-1] for stage in STAGES[:-1])]
        self.encoder = nn.ModuleList([_stack([first, *stage]) for first, stage in zip(inputs, STAGES, strict=True)])
        # each decoder mirrors its encoder: the same widths backwards, down to what the encoder took in
        mirrored = [[*stage[::-1], first] for first, stage in zip(inputs[1:], STAGES[1:], strict=True)]
        self.decoder = nn.ModuleList([*(_stack(channels) for channels in mirrored[::-1]), _stack([64, 64])])
        self.classify = Classifier(64, classes, size=3)
        initialise(self)

    def forward(self, images_B3HW: Tensor) -> Tensor:
        maps_BCyx, pooled = images_B3HW, []
        for stage in self.encoder:
            maps_BCyx = stage(maps_BCyx)
            size = grid_of(maps_BCyx)
            maps_BCyx, indices_BCyx = F.max_pool2d(maps_BCyx, 2, return_indices=True)
            pooled.append((indices_BCyx, size))
        for stage in self.decoder:
            indices_BCyx, size = pooled.pop()
            maps_BCyx = stage(F.max_unpool2d(maps_BCyx, indices_BCyx, [2, 2], output_size=size))
        return self.classify(maps_BCyx)

"""AttaNet: attention along vertical strips, and fusion of two levels that weighs them against each other."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import airmoe_ray.runtime.torchvision_import  # noqa: F401  before torchvision
from airmoe_ray.baselines.single.layers import Classifier, conv_bn_relu, grid_of, initialise, resize

CHANNELS, STRIP_CHANNELS = 128, 64


class StripAttention(nn.Module):
    """Every place attends to the columns of the image, each averaged over its height."""

    def __init__(self, channels: int):
        super().__init__()
        self.query = conv_bn_relu(channels, STRIP_CHANNELS, 1)
        self.key = conv_bn_relu(channels, STRIP_CHANNELS, 1)
        self.value = conv_bn_relu(channels, channels, 1)

    def forward(self, maps_BChw: Tensor) -> Tensor:
        strips_BwC = self.query(maps_BChw).mean(dim=2).transpose(1, 2)
        places_BCT = self.key(maps_BChw).flatten(2)
        weights_BwT = (strips_BwC @ places_BCT).softmax(dim=1)  # for each place, over the columns
        values_BCw = self.value(maps_BChw).mean(dim=2)
        return maps_BChw + (values_BCw @ weights_BwT).view_as(maps_BChw)


class AttentionFusion(nn.Module):
    """How much of each channel comes from the coarser level, in [0, 1]; its statistics are over the batch alone."""

    def __init__(self, inputs: int, channels: int):
        super().__init__()
        self.join = conv_bn_relu(inputs, channels, 1)
        self.weigh = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.Sigmoid())

    def forward(self, fine_BCyx: Tensor, coarse_BChw: Tensor) -> Tensor:
        raised_BCyx = F.interpolate(coarse_BChw, grid_of(fine_BCyx))
        joined_BCyx = self.join(torch.cat([fine_BCyx, raised_BCyx], dim=1))
        return self.weigh(joined_BCyx.mean(dim=(2, 3), keepdim=True))


def _head(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(conv_bn_relu(inputs, hidden), Classifier(hidden, classes, bias=False))


class AttaNet(nn.Module):
    """AttaNet (Song, Mei and Huang 2021) on ResNet-18, here from scratch instead of from ImageNet weights.

    While training, two auxiliary heads give logits too, from stride 8 and from the coarsest level.
    """

    def __init__(self, classes: int):
        super().__init__()
        from torchvision.models import resnet18

        trunk = resnet18(weights=None)
        self.stem = nn.Sequential(trunk.conv1, trunk.bn1, trunk.relu, trunk.maxpool)
        self.stages = nn.ModuleList([trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4])
        self.fine = conv_bn_relu(256, CHANNELS)
        self.coarse = conv_bn_relu(512, CHANNELS)
        self.fusion = AttentionFusion(CHANNELS + 512, CHANNELS)
        self.smooth = conv_bn_relu(CHANNELS, CHANNELS)
        self.strips = StripAttention(CHANNELS)
        self.last = conv_bn_relu(CHANNELS, CHANNELS)
        self.head = _head(CHANNELS, CHANNELS, classes)
        self.aux = nn.ModuleList([_head(CHANNELS, 64, classes), _head(CHANNELS, 64, classes)])
        initialise(self)

    def forward(self, images_B3HW: Tensor) -> Tensor | tuple[Tensor, list[Tensor]]:
        size = grid_of(images_B3HW)
        maps_BCyx, levels = self.stem(images_B3HW), []
        for stage in self.stages:
            maps_BCyx = stage(maps_BCyx)
            levels.append(maps_BCyx)
        _, at8_BCyx, at16_BCyx, at32_BCyx = levels
        fine_BCyx = self.fine(at16_BCyx)
        share_BC11 = self.fusion(fine_BCyx, at32_BCyx)
        coarse_BCyx = F.interpolate(self.coarse(at32_BCyx) * share_BC11, grid_of(fine_BCyx))
        fused_BCyx = self.strips(self.smooth(fine_BCyx * (1 - share_BC11) + coarse_BCyx))
        logits_BCHW = resize(self.head(self.last(F.interpolate(fused_BCyx, grid_of(at8_BCyx)))), size)
        if not self.training:
            return logits_BCHW
        sources = (coarse_BCyx, at8_BCyx)
        return logits_BCHW, [resize(head(maps), size) for head, maps in zip(self.aux, sources, strict=True)]

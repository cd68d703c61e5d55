"""The frozen backbone as answering wants it: batch norms folded into the convolutions before them, and a number format.

Training never uses this form: cached features are those of the published layers, and a backbone's fingerprint is taken
of its weights as they were loaded. Folding changes features by rounding alone (a few millionths of their range).
"""

import copy

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from airmoe_ray.features.backbone import Backbone

_TRIAL_SIDE = 64  # of the image that the folded layers must agree on
_TOLERANCE = 1e-4  # of the features' range


def for_serving(backbone: Backbone, precision: str) -> Backbone:
    """The same backbone with its norms folded, where it has any, computing in `float32` or `bfloat16`."""
    folded = copy.deepcopy(backbone)
    if _fold(folded.body) and _agree(backbone, folded):
        backbone = folded
    backbone.precision = torch.bfloat16 if precision == "bfloat16" else None
    return backbone


def _fold(module: nn.Module) -> int:
    """Fold every norm that is listed right after a convolution; how many there were."""
    count, before = 0, ""
    for name, layer in list(module.named_children()):
        convolution = getattr(module, before, None) if before else None
        if isinstance(layer, nn.BatchNorm2d) and isinstance(convolution, nn.Conv2d):
            setattr(module, before, fuse_conv_bn_eval(convolution, layer))
            rest = [getattr(layer, part) for part in ("drop", "act") if hasattr(layer, part)]  # timm's norms have both
            setattr(module, name, nn.Sequential(*rest) if rest else nn.Identity())
            count += 1
        else:
            count += _fold(layer)
        before = name
    return count


@torch.no_grad()
def _agree(backbone: Backbone, folded: Backbone) -> bool:
    """Whether layers that are listed in a row also run in a row: the features tell."""
    trial = torch.rand(1, 3, _TRIAL_SIDE, _TRIAL_SIDE, generator=torch.Generator().manual_seed(0))
    expected, found = backbone(trial), folded(trial)
    return bool((expected - found).abs().max() <= _TOLERANCE * expected.abs().max())

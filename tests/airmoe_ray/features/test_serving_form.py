"""The backbone as answering wants it gives the features it was trained with, faster, under the same fingerprint."""

import statistics
import time

import pytest
import torch
from torch import nn

from airmoe_ray.config import BackboneConfig
from airmoe_ray.features import serving_form
from airmoe_ray.features.backbone import Backbone, load_backbone
from airmoe_ray.features.serving_form import for_serving


@pytest.fixture(scope="module")
def published() -> Backbone:
    return load_backbone(BackboneConfig(name="efficientnet_lite0"))


def norms(backbone: Backbone) -> int:
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in backbone.modules())


def test_folded_norms_change_features_by_rounding_alone(published: Backbone) -> None:
    images = torch.rand(2, 3, 96, 128)
    served = for_serving(published, "float32")
    assert (norms(served), norms(published) > 40) == (0, True)
    expected, found = (backbone.maps(images, fine=True) for backbone in (published, served))
    for one, other in zip((expected.features_BDhw, *expected.fine), (found.features_BDhw, *found.fine), strict=True):
        assert (one - other).abs().max() < 1e-5 * one.abs().max()
    assert served.fingerprint == published.fingerprint


@pytest.mark.parametrize("name", ["efficientnet_lite0", "embedded"])
def test_bfloat16_features_are_near_and_leave_as_float32(name: str) -> None:
    backbone = load_backbone(BackboneConfig(name=name))
    images = torch.rand(1, 3, 96, 128)
    expected = backbone(images)
    found = for_serving(backbone, "bfloat16")(images)
    assert found.dtype == torch.float32
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-5 < error < 0.05


def test_layers_that_only_look_as_if_they_ran_in_a_row_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone(BackboneConfig(name="efficientnet_lite0"))
    whole = serving_form.fuse_conv_bn_eval

    def wrongly(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
        fused = whole(convolution, norm)
        fused.bias.data += 0.1
        return fused

    monkeypatch.setattr(serving_form, "fuse_conv_bn_eval", wrongly)
    assert norms(for_serving(backbone, "float32")) == norms(backbone) > 0


def test_folding_saves_time(published: Backbone) -> None:
    served, images = for_serving(published, "float32"), torch.rand(1, 3, 256, 256)
    seconds: dict[str, list[float]] = {"published": [], "served": []}
    for _ in range(7):
        for name, backbone in (("published", published), ("served", served)):
            begun = time.process_time()
            backbone(images)
            seconds[name].append(time.process_time() - begun)
    assert statistics.median(seconds["served"]) < statistics.median(seconds["published"])

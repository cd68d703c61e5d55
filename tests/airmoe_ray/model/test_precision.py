"""Low precision is for the experts' convolutions alone: routing, statistics and the air stay as they are."""

import pytest
import torch

from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.device import pick_precision
from airmoe_ray.training.trainer import Batch, Trainer

SETTINGS = {
    "experts": {"count": 4, "hidden": 16, "width": 16},
    "frl": {"dim": 8, "prototypes": 3},
    "routing": {"top_k": 2},
}


def trainer(precision: str) -> Trainer:
    config = Config.model_validate({**SETTINGS, "train": {"loss_stride": 1, "precision": precision}})
    model = AirMoE(config, feature_dim=6, classes=3, dilations=(1, 2, 3))
    return Trainer(model, config, total_steps=10)


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(8, 6, 6, 8, generator=draw) + 2 * torch.randn(8, 6, 1, 1, generator=draw)
    return Batch(features, torch.randint(0, 3, (8, 24, 32), generator=draw).to(torch.uint8), list(range(8)))


def test_low_precision_routes_alike_and_learns_nearly_alike():
    full, low = trainer("float32"), trainer("bfloat16")
    a, b = full.step(batch()), low.step(batch())
    assert torch.equal(a.selected_BK, b.selected_BK)
    assert torch.equal(a.active_BK, b.active_BK)
    assert torch.equal(a.loss.lb, b.loss.lb)
    assert a.loss.ce != b.loss.ce  # it was another arithmetic
    assert float(b.loss.ce) == pytest.approx(float(a.loss.ce), rel=0.02)
    weights = [low.model.clients.experts[0].decoder.weight, low.model.clients.frl.prototypes_NMd]
    assert {weight.grad.dtype for weight in weights} == {torch.float32}


def test_what_leaves_an_expert_is_in_full_precision_and_scores_are_as_served():
    full, low = trainer("float32").model, trainer("bfloat16").model
    features, ids = batch().features_BDhw, batch().ids_B
    low.train()
    output = low(features, ids)
    assert output.logits_BChw.dtype == output.psi_BKd.dtype == output.delta_BK.dtype == torch.float32
    full.eval()
    low.eval()
    assert torch.equal(full(features, ids).logits_BChw, low(features, ids).logits_BChw)


def test_low_precision_is_never_chosen_on_a_cpu():
    assert pick_precision("auto", torch.device("cpu")) is None
    assert pick_precision("bfloat16", torch.device("cpu")) is torch.bfloat16

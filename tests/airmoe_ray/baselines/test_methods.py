"""What methods make of the common configuration."""

import pytest
import torch

from airmoe_ray.baselines.method import Setting
from airmoe_ray.baselines.registry import find_method, find_methods, groups
from airmoe_ray.baselines.single_head import head_parameters
from airmoe_ray.config_file import load_config
from airmoe_ray.experiments.compare.size import model_size
from airmoe_ray.model.experts import Head
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.training.trainer import Batch, Trainer
from tests.airmoe_ray.training.support import random_labels

SETTING = Setting(feature_dim=320, classes=10, domains=5)


def built(name: str) -> AirMoE:
    config = find_method(name).configure(load_config("quickstart"), SETTING)
    return AirMoE(config, feature_dim=320, classes=10, dilations=(2, 4, 8))


@pytest.mark.parametrize(("hidden", "width"), [(16, 16), (96, 48), (200, 72)])
def test_the_count_of_a_head_is_that_of_the_real_one(hidden, width):
    config = load_config(None, [f"experts.hidden={hidden}", f"experts.width={width}"]).experts
    head = Head(config, feature_dim=320, classes=10, dilations=(1, 2, 3), generator=torch.Generator())
    assert sum(p.numel() for p in head.parameters()) == head_parameters(320, 10, hidden, width)


@pytest.mark.parametrize(
    ("name", "heads"), [("head-all", 10), ("head-active", 2), ("head-all+head", 11), ("head-active+head", 3)]
)
def test_one_head_is_as_large_as_the_heads_it_stands_for(name, heads):
    size, one = model_size(built(name)), head_parameters(320, 10, 96, 48)
    assert size["active"] == size["trained"] == pytest.approx(heads * one, rel=0.02)


def test_an_ensemble_has_as_many_heads_as_answer_with_airmoe():
    assert len(built("ensemble").clients.experts) == 2
    assert len(built("ensemble+head").clients.experts) == 3
    assert model_size(built("ensemble"))["trained"] == 2 * head_parameters(320, 10, 96, 48)


def test_no_method_changes_data_losses_or_steps():
    base = load_config("camvid-offline")
    same = ("epochs", "batch_size", "lr", "schedule", "weight_decay", "lambda_iou", "class_balance", "loss_stride")
    for method in groups()["rules"] + groups()["controls"] + groups()["heads"]:
        config = method.configure(base, Setting(472, 11, 4))
        assert config.data == base.data, method.key
        assert config.backbone == base.backbone, method.key
        assert config.experts.refiner == base.experts.refiner, method.key
        assert [getattr(config.train, key) for key in same] == [getattr(base.train, key) for key in same], method.key


def test_names_groups_and_heads_are_found_once_each_in_order():
    assert [method.key for method in find_methods("random,airmoe+head, random")] == ["random", "airmoe+head"]
    keys = [method.key for method in find_methods("rules,airmoe")]
    assert len(keys) == len(set(keys)) == len(groups()["rules"])


def test_heads_of_an_ensemble_learn_as_if_each_were_alone(make_config, make_model, make_features):
    """Two steps of an ensemble, and two of its second head by itself with the same start: the same weights."""
    alone = {"routing": {"top_k": 1, "fusion": "equal"}, "experts": {"count": 1}, "channel": {"kind": "ideal"}}
    loss = {"lambda_lb": 0.0, "lambda_frl": 0.0, "lambda_align": 0.0}
    both = {**alone, "routing": {"top_k": 2, "fusion": "equal"}, "experts": {"count": 2}}
    team = make_model(**both, train={**loss, "objective": "each"})
    one = make_model(**alone, train=loss)
    one.clients.experts[0].load_state_dict(team.clients.experts[1].state_dict())
    trainers = [Trainer(model, model.config, total_steps=4) for model in (team, one)]
    for step in range(2):
        for trainer in trainers:
            trainer.step(
                Batch(make_features(4, seed=step), random_labels(step, batch=4), [10 * step + i for i in range(4)])
            )
    for name, value in one.clients.experts[0].state_dict().items():
        if not name.startswith("psi."):
            torch.testing.assert_close(team.clients.experts[1].state_dict()[name], value, rtol=1e-9, atol=1e-12)

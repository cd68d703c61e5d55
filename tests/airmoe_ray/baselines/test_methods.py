"""What methods make of the common configuration."""

import pytest
import torch

from airmoe_ray.baselines.method import Setting
from airmoe_ray.baselines.registry import find_method, find_methods, groups
from airmoe_ray.baselines.single_head import airmoe_parameters, head_parameters
from airmoe_ray.config_file import load_config
from airmoe_ray.experiments.compare.size import model_size
from airmoe_ray.model.experts import Head
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.training.trainer import Batch, Trainer
from tests.airmoe_ray.training.support import random_labels

SETTING = Setting(feature_dim=320, classes=10, domains=5)


def built(name: str, base: str = "quickstart") -> AirMoE:
    config = find_method(name).configure(load_config(base), SETTING)
    return AirMoE(config, feature_dim=320, classes=10, dilations=(2, 4, 8))


@pytest.mark.parametrize(("hidden", "width"), [(16, 16), (96, 48), (200, 72)])
def test_the_count_of_a_head_is_that_of_the_real_one(hidden, width):
    config = load_config(None, [f"experts.hidden={hidden}", f"experts.width={width}"]).experts
    head = Head(config, feature_dim=320, classes=10, dilations=(1, 2, 3), generator=torch.Generator())
    assert sum(p.numel() for p in head.parameters()) == head_parameters(320, 10, hidden, width)


def count(*modules: torch.nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.parametrize("config", ["quickstart", "camvid-short", "cityscapes"])
@pytest.mark.parametrize("plus", ["", "+head"])
def test_one_head_is_as_large_as_the_airmoe_it_stands_for(config, plus):
    """AirMoE's parameters are counted from its modules, all of which it uses."""
    airmoe = built(f"airmoe{plus}", config)
    head = [] if airmoe.shared is None else [airmoe.shared]
    libraries = airmoe.clients.frl.prototypes_NMd.numel()  # w is renewed, not trained
    common, experts = libraries + count(airmoe.query, *head), list(airmoe.clients.experts)
    sizes = {"all": common + count(*experts), "active": common + count(*experts[: airmoe.config.routing.top_k])}
    for which, wanted in sizes.items():
        one = model_size(built(f"head-{which}{plus}", config))
        assert one["active"] == one["trained"] == pytest.approx(wanted, rel=0.01), which


@pytest.mark.parametrize("changes", [["routing.fusion=equal"], ["routing.top_k=10"], ["frl.prototypes=4"]])
def test_one_head_counts_what_a_rule_looks_at(changes):
    base = load_config("quickstart", changes)
    airmoe = AirMoE(find_method("airmoe").configure(base, SETTING), feature_dim=320, classes=10, dilations=(2, 4, 8))
    size = model_size(airmoe)
    assert airmoe_parameters(SETTING, airmoe.config) == (size["trained"], size["active"])


def test_an_ensemble_has_as_many_heads_as_answer_with_airmoe():
    assert len(built("ensemble").clients.experts) == 2
    assert len(built("ensemble+head").clients.experts) == 3
    assert model_size(built("ensemble"))["trained"] == 2 * head_parameters(320, 10, 96, 48)


def test_no_method_changes_data_losses_or_steps():
    base = load_config("camvid-offline")
    same = ("epochs", "batch_size", "lr", "schedule", "weight_decay", "lambda_iou", "class_balance", "loss_stride")
    literal = {"airmoe-literal", "airmoe-literal-phi"}  # the paper's loss is another one than the common loss
    for method in groups()["rules"] + groups()["controls"] + groups()["heads"]:
        if method.key in literal:
            continue
        config = method.configure(base, Setting(472, 11, 4))
        assert config.data == base.data, method.key
        assert config.backbone == base.backbone, method.key
        assert config.experts.refiner == base.experts.refiner, method.key
        assert [getattr(config.train, key) for key in same] == [getattr(base.train, key) for key in same], method.key


@pytest.mark.parametrize("name", ["airmoe-literal", "airmoe-literal-phi"])
def test_the_literal_reading_has_the_papers_loss_and_one_k_on_every_configuration(name):
    base = load_config("camvid-offline", ["experts.refiner=32", "train.lambda_iou=1", "train.top_k=2"])
    config = find_method(name).configure(base, Setting(472, 11, 4))
    assert config.experts.refiner == 0
    assert not config.experts.shared
    assert (config.train.lambda_iou, config.train.class_balance, config.train.lambda_align) == (0, 0, 0)
    assert config.train.top_k is None
    assert config.routing.top_k == base.routing.top_k
    same = ("epochs", "batch_size", "lr", "schedule", "weight_decay", "loss_stride")
    assert [getattr(config.train, key) for key in same] == [getattr(base.train, key) for key in same]


@pytest.mark.parametrize("method", groups()["heads"], ids=lambda method: method.key)
def test_whatever_stands_beside_a_clouds_head_takes_a_step(method, make_config):
    base = make_config()
    config = method.configure(base, Setting(feature_dim=24, classes=5, domains=2))
    model = AirMoE(config, feature_dim=24, classes=5, dilations=(1, 2, 3))
    trainer = Trainer(model, config, total_steps=2)
    features_BDhw = torch.randn(4, 24, 4, 4, generator=torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in model.parameters()]
    trainer.step(Batch(features_BDhw.to(next(model.parameters())), random_labels(0, batch=4), list(range(4))))
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(p.isfinite().all() for p in model.parameters())


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

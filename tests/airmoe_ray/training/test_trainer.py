"""The step that descends the objective: who moves, by how much, in which order, at which rate."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from airmoe_ray.config import Config, TrainConfig
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.training.losses import objective
from airmoe_ray.training.optimizers import learning_rate_factor
from airmoe_ray.training.trainer import Batch, Trainer
from tests.airmoe_ray.training.support import Configs, Features, Model, random_labels


def make_batch(make_features: Features, batch: int = 4, seed: int = 0) -> Batch:
    first = 1000 * seed
    return Batch(make_features(batch, seed=seed), random_labels(seed, batch), list(range(first, first + batch)))


def gradients_of(model: AirMoE, batch: Batch, config: Config) -> tuple[Tensor, Any]:
    """dL/dp at the model as it is, and the forward pass it came from."""
    output = model(batch.features_BDhw, batch.ids_B)
    loss = objective(output, batch.labels_BHW, model.clients.frl, config=config).total
    return torch.autograd.grad(loss, model.clients.frl.prototypes_NMd)[0], output


def test_prototypes_move_by_plain_gradient_descent_at_their_own_rate(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(frl={"learn": "gradient", "lr": 0.3}, train={"lr": 7.0, "weight_decay": 0.5, "lambda_lb": 0.2})
    model, batch = make_model(config), make_batch(make_features)
    before, gradient = model.clients.frl.prototypes_NMd.detach().clone(), gradients_of(model, batch, config)[0]
    Trainer(model, config, total_steps=10).step(batch)
    assert gradient.abs().max() > 0
    torch.testing.assert_close(model.clients.frl.prototypes_NMd.detach(), before - 0.3 * gradient)


def test_a_gradient_step_that_leaves_the_ball_is_projected_back_onto_it(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(
        frl={"learn": "gradient", "lr": 1e4, "norm_bound": 2.0}, train={"lambda_lb": 1.0, "lambda_frl": 0}
    )
    model = make_model(config)
    Trainer(model, config, total_steps=10).step(make_batch(make_features))
    length = model.clients.frl.prototypes_NMd.detach().norm(dim=-1)
    assert float(length.max()) == pytest.approx(2.0, rel=1e-12)


def test_renewal_follows_the_optimizer_step_with_the_attention_and_psi_of_before_it(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    frl = {"learn": "both", "lr": 5.0, "eta": 0.5, "renewal": "soft"}
    config = make_config(frl=frl, train={"lr": 0.1, "lambda_lb": 1.0}, channel={"gamma_th": 0.3})
    model, batch = make_model(config), make_batch(make_features)
    gradient, output = gradients_of(copy.deepcopy(model), batch, config)
    p = (model.clients.frl.prototypes_NMd - 5.0 * gradient).detach().numpy()
    w = np.zeros((4, 3))
    for i, rank in np.argwhere(output.routing.active_BK.numpy()):
        j = int(output.routing.transmit_BK[i, rank])
        a = 0.5 * output.alpha_BNM[i, j].detach().numpy()
        p[j] = (1 - a)[:, None] * p[j] + a[:, None] * output.psi_BKd[i, rank].detach().numpy()
        w[j] = (1 - a) * w[j] + a
    Trainer(model, config, total_steps=10).step(batch)
    np.testing.assert_allclose(model.clients.frl.prototypes_NMd.detach(), p, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(model.clients.frl.importance_NM, w, rtol=1e-8, atol=1e-10)


def test_an_expert_without_a_sample_does_not_move_even_with_momentum_and_weight_decay(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(
        routing={"top_k": 1, "rule": "random"}, train={"weight_decay": 0.5, "lr": 0.01}, channel={"kind": "ideal"}
    )
    model = make_model(config)
    trainer, moved = Trainer(model, config, total_steps=20), set()
    for step in range(8):
        before = [flat(expert) for expert in model.clients.experts]
        result = trainer.step(make_batch(make_features, 1, seed=step))
        chosen = int(result.selected_BK)
        for j, expert in enumerate(model.clients.experts):
            assert torch.equal(flat(expert), before[j]) == (j != chosen)
        moved.add(chosen)
    assert len(moved) > 1


def test_a_step_counts_its_forwards_and_descends_the_loss(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(
        train={"lr": 3e-3, "schedule": "constant", "check_constraints": True}, channel={"gamma_th": 0.3}
    )
    model, batch = make_model(config), make_batch(make_features, 6)
    active = model(batch.features_BDhw, batch.ids_B).routing.active_BK
    trainer = Trainer(model, config, total_steps=40)
    results = [trainer.step(batch) for _ in range(40)]
    assert results[0].forwards == int(active.sum()) < 12
    assert results[-1].loss.ce < 0.7 * results[0].loss.ce
    assert not results[0].loss.total.requires_grad


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def test_in_shared_epochs_one_expert_learns_for_all_and_each_client_then_gets_its_copy(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(train={"epochs": 2, "lr": 0.01, "warm_start": {"shared_epochs": 1}})
    model = make_model(config)
    trainer, experts = Trainer(model, config, total_steps=4), model.clients.experts
    others = [flat(m) for m in (*experts[1:], model.query, model.clients.frl)]
    first = flat(experts[0])
    for step in range(2):
        assert trainer.step(make_batch(make_features, seed=step)).forwards == 4
    assert not torch.equal(flat(experts[0]), first)
    assert all(
        torch.equal(flat(m), was) for m, was in zip((*experts[1:], model.query, model.clients.frl), others, strict=True)
    )
    trainer.end_epoch()
    assert all(torch.equal(flat(expert), flat(experts[0])) for expert in experts)
    assert not any(parameter in trainer.adam.state for expert in experts for parameter in expert.parameters())
    trainer.step(make_batch(make_features, seed=2))
    trainer.end_epoch()
    assert not torch.equal(flat(experts[0]), flat(experts[1]))


def test_without_shared_epochs_the_end_of_an_epoch_changes_nothing(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config()
    model = make_model(config)
    trainer = Trainer(model, config, total_steps=4)
    trainer.step(make_batch(make_features))
    before = flat(model)
    trainer.end_epoch()
    assert torch.equal(flat(model), before)


def test_the_cosine_schedule_warms_up_to_one_and_ends_at_one_percent() -> None:
    config = TrainConfig(schedule="cosine")
    factors = [learning_rate_factor(step, 1000, config) for step in range(1001)]
    assert factors[0] == pytest.approx(1 / 30)
    assert factors[29] == factors[30] == 1.0
    assert factors[30 + 485] == pytest.approx((1 + 0.01) / 2)
    assert factors[1000] == pytest.approx(0.01)
    assert factors[:30] == sorted(factors[:30])
    assert factors[30:] == sorted(factors[30:], reverse=True)
    assert learning_rate_factor(2000, 1000, config) == pytest.approx(0.01)
    assert all(learning_rate_factor(s, 100, TrainConfig(schedule="constant")) == 1 for s in (0, 50, 100))


@pytest.mark.parametrize("total", [1, 2, 5])
def test_a_very_short_run_has_a_usable_learning_rate_at_every_step(total: int) -> None:
    factors = [learning_rate_factor(step, total, TrainConfig()) for step in range(total)]
    assert factors[0] == 1.0
    assert all(0.01 <= f <= 1 for f in factors)


def test_the_trainer_applies_the_schedule_to_adam(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    config = make_config(train={"lr": 0.02})
    trainer = Trainer(make_model(config), config, total_steps=5)
    rates = []
    for step in range(3):
        trainer.step(make_batch(make_features, seed=step))
        rates.append(trainer.adam.param_groups[0]["lr"])
    assert rates == pytest.approx([0.02 * learning_rate_factor(step, 5, config.train) for step in range(3)])
    assert trainer.adam.param_groups[0]["betas"] == (0.9, 0.999)

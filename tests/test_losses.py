"""The objective, Eq. (19)-(21), and the step that descends it."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from airmoe_ray.config import Config, FrlConfig, TrainConfig
from airmoe_ray.data.base import IGNORE
from airmoe_ray.frl import FeatureRetrievalLibrary
from airmoe_ray.losses import alignment, frl_regulariser, load_balance, objective, pixel_cross_entropy
from airmoe_ray.moe import AirMoE
from airmoe_ray.optimizers import learning_rate_factor
from airmoe_ray.schedule import class_weights
from airmoe_ray.statistics import js_divergence
from airmoe_ray.training import Batch, Trainer

Configs, Model, Features = Callable[..., Config], Callable[..., AirMoE], Callable[..., Tensor]
SEEDS = st.integers(0, 10**6)


def random_labels(seed: int, batch: int = 2, height: int = 6, width: int = 8, void: float = 0.2) -> Tensor:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, size=(batch, height, width)).astype(np.uint8)
    labels[rng.random(labels.shape) < void] = IGNORE
    return torch.from_numpy(labels)


def random_logits(seed: int, batch: int = 2, grid: tuple[int, int] = (3, 4)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(batch, 3, *grid)) * 3)


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, weighted=st.booleans())
def test_cross_entropy_at_every_pixel_is_torchs_mean_without_the_void(seed: int, weighted: bool) -> None:
    labels, logits = random_labels(seed), random_logits(seed)
    weight = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64) if weighted else None
    total, count = pixel_cross_entropy(logits, labels, stride=1, class_weight_C=weight)
    full = interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    expected = cross_entropy(full, labels.long(), weight=weight, ignore_index=IGNORE)
    torch.testing.assert_close(total / count, expected)
    seen = labels != IGNORE
    assert float(count) == pytest.approx(float(weight[labels[seen].long()].sum()) if weighted else int(seen.sum()))


def test_cross_entropy_by_hand_on_a_grid_of_the_labels_own_size() -> None:
    labels = torch.tensor([[[0, 2], [IGNORE, 1]]], dtype=torch.uint8)
    logits = random_logits(0, batch=1, grid=(2, 2))
    weight = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    log_p = (logits[0] - logits[0].exp().sum(dim=0).log()).numpy()
    by_hand = -(0.5 * log_p[0, 0, 0] + 4 * log_p[2, 0, 1] + log_p[1, 1, 1])
    total, count = pixel_cross_entropy(logits, labels, stride=1, class_weight_C=weight)
    assert float(total) == pytest.approx(by_hand)
    assert float(count) == 5.5


@pytest.mark.parametrize("size", [(16, 32), (48, 16)])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_cross_entropy_with_a_stride_looks_at_every_nth_row_and_column(stride: int, size: tuple[int, int]) -> None:
    labels, logits = random_labels(0, height=size[0], width=size[1]), random_logits(0)
    total, count = pixel_cross_entropy(logits, labels, stride=stride)
    share = float(count) / int((labels != IGNORE).sum())
    assert share == pytest.approx(1 / stride**2, rel=0.4)
    assert total.isfinite()


def test_with_an_even_stride_labels_between_the_taken_rows_and_columns_do_not_matter() -> None:
    labels, logits = random_labels(0, height=8, width=8), random_logits(0, grid=(4, 4))
    other = random_labels(1, height=8, width=8)
    other[:, 1::2, 1::2] = labels[:, 1::2, 1::2]
    expected = cross_entropy(logits, labels[:, 1::2, 1::2].long(), ignore_index=IGNORE, reduction="sum")
    for truth in (labels, other):
        total, _ = pixel_cross_entropy(logits, truth, stride=2)
        torch.testing.assert_close(total, expected)


def test_a_batch_of_void_has_zero_loss_and_gradient() -> None:
    logits = random_logits(0).requires_grad_()
    total, count = pixel_cross_entropy(logits, torch.full((2, 6, 8), IGNORE, dtype=torch.uint8), stride=1)
    (gradient,) = torch.autograd.grad(total / count.clamp_min(1), logits)
    assert total.item() == count.item() == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("n", [1, 4, 10])
def test_load_balance_is_zero_at_even_load_and_log_n_at_one_client(n: int) -> None:
    assert float(load_balance(torch.full((n,), 1 / n, dtype=torch.float64))) == pytest.approx(0, abs=1e-12)
    assert float(load_balance(torch.eye(n, dtype=torch.float64)[0])) == pytest.approx(math.log(n))


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_load_balance_has_the_gradient_of_the_papers_formula_and_lies_between_zero_and_log_n(seed: int) -> None:
    u = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(5))).requires_grad_()
    (gradient,) = torch.autograd.grad(load_balance(u), u)
    (papers,) = torch.autograd.grad((u * u.log()).sum() - math.log(5), u)
    torch.testing.assert_close(gradient, papers)
    torch.testing.assert_close(gradient, u.detach().log() + 1)
    assert 0 <= load_balance(u).item() <= math.log(5)


def test_load_balance_has_a_finite_gradient_where_a_probability_underflows() -> None:
    scores = torch.tensor([[0.0, -1.0, -2000.0]], requires_grad=True)
    load_balance(scores.softmax(dim=-1).mean(dim=0)).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def make_frl(counts: list[int], **options: Any) -> FeatureRetrievalLibrary:
    config = FrlConfig.model_validate({"dim": 4, **options})
    frl = FeatureRetrievalLibrary(config, counts, generator=torch.Generator().manual_seed(1)).double()
    frl.importance_NM.copy_(torch.rand(frl.importance_NM.shape, generator=torch.Generator().manual_seed(2)))
    return frl


@pytest.mark.parametrize("sparsity", ["l1", "entropy"])
def test_the_frl_term_by_hand_leaves_padding_out(sparsity: str) -> None:
    counts, batch = [3, 1], 5
    frl = make_frl(counts, sparsity=sparsity, sim_scale=2.0)
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=batch))).alpha_BNM
    expected = 0.0
    for j, count in enumerate(counts):
        for k in range(count):
            expected += float(frl.prototypes_NMd[j, k].detach() @ frl.prototypes_NMd[j, k].detach())
            expected += float(frl.importance_NM[j, k]) ** 2
            for a in alpha[:, j, k].tolist():
                expected += a if sparsity == "l1" else -a * math.log(a)
    assert frl_regulariser(frl, alpha).item() == pytest.approx(expected)
    if sparsity == "l1":
        size = frl.prototypes_NMd.detach().square().sum(-1) + frl.importance_NM.square()
        assert frl_regulariser(frl, alpha).item() == pytest.approx(float(size[frl.valid_NM].sum()) + 2 * batch)


def test_the_l1_frl_term_pulls_prototypes_to_zero_by_twice_themselves() -> None:
    frl = make_frl([3, 1])
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=3))).alpha_BNM
    (gradient,) = torch.autograd.grad(frl_regulariser(frl, alpha), frl.prototypes_NMd)
    expected = 2 * frl.prototypes_NMd.detach() * frl.valid_NM[..., None]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("counts", "scale"), [([3, 3], 20.0), ([3, 1], 20.0), ([3, 3], 1000.0)])
def test_the_entropy_frl_term_has_a_finite_gradient_with_padding_and_with_sharp_attention(
    counts: list[int], scale: float
) -> None:
    frl = make_frl(counts, sparsity="entropy", sim_scale=scale)
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=3))).alpha_BNM
    (gradient,) = torch.autograd.grad(frl_regulariser(frl, alpha), frl.prototypes_NMd)
    assert gradient.isfinite().all()


def test_alignment_is_the_mean_divergence_over_active_clients_and_pulls_psi_but_never_the_query() -> None:
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.dirichlet(np.ones(4), size=2)).requires_grad_()
    psi = torch.from_numpy(rng.normal(size=(2, 2, 4))).requires_grad_()
    value = alignment(q, psi, torch.tensor([[True, True], [True, False]]), temperature=2.0)
    r = (psi / 2).softmax(dim=-1)
    expected = sum(js_divergence(q[i], r[i, k]) for i, k in ((0, 0), (0, 1), (1, 0))) / 3
    torch.testing.assert_close(value, expected)
    value.backward()
    assert q.grad is None
    assert psi.grad is not None
    assert (psi.grad.abs().amax(dim=-1) > 0).tolist() == [[True, True], [True, False]]


def test_the_objective_is_the_weighted_sum_of_its_terms_on_the_received_logits(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    train = {"lambda_lb": 0.3, "lambda_frl": 0.02, "lambda_align": 0.7}
    config = make_config(train=train, channel={"gamma_th": 0.3, "snr_db": 0})
    output, labels = make_model(config)(make_features(2), range(2)), random_labels(0)
    terms = objective(output, labels, config=config)
    y_ota = interpolate(output.logits_BChw, size=(6, 8), mode="bilinear", align_corners=False)
    u = output.routing.prob_BN.mean(dim=0)
    torch.testing.assert_close(terms.ce, cross_entropy(y_ota, labels.long(), ignore_index=IGNORE))
    torch.testing.assert_close(terms.lb, (u * u.log()).sum() + math.log(4))
    torch.testing.assert_close(terms.frl, output.round.clients.frl.prototypes_NMd.square().sum() + 2 * 4)
    torch.testing.assert_close(terms.align, output.delta_BK[output.routing.active_BK].mean())
    torch.testing.assert_close(terms.total, terms.ce + 0.3 * terms.lb + 0.02 * terms.frl + 0.7 * terms.align)


def make_batch(make_features: Features, batch: int = 4, seed: int = 0) -> Batch:
    first = 1000 * seed
    return Batch(make_features(batch, seed=seed), random_labels(seed, batch), list(range(first, first + batch)))


def gradients_of(model: AirMoE, batch: Batch, config: Config) -> tuple[Tensor, Any]:
    """dL/dp at the model as it is, and the forward pass it came from."""
    output = model(batch.features_BDhw, batch.ids_B)
    loss = objective(output, batch.labels_BHW, config=config).total
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
        a = 0.5 * output.round.alpha_BNM[i, j].detach().numpy()
        p[j] = (1 - a)[:, None] * p[j] + a[:, None] * output.round.psi_BKd[i, rank].detach().numpy()
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


class Labels:
    """A source as far as class weights look at it."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels.numpy()
        self.shape_of = self.labels[:, 0, 0]

    def plain(self, index: int) -> tuple[None, Any]:
        return None, self.labels[index]


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, balance=st.floats(0.1, 1.0))
def test_class_weights_are_powers_of_the_frequency_with_mean_one_over_pixels(seed: int, balance: float) -> None:
    labels = random_labels(seed, batch=3)
    labels[labels == 1] = 0  # make one class twice as frequent
    labels[0, 0, 0] = 1
    weight = class_weights(Labels(labels), 4, balance)  # type: ignore[arg-type]
    assert weight is not None
    seen = labels[labels != IGNORE].long()
    assert float(weight.double()[seen].mean()) == pytest.approx(1, rel=1e-5)
    count = torch.bincount(seen, minlength=4).double()
    ratio = float(weight[0] / weight[1])
    assert ratio == pytest.approx(float(count[0] / count[1]) ** -balance, rel=1e-4)
    assert weight.isfinite().all()
    assert class_weights(Labels(labels), 4, 0.0) is None  # type: ignore[arg-type]

"""Power control and its gradient, Eq. (22)-(23): budgets kept, clients aligned, rho as derived."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.channel import (
    superpose,
)
from airmoe_ray.radio.power import receive, receive_scale, transmit_coefficient
from tests.airmoe_ray.radio.support import (
    D_Y,
    SEEDS,
    SHAPE,
    B,
    Features,
    K,
    Model,
    energies,
    random_transmission,
    scale_of,
)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, power=st.floats(0.1, 10))
def test_every_client_keeps_its_energy_budget_and_the_bottleneck_spends_all_of_it(seed: int, power: float) -> None:
    y, gamma, beta, active = random_transmission(seed)
    rho = scale_of(y, gamma, beta, active, power)
    sent = transmit_coefficient(beta, rho[:, None], gamma)[..., None, None, None] * y
    spent = sent.abs().square().sum(dim=(2, 3, 4)) / (power * D_Y)
    assert spent.max() <= 1 + 1e-9
    torch.testing.assert_close(spent.max(dim=1).values, torch.ones(B, dtype=spent.dtype))
    assert (spent[~active] == 0).all()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_rho_is_the_smallest_affordable_scale_and_inversion_aligns_the_clients(seed: int) -> None:
    y, gamma, beta, active = random_transmission(seed)
    rho = scale_of(y, gamma, beta, active)
    for i in range(B):
        limits = [
            D_Y * abs(complex(gamma[i, k])) ** 2 / (float(beta[i, k]) ** 2 * float((y[i, k] ** 2).sum()))
            for k in range(K)
            if active[i, k]
        ]
        assert float(rho[i]) == pytest.approx(min(limits), rel=1e-12)
    aligned = gamma * transmit_coefficient(beta, rho[:, None], gamma)
    torch.testing.assert_close(aligned, (rho.sqrt()[:, None] * beta).to(aligned.dtype))


def test_a_silent_client_does_not_bound_rho_whatever_its_weight() -> None:
    scale_limit_BK, beta_BK = torch.tensor([[0.01, 4.0, 9.0]]), torch.tensor([[0.5, 0.5, 0.5]])
    assert receive_scale(scale_limit_BK, beta_BK, torch.tensor([[False, True, True]])).tolist() == [16.0]


def ota(y: Tensor, gamma: Tensor, beta: Tensor, noise: Tensor, *, rho_grad: bool) -> tuple[Tensor, Tensor]:
    """Eq. (4), (22)-(23) with everybody active, and rho."""
    rho = scale_of(y, gamma, beta, torch.ones_like(beta, dtype=torch.bool))
    rho = rho if rho_grad else rho.detach()
    sent = transmit_coefficient(beta, rho[:, None], gamma)[..., None, None, None] * y
    return receive(superpose(sent, gamma, noise).signal_BChw, rho), rho


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_the_gradient_through_rho_is_minus_g_e_over_two_rho_at_the_bottleneck_and_zero_elsewhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.normal(size=(1, K, *SHAPE))).requires_grad_()
    gamma = torch.from_numpy(rng.normal(size=(1, K)) + 1j * rng.normal(size=(1, K)))
    beta, g = torch.from_numpy(rng.dirichlet(np.ones(K), size=1)), torch.from_numpy(rng.normal(size=(1, *SHAPE)))
    noise = torch.from_numpy(rng.normal(size=(1, *SHAPE)) + 1j * rng.normal(size=(1, *SHAPE)))
    y_ota, rho = ota(y, gamma, beta, noise, rho_grad=True)
    (full,) = torch.autograd.grad((g * y_ota).sum(), y)
    (frozen,) = torch.autograd.grad((g * ota(y, gamma, beta, noise, rho_grad=False)[0]).sum(), y)
    torch.testing.assert_close(frozen, beta[..., None, None, None] * g[:, None], rtol=1e-9, atol=1e-12)

    limit = D_Y * gamma.abs() ** 2 / (beta**2 * energies(y.detach()))
    bottleneck = int(limit.argmin())
    error = noise.real / rho.detach().sqrt()
    slope = -(g * error).sum() / (2 * rho.detach())  # dL/drho
    expected = torch.zeros_like(full)
    own = y.detach()[0, bottleneck]
    expected[0, bottleneck] = slope * (-2 * rho.detach() / own.square().sum()) * own
    torch.testing.assert_close(full - frozen, expected, rtol=1e-8, atol=1e-10)


def directional_check(model: AirMoE, features: Tensor) -> tuple[float, float]:
    """Slope of a linear functional of y^_ota along a random direction: by autograd, and by central differences."""
    draw = torch.Generator().manual_seed(0)
    parameters = [p for e in model.clients.experts for p in (*e.decoder.parameters(), *e.psi.parameters())]
    direction = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    weight = torch.randn(len(features), 3, *features.shape[2:], generator=draw, dtype=features.dtype)

    def value() -> Tensor:
        return (weight * model(features, range(len(features))).logits_BChw).sum()

    @torch.no_grad()
    def value_at(step: float) -> float:
        start = [p.clone() for p in parameters]
        for p, d in zip(parameters, direction, strict=True):
            p.add_(step * d)
        result = float(value())
        for p, was in zip(parameters, start, strict=True):
            p.copy_(was)
        return result

    gradients = torch.autograd.grad(value(), parameters, allow_unused=True)
    by_autograd = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
    return by_autograd, (value_at(1e-6) - value_at(-1e-6)) / 2e-6


def test_with_rho_grad_the_whole_models_gradient_is_that_of_finite_differences(
    make_model: Model, make_features: Features
) -> None:
    channel = {"snr_db": 0, "gamma_th": 0.3}
    by_autograd, by_difference = directional_check(make_model(channel={**channel, "rho_grad": True}), make_features(5))
    assert by_autograd == pytest.approx(by_difference, rel=1e-6)
    frozen, _ = directional_check(make_model(channel=channel), make_features(5))
    assert abs(frozen - by_difference) > 1e-3 * abs(by_difference)


def test_rho_is_detached_by_default_and_silent_clients_do_not_spoil_its_gradient(
    make_model: Model, make_features: Features
) -> None:
    assert not make_model()(make_features(3), range(3)).rho_B.requires_grad
    model = make_model(channel={"rho_grad": True, "gamma_th": 0.9})
    output = model(make_features(8), range(8))
    assert (~output.routing.active_BK).any()
    output.logits_BChw.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_clients_with_nothing_to_say_give_a_finite_answer(make_model: Model, make_features: Features) -> None:
    model = make_model()
    with torch.no_grad():
        for expert in model.clients.experts:
            expert.decoder.weight.zero_()
    output = model(make_features(2), range(2))
    assert output.logits_BChw.isfinite().all()

"""Power control and the air, Eq. (16)-(18): budgets kept, mean and variance as predicted, gradients as derived."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.aggregation import receive
from airmoe_ray.channel import draw_gamma, draw_noise, in_deep_fade, noise_power, quantise, superpose, weighted_sum
from airmoe_ray.config import ChannelConfig
from airmoe_ray.moe import AirMoE
from airmoe_ray.power import capacity, receive_scale, transmit_coefficient

Model, Features = Callable[..., AirMoE], Callable[..., Tensor]
SEEDS = st.integers(0, 10**6)
B, K, SHAPE = 2, 3, (2, 2, 2)
D_Y = math.prod(SHAPE)


def random_transmission(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of very different size, fading, weights, and who is active."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(B, K, *SHAPE)) * 10 ** rng.uniform(-2, 2, size=(B, K, 1, 1, 1))
    gamma = rng.normal(size=(B, K)) + 1j * rng.normal(size=(B, K))
    active = rng.random((B, K)) < 0.7
    active[:, 0] = True
    beta = rng.uniform(0.1, 1, size=(B, K)) * active
    beta /= beta.sum(axis=1, keepdims=True)
    return torch.from_numpy(y), torch.from_numpy(gamma), torch.from_numpy(beta), torch.from_numpy(active)


def energies(y_BKChw: Tensor) -> Tensor:
    return y_BKChw.square().sum(dim=(2, 3, 4))


def scale_of(y: Tensor, gamma: Tensor, beta: Tensor, active: Tensor, power: float = 1.0) -> Tensor:
    return receive_scale(capacity(energies(y), gamma.abs() ** 2, power * D_Y), beta, active)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, power=st.floats(0.1, 10))
def test_every_client_keeps_its_energy_budget_and_the_bottleneck_spends_all_of_it(seed: int, power: float) -> None:
    y, gamma, beta, active = random_transmission(seed)
    rho = scale_of(y, gamma, beta, active, power)
    sent = transmit_coefficient(beta, rho, gamma)[..., None, None, None] * y
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
    aligned = gamma * transmit_coefficient(beta, rho, gamma)
    torch.testing.assert_close(aligned, (rho.sqrt()[:, None] * beta).to(aligned.dtype))


def test_a_silent_client_does_not_bound_rho_whatever_its_weight() -> None:
    capacity_BK, beta_BK = torch.tensor([[0.01, 4.0, 9.0]]), torch.tensor([[0.5, 0.5, 0.5]])
    assert receive_scale(capacity_BK, beta_BK, torch.tensor([[False, True, True]])).tolist() == [16.0]


def test_the_receiver_sees_the_weighted_sum_plus_noise_of_the_predicted_variance() -> None:
    many, channel = 10_000, ChannelConfig(snr_db=3, power=2.0)
    y, gamma, beta, active = (t[:1] for t in random_transmission(4))
    rho = scale_of(y, gamma, beta, active, channel.power)
    sent = transmit_coefficient(beta, rho, gamma)[..., None, None, None] * y
    noise = draw_noise(range(many), SHAPE, config=channel, seed=0)
    received = superpose(sent.expand(many, -1, -1, -1, -1), gamma.expand(many, -1), noise)
    y_ota, exact = receive(received.signal_BChw, rho.expand(many)), torch.einsum("bkchw,bk->bchw", y, beta)
    variance = 2.0 * 10**-0.3 / (2 * float(rho))
    assert (y_ota.mean(dim=0) - exact[0]).abs().max() < 4.5 * math.sqrt(variance / many)
    assert float((y_ota - exact).square().mean()) == pytest.approx(variance, rel=0.02)


def test_noise_puts_half_its_power_in_each_real_dimension() -> None:
    noise = draw_noise(range(4000), (4, 4), config=ChannelConfig(snr_db=-10, power=0.5), seed=1)
    error = 4 / math.sqrt(noise.numel())
    assert float(noise.real.square().mean()) == pytest.approx(2.5, rel=2 * error)
    assert float(noise.imag.square().mean()) == pytest.approx(2.5, rel=2 * error)
    assert abs(float((noise.real * noise.imag).mean())) < 2.5 * error
    assert abs(complex(noise.mean())) < math.sqrt(5) * error


def test_snr_db_is_transmit_power_per_symbol_over_noise_power_per_complex_symbol(
    make_model: Model, make_features: Features
) -> None:
    channel = ChannelConfig(snr_db=7, power=2.5, fading="none")
    model = make_model(channel=channel.model_dump(), routing={"top_k": 1})
    output = model(make_features(4), range(4))
    y = output.round.logits_BKChw[:, 0].detach()
    power = output.rho_B[:, None, None, None] * y.square()  # beta = gamma = 1: x = sqrt(rho) y, alone at the bottleneck
    noise = draw_noise(range(500), tuple(y.shape[1:]), config=channel, seed=0)
    measured_db = 10 * torch.log10(power.mean(dim=(1, 2, 3)) / noise.abs().square().mean())
    torch.testing.assert_close(measured_db, torch.full((4,), 7.0, dtype=torch.float64), rtol=0, atol=0.15)
    assert noise_power(channel) == pytest.approx(2.5 / 10**0.7)


@pytest.mark.parametrize("threshold", [0.05, 0.5])
def test_rayleigh_fading_truncates_at_the_rate_of_the_exponential_law(threshold: float) -> None:
    channel = ChannelConfig(gamma_th=threshold)
    gamma = draw_gamma(range(20_000), 5, config=channel, seed=0)
    rate = 1 - math.exp(-threshold)
    measured = float(in_deep_fade(gamma, channel).double().mean())
    assert measured == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / 1e5))
    assert torch.equal(in_deep_fade(gamma, channel), gamma.abs() ** 2 < threshold)


@pytest.mark.parametrize("factor", [0.0, 1.0, 10.0])
def test_rician_fading_has_unit_power_and_the_given_line_of_sight(factor: float) -> None:
    gamma = draw_gamma(range(20_000), 4, config=ChannelConfig(fading="rician", rician_factor=factor), seed=0).numpy()
    sight, scatter = abs(gamma.mean()) ** 2, np.var(gamma)
    assert np.mean(np.abs(gamma) ** 2) == pytest.approx(1, abs=0.015)
    assert sight / scatter == pytest.approx(factor, rel=0.03, abs=1e-3)


def test_without_fading_or_air_all_gains_are_one_and_nobody_fades() -> None:
    for channel in (ChannelConfig(fading="none"), ChannelConfig(kind="ideal", gamma_th=5)):
        gamma = draw_gamma(range(3), 4, config=channel, seed=0)
        assert (gamma == 1).all()
        assert not in_deep_fade(gamma, channel).any()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, bits=st.integers(1, 12))
def test_quantisation_errs_by_half_a_step_of_each_clients_own_range_and_passes_the_gradient(
    seed: int, bits: int
) -> None:
    y = random_transmission(seed)[0].requires_grad_()
    sent = quantise(y, bits)
    step = (y.amax(dim=(2, 3, 4)) - y.amin(dim=(2, 3, 4))).detach() / (2**bits - 1)
    error = (sent - y).detach().abs().amax(dim=(2, 3, 4))
    assert (error <= step / 2 * (1 + 1e-9)).all()
    level = (sent - y.amin(dim=(2, 3, 4), keepdim=True)).detach() / step[..., None, None, None]
    torch.testing.assert_close(level, level.round(), rtol=0, atol=1e-6)
    weights = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((weights * sent).sum(), y)
    assert torch.equal(gradient, weights)


def test_quantisation_keeps_a_constant_output_and_both_ends_of_the_range() -> None:
    y = torch.tensor([[-1.0, 0.3, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]]).view(1, 2, 1, 2, 2)
    sent = quantise(y, 3)
    assert torch.equal(sent[0, 1], y[0, 1])
    assert (sent[0, 0].min(), sent[0, 0].max()) == (-1.0, 5.0)


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_the_ideal_channel_is_the_exact_weighted_sum(seed: int) -> None:
    y, _, beta, _ = random_transmission(seed)
    received = weighted_sum(y, beta, bits=None)
    expected = sum(beta[:, k, None, None, None] * y[:, k] for k in range(K))
    torch.testing.assert_close(received.signal_BChw, expected)
    assert (received.error_energy_B == 0).all()


@pytest.mark.parametrize("kind", ["air", "ideal", "digital"])
def test_the_reported_nmse_is_the_measured_one(kind: str, make_model: Model, make_features: Features) -> None:
    model = make_model(channel={"kind": kind, "snr_db": 5, "gamma_th": 0.3, "digital_bits": 3})
    output = model(make_features(6), range(6))
    exact = torch.einsum("bkchw,bk->bchw", output.round.logits_BKChw, output.beta_BK)
    energy = exact.square().sum(dim=(1, 2, 3))
    measured = (output.logits_BChw - exact).square().sum(dim=(1, 2, 3)) / energy
    torch.testing.assert_close(output.nmse_B, measured.detach(), rtol=1e-8, atol=1e-15)
    assert (measured.max() < 1e-20) == (kind == "ideal")


def test_distortion_over_many_draws_is_noise_per_element_over_twice_rho(
    make_model: Model, make_features: Features
) -> None:
    model = make_model(channel={"snr_db": 5, "fading": "none"})
    with torch.no_grad():
        output = model(make_features(1, grid=(2, 2)).expand(3000, -1, -1, -1), range(3000))
    exact = torch.einsum("bkchw,bk->bchw", output.round.logits_BKChw, output.beta_BK)
    distortion = (output.logits_BChw - exact).square().sum(dim=(1, 2, 3)).mean()
    assert float(distortion) == pytest.approx(12 * 10**-0.5 / (2 * float(output.rho_B[0])), rel=0.03)


def ota(y: Tensor, gamma: Tensor, beta: Tensor, noise: Tensor, *, rho_grad: bool) -> tuple[Tensor, Tensor]:
    """Eq. (16)-(18) with everybody active, and rho."""
    rho = scale_of(y, gamma, beta, torch.ones_like(beta, dtype=torch.bool))
    rho = rho if rho_grad else rho.detach()
    sent = transmit_coefficient(beta, rho, gamma)[..., None, None, None] * y
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

"""What the air does, Eq. (4): noise and fading of the predicted laws, quantisation, the reported error."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from airmoe_ray.config import ChannelConfig
from airmoe_ray.radio.channel import (
    draw_gamma,
    draw_noise,
    in_deep_fade,
    noise_power,
    quantise,
    superpose,
    weighted_sum,
)
from airmoe_ray.radio.power import receive, transmit_coefficient
from tests.airmoe_ray.radio.support import (
    SEEDS,
    SHAPE,
    Features,
    K,
    Model,
    random_transmission,
    scale_of,
)


def test_the_receiver_sees_the_weighted_sum_plus_noise_of_the_predicted_variance() -> None:
    many, channel = 10_000, ChannelConfig(snr_db=3, power=2.0)
    y, gamma, beta, active = (t[:1] for t in random_transmission(4))
    rho = scale_of(y, gamma, beta, active, channel.power)
    sent = transmit_coefficient(beta, rho[:, None], gamma)[..., None, None, None] * y
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
    y = output.round.on_air.logits_BKChw[:, 0].detach()
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
    weights = random_transmission(seed + 1)[0]
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
    exact = torch.einsum("bkchw,bk->bchw", output.round.on_air.logits_BKChw, output.beta_BK)
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
    exact = torch.einsum("bkchw,bk->bchw", output.round.on_air.logits_BKChw, output.beta_BK)
    distortion = (output.logits_BChw - exact).square().sum(dim=(1, 2, 3)).mean()
    assert float(distortion) == pytest.approx(12 * 10**-0.5 / (2 * float(output.rho_B[0])), rel=0.03)

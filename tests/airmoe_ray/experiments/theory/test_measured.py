"""The real channel against the theory: noise variance, Lemma 1, and the floor of SGD with its slope."""

import numpy as np
import pytest
import torch

from airmoe_ray.config import ChannelConfig
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.theory import bounds, controlled
from airmoe_ray.experiments.theory.figures import (
    floor_figures,
    gradient_figures,
    misses,
    noise_figures,
    noise_slope_figures,
)
from airmoe_ray.experiments.theory.measured import (
    check_channel,
    interval,
    measure_floor,
    measure_gradient_noise,
    measure_noise,
    measure_noise_slope,
)

AIR = ChannelConfig()


@pytest.mark.parametrize("fading", ["rayleigh", "rician", "none"])
def test_the_noise_variance_is_the_predicted_one_within_three_percent(fading: str) -> None:
    noise = measure_noise(ChannelConfig(fading=fading, snr_db=7), seed=3, inputs=100)
    assert noise.ratio == pytest.approx(1, abs=0.03)
    assert noise_figures(noise)["noise_variance_ratio"]["pass"]
    assert not noise_figures(noise._replace(ratio=1.04))["noise_variance_ratio"]["pass"]


def test_the_predicted_variance_is_that_of_a_client_that_spends_its_whole_budget() -> None:
    """By hand: at rho the bottleneck's energy |b_j|^2 ||y_j||^2 is P0, and nobody's is above."""
    outputs_BKChw = torch.randn(5, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids_B = controlled.clear_ids(5, 0, config=AIR, seed=0)
    air = controlled.over_the_air(outputs_BKChw, ids_B, config=AIR, seed=0)
    rho_B = 0.01 / (2 * air.variance_B)  # sigma_c^2 = 0.01 at 20 dB
    from airmoe_ray.radio.channel import draw_gamma

    gain_BK = draw_gamma(ids_B, 3, config=AIR, seed=0).abs().square()
    spent_BK = rho_B[:, None] * torch.tensor(controlled.WEIGHTS) ** 2 / gain_BK * air.energy_BK
    torch.testing.assert_close(spent_BK.amax(dim=1), torch.full((5,), 32.0, dtype=torch.float64))


def test_only_ids_without_a_deep_fade_are_taken() -> None:
    from airmoe_ray.radio.channel import draw_gamma, in_deep_fade

    config = ChannelConfig(gamma_th=0.5)
    ids = controlled.clear_ids(200, 10, config=config, seed=1)
    assert len(set(ids)) == 200
    assert ids == sorted(ids)
    assert not in_deep_fade(draw_gamma(ids, 3, config=config, seed=1), config).any()


def test_the_problem_is_not_convex_and_its_constants_hold() -> None:
    data = controlled.make_data([0])
    theta = controlled.start([0])

    def objective(flat: torch.Tensor) -> torch.Tensor:
        return controlled.loss(controlled.exact_sum(flat.view_as(theta), data), data).mean()

    hessian = torch.autograd.functional.hessian(objective, theta.flatten())
    assert torch.linalg.eigvalsh(hessian)[0] < -0.01
    first = data.rows(torch.tensor([0]))
    jacobian = torch.autograd.functional.jacobian(
        lambda flat: controlled.exact_sum(flat.view_as(theta), first).flatten(), theta.flatten()
    )
    norm = float(torch.linalg.matrix_norm(jacobian, ord=2))
    assert 0.3 * controlled.jacobian_bound(first) < norm <= controlled.jacobian_bound(first)
    y = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    p = y.sigmoid()
    assert float((p * (1 - p)).max()) / controlled.CELLS == pytest.approx(controlled.LOSS_SMOOTHNESS)
    assert float((p * (1 - p) * (1 - 2 * p)).max()) / controlled.CELLS == pytest.approx(
        controlled.LOSS_HESSIAN, rel=1e-4
    )


def test_the_gradient_of_the_smoothed_objective_is_the_slope_of_its_value() -> None:
    data, theta = controlled.make_data([1]), controlled.start([1])
    variance_B = torch.tensor([0.3, 0.8], dtype=torch.float64)
    direction = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value(at: torch.Tensor) -> float:
        fused, t = controlled.exact_sum(at, data).numpy(), data.targets_BChw.numpy()
        cells = bounds.smoothed(lambda y: np.logaddexp(0, y) - t * y, fused, variance_B.numpy()[:, None, None, None])
        return float(cells.sum(axis=(1, 2, 3)).mean() / controlled.CELLS)

    slope = (value(theta + 1e-5 * direction) - value(theta - 1e-5 * direction)) / 2e-5
    found = float((controlled.smoothed_gradient(theta, data, variance_B) * direction).sum())
    assert found == pytest.approx(slope, rel=1e-6)


def test_gradients_are_unbiased_for_the_smoothed_objective_only_and_their_variance_is_within_the_bound() -> None:
    noise = measure_gradient_noise(ChannelConfig(snr_db=10), seed=0, draws=200)
    assert noise.to_smoothed < 3
    assert noise.to_noiseless > 30
    assert 0 < noise.channel < noise.total
    assert not misses(gradient_figures(noise))
    assert misses(gradient_figures(noise._replace(total=1e9))) == ["gradient_variance_over_bound"]


def test_gradient_noise_falls_by_one_decibel_per_decibel() -> None:
    measured = measure_noise_slope(AIR, seeds=2, seed=0, draws=40, snrs_db=(12, 22, 32))
    figures = noise_slope_figures(measured)
    assert figures["gradient_noise_slope_measured"]["value"] == pytest.approx(-1, abs=0.1)
    assert figures["gradient_noise_slope_formula"]["value"] == -1
    assert not misses(figures)
    flat = noise_slope_figures(measured._replace(channel=np.sqrt(measured.channel)))
    assert misses(flat) == ["gradient_noise_slope_measured"]


def test_the_measured_floor_falls_by_two_decibels_per_decibel_and_lies_below_the_bound() -> None:
    measured = measure_floor(AIR, seeds=3, steps=300, seed=0, snrs_db=(12, 22, 32))
    figures = floor_figures(measured, steps=300)
    assert figures["floor_slope_measured"]["value"] == pytest.approx(-2, abs=0.2)
    assert not misses(figures)
    # and it is the bias that is seen: what is left is (v / 2) J^T f''' in the middle of the range
    apart_db = 10 * np.log10(measured.squared_norm[1] / measured.predicted[1])
    assert np.abs(apart_db).max() < 1.5
    np.testing.assert_allclose(np.diff(measured.receive_snr_db, axis=0), 10)


def test_a_run_that_is_too_short_to_settle_misses_its_target() -> None:
    figures = floor_figures(measure_floor(AIR, seeds=2, steps=10, seed=0, snrs_db=(12, 32)), steps=10)
    assert "floor_slope_measured" in misses(figures)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"kind": "ideal"}, "channel.kind=air"), ({"gamma_th": 0}, "rho_min is 0"), ({"gamma_th": 5}, "deep fade")],
)
def test_channels_outside_the_theorems_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_channel(ChannelConfig.model_validate(settings))


def test_the_interval_is_students() -> None:
    low, high = interval(np.array([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)

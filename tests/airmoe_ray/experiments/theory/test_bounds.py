"""The bounds against formulas written anew in 50 digits, their limits, and T(eps) against a search."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

from airmoe_ray.experiments.theory import bounds
from airmoe_ray.experiments.theory.settings import Constants

PLAIN = Constants()
OTHER = Constants(
    smoothness=3.0,
    gap=0.7,
    preconditioner_low=0.5,
    preconditioner_high=2.0,
    data_variance=0.4,
    jacobian=1.7,
    loss_smoothness=0.3,
    loss_hessian=0.2,
    outputs=50,
    noise_power=0.05,
    rho_min=0.6,
)
BOTH = pytest.mark.parametrize("constants", [PLAIN, OTHER], ids=["plain", "other"])


class Letters:
    """The paper's letters as decimals, and its formulas from them."""

    def __init__(self, c: Constants) -> None:
        self.L, self.D, self.m, self.M = map(
            Decimal, (c.smoothness, c.gap, c.preconditioner_low, c.preconditioner_high)
        )
        self.G, self.Ly, self.rH, self.dy = map(Decimal, (c.jacobian, c.loss_smoothness, c.loss_hessian, c.outputs))
        self.s2, self.sc2, self.rho = map(Decimal, (c.data_variance, c.noise_power, c.rho_min))
        self.eff = self.s2 + self.G**2 * self.Ly**2 * self.dy * self.sc2 / (2 * self.rho)
        self.floor = self.G**2 * self.rH**2 * self.dy**2 / 8 * self.sc2**2 / self.rho**2

    def smoothed(self, t: int) -> Decimal:
        first = 2 * self.L * self.M**2 * self.D / (self.m**2 * t)
        return first + 2 * self.M / self.m * (2 * self.L * self.D * self.eff / t).sqrt()


@BOTH
def test_variance_bias_and_floor_are_the_papers_formulas(constants: Constants) -> None:
    letters = Letters(constants)
    assert bounds.effective_variance(constants) == pytest.approx(float(letters.eff), rel=1e-12)
    assert bounds.floor(constants) == pytest.approx(float(letters.floor), rel=1e-12)
    assert bounds.bias_bound(constants) == pytest.approx(float((letters.floor / 2).sqrt()), rel=1e-12)
    in_db = bounds.floor_db(constants, bounds.receive_snr_db(constants))
    assert in_db == pytest.approx(10 * np.log10(float(letters.floor)), abs=1e-9)


@BOTH
@pytest.mark.parametrize("eps", [3.0, 0.7, 0.1, 0.03])
def test_iterations_are_the_smallest_number_whose_bound_is_within_the_target(constants: Constants, eps: float) -> None:
    letters = Letters(constants)
    with localcontext() as context:
        context.prec = 50
        for found, wanted in (
            (bounds.smoothed_iterations(constants, eps), Decimal(eps)),
            (bounds.noiseless_iterations(constants, eps), (Decimal(eps) - letters.floor) / 2),
        ):
            if wanted <= 0:
                assert found.total is None
                continue
            assert found.total is not None
            assert letters.smoothed(found.total) <= wanted
            assert found.total == 1 or letters.smoothed(found.total - 1) > wanted


def test_a_search_from_one_upwards_finds_the_same() -> None:
    for eps in np.geomspace(0.3, 30, 60):
        searched = next(t for t in range(1, 10_000) if bounds.smoothed_bound(OTHER, t) <= eps)
        assert bounds.smoothed_iterations(OTHER, float(eps)).total == searched


def test_a_whole_number_is_not_lifted_by_rounding() -> None:
    quiet = Constants(data_variance=0, noise_power=0)  # a = 2, b = 0
    for t in range(1, 200):
        assert bounds.smoothed_iterations(quiet, bounds.smoothed_bound(quiet, t)).total == t


def test_at_and_below_the_floor_nothing_is_certified_and_no_number_is_given() -> None:
    least = bounds.floor(OTHER)
    for eps in (least, least / 2, 1e-300):
        answer = bounds.noiseless_iterations(OTHER, eps)
        assert answer.total is None
        assert answer.reason is not None
        assert answer.reason.startswith("not certified by the bound")
    assert bounds.noiseless_iterations(OTHER, least * 1.01).total is not None


def test_more_iterations_than_a_float_counts_are_not_a_number_either() -> None:
    answer = bounds.smoothed_iterations(OTHER, 1e-200)
    assert answer.total is None
    assert "1e300" in (answer.reason or "")
    with pytest.raises(ValueError, match="positive"):
        bounds.smoothed_iterations(OTHER, 0.0)


def test_without_channel_noise_the_bounds_are_those_of_plain_sgd() -> None:
    quiet, nearly = OTHER.but(noise_power=0.0), OTHER.but(noise_power=1e-12)
    assert bounds.effective_variance(quiet) == OTHER.data_variance
    assert bounds.floor(quiet) == 0
    assert bounds.noiseless_iterations(quiet, 0.2) == bounds.smoothed_iterations(quiet, 0.1)
    assert bounds.noiseless_iterations(nearly, 0.2) == bounds.noiseless_iterations(quiet, 0.2)
    assert bounds.noiseless_bound(quiet, 100) == 2 * bounds.smoothed_bound(quiet, 100)


def test_iterations_do_not_vanish_with_all_noise_as_the_leading_term_does() -> None:
    silent = PLAIN.but(noise_power=0.0, data_variance=0.0)
    assert bounds.smoothed_iterations(silent, 1e-3).total == 2000  # a / eps = 2 L M^2 Delta / (m^2 eps)


def test_more_noise_more_outputs_and_less_scaling_never_help() -> None:
    for name, values in (
        ("noise_power", np.geomspace(1e-3, 0.3, 20)),
        ("outputs", range(1, 200, 10)),
        ("rho_min", np.geomspace(10, 0.2, 20)),
        ("data_variance", np.linspace(0, 5, 20)),
        ("gap", np.linspace(0.1, 5, 20)),
        ("preconditioner_high", np.linspace(1, 5, 20)),
    ):
        counts = [bounds.noiseless_iterations(PLAIN.but(**{name: v}), 0.1).total or np.inf for v in values]
        assert counts == sorted(counts), name
        assert counts[0] < counts[-1], name


def test_the_step_of_theorem_3_makes_the_schedules_bound_meet_the_closed_form() -> None:
    for t in (1, 10, 1000, 100_000):
        step = bounds.best_step(OTHER, t)
        assert step <= bounds.largest_step(OTHER)
        schedule = bounds.schedule_bound(OTHER, np.full(t, step))
        assert schedule <= bounds.smoothed_bound(OTHER, t) * (1 + 1e-12)
    # where the second branch of the minimum holds, only the a / T term is given away
    assert schedule == pytest.approx(bounds.rate_coefficients(OTHER)[1] / t**0.5, rel=1e-9)


def test_the_rate_of_lemma_3_is_the_schedules_bound_at_its_own_steps() -> None:
    for t in (4, 100, 2500):
        steps = np.full(t, bounds.largest_step(OTHER) / t**0.5)
        assert bounds.smoothed_rate(OTHER, t) == pytest.approx(bounds.schedule_bound(OTHER, steps), rel=1e-12)
    assert bounds.noiseless_rate(OTHER, t) == pytest.approx(
        2 * bounds.smoothed_rate(OTHER, t) + bounds.floor(OTHER), rel=1e-12
    )


def test_decaying_steps_bring_the_schedules_bound_to_zero_and_too_large_ones_are_refused() -> None:
    found = [bounds.schedule_bound(PLAIN, 1 / (1 + np.arange(t))) for t in (10, 10**3, 10**6)]
    assert found[0] > 2 * found[1] > 2 * found[2]
    with pytest.raises(ValueError, match="leave"):
        bounds.schedule_bound(PLAIN, [1.1])


def test_the_reachable_accuracy_inverts_the_leading_term_with_constant_32() -> None:
    t = 10**12  # where a / T is nothing beside b / sqrt(T)
    eps = bounds.reachable(OTHER, t)
    assert eps > bounds.floor(OTHER)
    assert bounds.noiseless_iterations(OTHER, eps).total == pytest.approx(t, rel=1e-4)
    assert bounds.reachable(OTHER, 100) < bounds.noiseless_bound(OTHER, 100)


def test_the_smoothing_is_exact_for_polynomials_and_leaves_functions_alone_without_noise() -> None:
    at = np.linspace(-2, 2, 9)
    quartic = bounds.smoothed(lambda y: y**4, at, 0.3)
    np.testing.assert_allclose(quartic, at**4 + 6 * at**2 * 0.3 + 3 * 0.3**2, rtol=1e-12)
    np.testing.assert_allclose(bounds.smoothed(np.sin, at, 0.0), np.sin(at), atol=1e-13)
    np.testing.assert_allclose(bounds.smoothed(np.sin, at, 0.5), np.exp(-0.25) * np.sin(at), atol=1e-13)


def test_the_worst_scaling_is_what_the_power_control_gives_to_one_client_at_the_threshold() -> None:
    import torch

    from airmoe_ray.radio.power import receive_scale, scale_limit

    limit = scale_limit(torch.tensor([[7.0]]), torch.tensor([[0.05]]), 30.0)
    rho = receive_scale(limit, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert bounds.worst_receive_scale(30.0, 0.05, largest_energy=7.0) == pytest.approx(float(rho))

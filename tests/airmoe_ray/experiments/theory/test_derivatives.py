"""Norms by power iteration against matrices formed in full."""

import pytest
import torch

from airmoe_ray.experiments.theory.derivatives import curvature, jacobian_norm, third_derivative_norm

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def test_the_jacobians_norm_is_its_largest_singular_value_over_all_parameters() -> None:
    x, first, second, unused = normal(5), normal(6, 5), normal(4, 6), normal(3).requires_grad_()

    def output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return b @ torch.tanh(a @ x)

    parts = torch.autograd.functional.jacobian(output, (first, second))
    whole = torch.cat([part.flatten(1) for part in parts], dim=1)
    parameters = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    found = jacobian_norm(output(*parameters), [*parameters, unused], rounds=100)
    assert found == pytest.approx(float(torch.linalg.matrix_norm(whole, ord=2)), rel=1e-6)


def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian_in_size() -> None:
    matrix = normal(6, 6)
    symmetric = matrix + matrix.T - 4 * torch.eye(6)
    found = curvature(lambda y: 0.5 * y @ symmetric @ y + y.sum(), normal(6), rounds=300)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(symmetric).abs().max()), rel=1e-6)


def test_the_third_derivative_of_a_sum_of_cubes_is_that_of_its_steepest_part() -> None:
    scale = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    assert third_derivative_norm(lambda y: (scale * y**3).sum(), normal(3), rounds=30) == pytest.approx(18)


def test_softmax_has_the_curvature_and_third_derivative_that_the_bound_takes_for_it() -> None:
    """1/2 and sqrt(2/27), at p = (1/2, 1/2) and at p (1 - p) = 1/6, and nowhere more."""
    loss = torch.nn.functional.cross_entropy
    truth = torch.tensor(0)
    even = torch.tensor([0.0, 0.0, -40.0], dtype=torch.float64)
    assert curvature(lambda y: loss(y, truth), even) == pytest.approx(0.5)
    p = 0.5 + 3**-0.5 / 2
    skew = torch.tensor([p, 1 - p, 1e-18], dtype=torch.float64).log()
    assert third_derivative_norm(lambda y: loss(y, truth), skew, rounds=60) == pytest.approx((2 / 27) ** 0.5)
    for _ in range(20):
        assert third_derivative_norm(lambda y: loss(y, truth), 2 * normal(3)) <= (2 / 27) ** 0.5

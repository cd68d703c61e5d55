"""Norm, JS and the query: distributions on d points, Eq. (8), (14)."""

import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.model.query import Query
from airmoe_ray.model.statistics import clr, js_divergence, norm

LN2 = math.log(2)
SEEDS = st.integers(0, 10**6)


def simplex(seed: int, rows: int = 4, dim: int = 6) -> Tensor:
    """Dirichlet draws from nearly one-hot to nearly even, one with an exact zero."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(dim, 10 ** rng.uniform(-1, 1)), size=rows)
    p[0, 0] = 0
    return torch.from_numpy(p / p.sum(axis=-1, keepdims=True))


def js_by_two_kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """KL over the supports only, one number."""
    middle = (p + q) / 2
    kl = [sum(x * math.log(x / m) for x, m in zip(a, middle, strict=True) if x > 0) for a in (p, q)]
    return (kl[0] + kl[1]) / 2


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_js_is_the_mean_of_two_kl_symmetric_and_between_zero_and_ln_2(seed: int) -> None:
    p, q = simplex(seed), simplex(seed + 1)
    js = js_divergence(p, q)
    expected = [js_by_two_kl(a, b) for a, b in zip(p.numpy(), q.numpy(), strict=True)]
    torch.testing.assert_close(js, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(js, js_divergence(q, p), rtol=0, atol=1e-15)
    assert ((js >= 0) & (js <= LN2 + 1e-12)).all()


def test_js_of_disjoint_supports_is_ln_2() -> None:
    for dtype in (torch.float32, torch.float64):
        p, q = torch.tensor([0.3, 0.7, 0, 0], dtype=dtype), torch.tensor([0, 0, 0.5, 0.5], dtype=dtype)
        assert abs(float(js_divergence(p, q)) - LN2) < 4 * torch.finfo(dtype).eps


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, step=st.floats(1e-3, 0.5))
def test_js_is_zero_only_where_the_distributions_are_equal(seed: int, step: float) -> None:
    p = simplex(seed)
    assert js_divergence(p, p.clone()).max() <= 1e-15
    moved = (1 - step) * p + step * torch.eye(6, dtype=p.dtype)[p.argmin(dim=-1)]
    # Pinsker: JS >= |p - q|_1^2 / 8
    assert (js_divergence(p, moved) >= (p - moved).abs().sum(dim=-1) ** 2 / 8 - 1e-15).all()
    assert (js_divergence(p, moved) > 1e-10).all()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_the_gradient_of_js_is_half_the_log_ratio_to_the_middle_and_finite_at_zeros(seed: int) -> None:
    p, q = simplex(seed).requires_grad_(), simplex(seed + 1)
    (gradient,) = torch.autograd.grad(js_divergence(p, q).sum(), p)
    assert gradient.isfinite().all()
    inside = p.detach() > 1e-12
    expected = 0.5 * (p.detach() / ((p.detach() + q) / 2)).log()
    torch.testing.assert_close(gradient[inside], expected[inside], rtol=1e-9, atol=1e-9)


def test_js_in_float32_has_finite_gradients_on_one_hot_distributions() -> None:
    logits = torch.tensor([[200.0, 0, 0], [0, 200, 0]], requires_grad=True)
    js_divergence(norm(logits)[0], norm(logits)[1]).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, temperature=st.floats(0.3, 5))
def test_clr_of_norm_recovers_the_logits_up_to_a_constant_and_the_temperature(seed: int, temperature: float) -> None:
    v = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 7)) * 3)
    q = norm(v, temperature)
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(3, dtype=q.dtype))
    torch.testing.assert_close(clr(q) * temperature, v - v.mean(dim=-1, keepdim=True), rtol=1e-9, atol=1e-9)


def make_query(dim: int = 5, temperature: float = 1.0) -> Query:
    return Query(6, dim, temperature=temperature, generator=torch.Generator().manual_seed(0)).double()


def test_the_query_is_the_softmax_of_a_linear_map_of_the_normalised_mean_feature(
    make_features: Callable[..., Tensor],
) -> None:
    query, features = make_query(temperature=0.7), make_features(3)
    mean = features.numpy().mean(axis=(2, 3))
    whitened = (mean - mean.mean(1, keepdims=True)) / np.sqrt(mean.var(1, keepdims=True) + 1e-5)
    logits = (whitened @ query.linear.weight.detach().numpy().T) / 0.7
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(query(features).detach().numpy(), expected, rtol=1e-9)


def spread(query: Query, pooled_SD: Tensor) -> float:
    """Mean divergence between the queries of different inputs."""
    q = query(pooled_SD[..., None, None]).detach()
    return float(js_divergence(q[:, None], q[None]).mean())


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_fitting_the_projection_makes_nearly_parallel_features_tell_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pooled = torch.from_numpy(3 * rng.normal(size=6) + 0.1 * rng.normal(size=(40, 6)))
    query = make_query()
    before = spread(query, pooled)
    query.fit_projection(pooled, spread=1.0)
    assert spread(query, pooled) > 5 * before


def test_fitted_query_logits_are_centred_uncorrelated_and_never_amplify_weak_axes_to_the_size_of_strong_ones() -> None:
    rng = np.random.default_rng(0)
    pooled = torch.from_numpy(rng.normal(size=(200, 6)) * np.array([1, 2, 3, 4, 5, 6]) + 10)
    query = make_query(dim=4)
    query.fit_projection(pooled, spread=1.5)
    x = query.layer_norm(pooled).detach()
    variance = np.sort(np.linalg.eigvalsh(np.cov(x.numpy().T, bias=True)))[::-1][:4]
    logits = query.linear(x).detach().numpy()
    np.testing.assert_allclose(logits.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(
        np.cov(logits.T, bias=True), np.diag(1.5**2 * variance / (variance + variance.mean())), atol=1e-9
    )

"""The Feature Retrieval Library: reads, Eq. (9)-(10), renewals, Eq. (11)-(12), and Theorem 1."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import FrlConfig
from airmoe_ray.model.frl import FeatureRetrievalLibrary, clip_norm
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import RoutingConfig, route
from airmoe_ray.model.statistics import norm

Array = NDArray[np.float64]
DIM = 5


def make_frl(counts: list[int], **options: Any) -> FeatureRetrievalLibrary:
    config = FrlConfig.model_validate({"dim": DIM, **options})
    frl = FeatureRetrievalLibrary(config, counts, generator=torch.Generator().manual_seed(1)).double()
    frl.importance_NM.copy_(torch.rand(frl.importance_NM.shape, generator=torch.Generator().manual_seed(2)))
    frl.project()  # again in float64: a ball of float32 rounding is not the ball
    return frl


def queries(batch: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(DIM), size=batch))


def renew_one_by_one(
    p_NMd: Array, w_NM: Array, alpha_BNM: Array, psi_BNd: Array, active_BN: NDArray[np.bool_], *, eta: float
) -> tuple[Array, Array]:
    """Eq. (11)-(12) as printed, sample after sample."""
    p, w = p_NMd.copy(), w_NM.copy()
    for i, j in np.argwhere(active_BN):
        for k in range(p.shape[1]):
            a = eta * alpha_BNM[i, j, k]
            p[j, k] = (1 - a) * p[j, k] + a * psi_BNd[i, j]
            w[j, k] = (1 - a) * w[j, k] + a
    return p, w


def renewal_weights(alpha_BNM: Array, renewal: str) -> Array:
    """Soft: alpha itself. Sharp: alpha^8, normalised."""
    power = alpha_BNM**8 if renewal == "sharp" else alpha_BNM
    return power / power.sum(axis=-1, keepdims=True)


def random_round(frl: FeatureRetrievalLibrary, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a read, psi within the ball (some on its surface), and who was active."""
    rng = np.random.default_rng(seed)
    clients = len(frl.valid_NM)
    direction = rng.normal(size=(batch, clients, DIM))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    length = frl.config.bound * rng.choice([0.0, 0.3, 1.0], size=(batch, clients, 1))
    active = rng.random((batch, clients)) < 0.6
    alpha = frl.read(queries(batch, seed)).alpha_BNM.detach()
    return alpha, torch.from_numpy(direction * length), torch.from_numpy(active)


def similarity(kind: str, q: Array, p: Array) -> float:
    """One query against one prototype, before the scale."""
    if kind == "dot":
        return float(q @ p)
    if kind == "clr_cosine":
        q, p = np.log(q) - np.log(q).mean(), p - p.mean()
    return float(q @ p / np.sqrt((q @ q) * (p @ p)))


@pytest.mark.parametrize("kind", ["clr_cosine", "cosine", "dot"])
def test_a_read_is_the_attention_weighted_mean_of_each_clients_own_prototypes(kind: str) -> None:
    counts, scale = [3, 1, 2], 7.0
    frl, query = make_frl(counts, sim=kind, sim_scale=scale), queries(4)
    read, p = frl.read(query), frl.prototypes_NMd.detach().numpy()
    for i, q in enumerate(query.numpy()):
        for j, count in enumerate(counts):
            weights = np.exp([scale * similarity(kind, q, p[j, k]) for k in range(count)])
            alpha = weights / weights.sum()
            np.testing.assert_allclose(read.alpha_BNM[i, j, :count].detach(), alpha, rtol=1e-9)
            np.testing.assert_allclose(read.value_BNd[i, j].detach(), alpha @ p[j, :count], rtol=1e-9, atol=1e-12)


def test_an_importance_weighted_read_multiplies_the_attention_by_the_importance() -> None:
    plain, weighted = make_frl([3, 3]), make_frl([3, 3], importance_read=True)
    expected = plain.read(queries(4)).alpha_BNM * (weighted.importance_NM + 1e-3)
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weighted.read(queries(4)).alpha_BNM, expected)


@pytest.mark.parametrize("importance_read", [False, True])
def test_padding_is_never_read_and_gets_no_gradient(importance_read: bool) -> None:
    frl, query = make_frl([3, 1, 2], importance_read=importance_read), queries(4)
    before = frl.read(query)
    with torch.no_grad():
        frl.prototypes_NMd[~frl.valid_NM] = 99.0
        frl.importance_NM[~frl.valid_NM] = 99.0
    after = frl.read(query)
    assert torch.equal(before.alpha_BNM, after.alpha_BNM)
    assert torch.equal(before.value_BNd, after.value_BNd)
    assert (after.alpha_BNM[:, ~frl.valid_NM] == 0).all()
    after.value_BNd.square().sum().backward()
    assert frl.prototypes_NMd.grad is not None
    assert (frl.prototypes_NMd.grad[~frl.valid_NM] == 0).all()
    assert (frl.prototypes_NMd.grad[frl.valid_NM] != 0).all()


@pytest.mark.parametrize("renewal", ["soft", "sharp"])
def test_renewal_never_touches_the_padding(renewal: str) -> None:
    frl = make_frl([3, 1, 2], renewal=renewal, eta=1.0)
    before = frl.prototypes_NMd.detach().clone(), frl.importance_NM.clone()
    frl.renew(*random_round(frl, 6, seed=3))
    assert torch.equal(frl.prototypes_NMd[~frl.valid_NM], before[0][~frl.valid_NM])
    assert torch.equal(frl.importance_NM[~frl.valid_NM], before[1][~frl.valid_NM])
    assert not torch.equal(frl.prototypes_NMd[frl.valid_NM], before[0][frl.valid_NM])


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    eta=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    renewal=st.sampled_from(["soft", "sharp"]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 7),
)
def test_renewing_a_batch_equals_renewing_sample_by_sample(
    seed: int, eta: float, renewal: str, counts: list[int], batch: int
) -> None:
    frl = make_frl(counts, renewal=renewal, eta=eta, sim_scale=3.0)
    alpha, psi, active = random_round(frl, batch, seed)
    p, w = renew_one_by_one(
        frl.prototypes_NMd.detach().numpy(),
        frl.importance_NM.numpy(),
        renewal_weights(alpha.numpy(), renewal),
        psi.numpy(),
        active.numpy(),
        eta=eta,
    )
    frl.renew(alpha, psi, active)
    np.testing.assert_allclose(frl.prototypes_NMd.detach(), p, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(frl.importance_NM, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("renewal", ["soft", "sharp"])
def test_with_full_rate_and_one_prototype_the_last_active_sample_takes_its_place(renewal: str) -> None:
    frl = make_frl([1], renewal=renewal, eta=1.0)
    alpha, psi, _ = random_round(frl, 4, seed=0)
    frl.renew(alpha, psi, torch.tensor([[True], [True], [True], [False]]))
    assert torch.equal(frl.prototypes_NMd[0, 0].detach(), psi[2, 0])
    assert frl.importance_NM.item() == 1.0


@settings(deadline=None, max_examples=40)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=8),
    eta=st.floats(0.001, 1.0),
    renewal=st.sampled_from(["soft", "sharp"]),
    bound=st.floats(0.1, 30.0),
)
def test_theorem_1_renewal_keeps_prototypes_in_the_ball_and_importance_in_the_unit_interval(
    seeds: list[int], eta: float, renewal: str, bound: float
) -> None:
    frl = make_frl([3, 1, 2], renewal=renewal, eta=eta, norm_bound=bound)
    for seed in seeds:
        frl.renew(*random_round(frl, 5, seed))
        assert frl.prototypes_NMd.norm(dim=-1).max() <= bound * (1 + 1e-12)
        assert frl.importance_NM.min() >= 0
        assert frl.importance_NM.max() <= 1 + 1e-12


@pytest.mark.parametrize("renewal", ["soft", "sharp"])
def test_clients_that_were_not_active_stay_bit_for_bit_whatever_their_psi_holds(renewal: str) -> None:
    frl = make_frl([3, 3, 3], renewal=renewal)
    before = frl.prototypes_NMd.detach().clone(), frl.importance_NM.clone()
    alpha, psi, _ = random_round(frl, 4, seed=0)
    psi[:, 1] = torch.nan
    frl.renew(alpha, psi, torch.tensor([True, False, True]).expand(4, 3))
    assert torch.equal(frl.prototypes_NMd[1], before[0][1])
    assert torch.equal(frl.importance_NM[1], before[1][1])
    assert (frl.prototypes_NMd[[0, 2]] != before[0][[0, 2]]).flatten(1).any(dim=-1).all()
    assert frl.prototypes_NMd.isfinite().all()


def test_all_reads_of_a_batch_see_the_libraries_of_its_start_and_renewals_reuse_that_attention(
    make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    model = make_model(frl={"eta": 0.5, "renewal": "soft"}, channel={"gamma_th": 0.3})
    features, ids = make_features(6), range(6)
    frl = model.clients.frl
    p, w = frl.prototypes_NMd.detach().numpy().copy(), frl.importance_NM.numpy().copy()
    alone = [model(features[i : i + 1], [i]).alpha_BNM for i in ids]
    output = model(features, ids)
    torch.testing.assert_close(output.alpha_BNM, torch.cat(alone), rtol=1e-10, atol=1e-12)
    alpha = output.alpha_BNM.detach().numpy().copy()
    psi, active = np.zeros((6, 4, 8)), np.zeros((6, 4), dtype=bool)
    for i, rank in np.argwhere(output.routing.active_BK.numpy()):
        j = int(output.routing.transmit_BK[i, rank])
        psi[i, j], active[i, j] = model.clients.experts[j](features[i : i + 1]).psi_Bd[0].detach(), True
    assert 0 < (~output.routing.active_BK).sum() < 12
    expected = renew_one_by_one(p, w, alpha, psi, active, eta=0.5)
    output.round.renew()
    np.testing.assert_allclose(frl.prototypes_NMd.detach(), expected[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(frl.importance_NM, expected[1], rtol=1e-9, atol=1e-11)


def test_swapping_two_clients_libraries_swaps_their_scores() -> None:
    frl, query = make_frl([3, 3, 3]), queries(4)

    def scores() -> Tensor:
        routing = route(query, norm(frl.read(query).value_BNd), config=RoutingConfig(top_k=2))
        return torch.stack([routing.score_BN, routing.prob_BN, routing.js_BN])

    before = scores()
    with torch.no_grad():
        frl.prototypes_NMd.copy_(frl.prototypes_NMd[[2, 1, 0]])
    assert not torch.allclose(before, scores())
    torch.testing.assert_close(scores(), before[..., [2, 1, 0]], rtol=1e-12, atol=1e-14)


def test_learning_by_gradient_switches_renewal_off_and_learning_by_renewal_the_gradient() -> None:
    frl = make_frl([3, 3], learn="gradient")
    before = frl.prototypes_NMd.detach().clone(), frl.importance_NM.clone()
    frl.renew(*random_round(frl, 4, seed=0))
    assert torch.equal(frl.prototypes_NMd, before[0])
    assert torch.equal(frl.importance_NM, before[1])
    assert frl.prototypes_NMd.requires_grad
    assert not make_frl([3], learn="renewal").prototypes_NMd.requires_grad


def test_a_new_library_differs_between_clients_lies_in_the_ball_and_has_no_importance() -> None:
    config = FrlConfig(dim=DIM, norm_bound=1.5)
    frl = FeatureRetrievalLibrary(config, [4, 4], generator=torch.Generator().manual_seed(0))
    assert frl.prototypes_NMd.norm(dim=-1).max() <= 1.5 * (1 + 1e-6)
    assert not torch.equal(frl.prototypes_NMd[0], frl.prototypes_NMd[1])
    assert (frl.importance_NM == 0).all()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), bound=st.floats(0.1, 5.0))
def test_clipping_shortens_long_vectors_to_the_bound_along_their_direction_and_spares_the_others(
    seed: int, bound: float
) -> None:
    v = torch.from_numpy(np.random.default_rng(seed).normal(size=(20, DIM)))
    v[0] = 0
    clipped, length = clip_norm(v, bound), v.norm(dim=-1, keepdim=True)
    expected = torch.where(length > bound, v / length.clamp_min(1e-300) * bound, v)
    torch.testing.assert_close(clipped, expected, rtol=1e-12, atol=0)

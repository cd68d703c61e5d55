"""Who answers an input: scores, TopK, truncation, Eq. (14)-(16); and how much each weighs, Eq. (21)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.config import RoutingConfig
from airmoe_ray.model.fusion import fusion_weights
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.routing import Routing, keep_strongest, route, truncate

SEEDS = st.integers(0, 10**6)
N, K, DIM = 6, 3, 5


def random_routing(seed: int, batch: int = 4, **options: object) -> Routing:
    rng = np.random.default_rng(seed)
    query, stat = rng.dirichlet(np.ones(DIM), size=batch), rng.dirichlet(np.ones(DIM), size=(batch, N))
    config = RoutingConfig.model_validate({"top_k": K, **options})
    return route(torch.from_numpy(query), torch.from_numpy(stat), config=config)


def random_fades(seed: int, batch: int = 4, rate: float = 0.5) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed + 1).random((batch, N)) < rate)


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, score=st.sampled_from(["reciprocal", "linear"]), tau=st.floats(0.2, 3.0))
def test_top_k_is_what_sorting_the_probabilities_by_hand_gives(seed: int, score: str, tau: float) -> None:
    routing = random_routing(seed, score=score, tau=tau)
    for pi, chosen, order in zip(routing.prob_BN, routing.selected_BK, routing.order_BN, strict=True):
        by_hand = sorted(range(N), key=lambda j: (-float(pi[j]), j))
        assert chosen.tolist() == by_hand[:K]
        assert order.tolist() == by_hand


@pytest.mark.parametrize("score", ["reciprocal", "linear"])
def test_probabilities_are_the_softmax_of_the_scores_and_sum_to_one(score: str) -> None:
    routing = random_routing(0, score=score, eps=0.08, tau=0.6)
    js = routing.js_BN.numpy()
    s = 1 / (0.08 + js) if score == "reciprocal" else -js / 0.08
    expected = np.exp(0.6 * s) / np.exp(0.6 * s).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routing.score_BN, s, rtol=1e-12)
    np.testing.assert_allclose(routing.prob_BN, expected, rtol=1e-9)
    np.testing.assert_allclose(routing.prob_BN.sum(dim=1), 1, rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_the_reciprocal_and_the_linear_score_route_alike(seed: int) -> None:
    reciprocal, linear = random_routing(seed, score="reciprocal"), random_routing(seed, score="linear")
    assert torch.equal(reciprocal.order_BN, linear.order_BN)


def test_ties_go_to_the_lower_client_id() -> None:
    query = torch.tensor([[0.7, 0.2, 0.1]])
    near, far = query[0], torch.tensor([0.1, 0.1, 0.8])
    stat = torch.stack([far, near, far, near, far])[None]
    assert route(query, stat, config=RoutingConfig(top_k=4)).order_BN.tolist() == [[1, 3, 0, 2, 4]]


def test_clients_whose_probability_rounds_to_zero_are_still_ordered_by_divergence() -> None:
    query, stat = torch.tensor([[1.0, 0, 0]]), torch.tensor([[[0.2, 0.8, 0], [0.6, 0.4, 0], [1.0, 0, 0]]])
    routing = route(query, stat, config=RoutingConfig(top_k=2, tau=1e4))
    assert routing.prob_BN.tolist() == [[0, 0, 1]]
    assert routing.selected_BK.tolist() == [[2, 1]]


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_dropping_silences_exactly_the_faded_clients_of_the_set(seed: int) -> None:
    routing, faded = random_routing(seed), random_fades(seed)
    result = truncate(routing, faded, "drop")
    for i in range(4):
        assert result.transmit_BK[i].tolist() == routing.selected_BK[i].tolist()
        assert result.active_BK[i].tolist() == [not faded[i, j] for j in routing.selected_BK[i]]
        assert bool(result.all_faded_B[i]) == all(faded[i, j] for j in routing.selected_BK[i])


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, rate=st.sampled_from([0.2, 0.5, 0.9, 1.0]))
def test_substitution_lets_the_best_clients_that_can_transmit_do_so(seed: int, rate: float) -> None:
    routing, faded = random_routing(seed), random_fades(seed, rate=rate)
    result = truncate(routing, faded, "substitute")
    for i in range(4):
        able = [int(j) for j in routing.order_BN[i] if not faded[i, j]][:K]
        assert result.transmit_BK[i][result.active_BK[i]].tolist() == able
        assert len(set(result.transmit_BK[i].tolist())) == K
        assert bool(result.all_faded_B[i]) == (not able)
    assert torch.equal(result.selected_BK, routing.selected_BK)


@pytest.mark.parametrize("mode", ["drop", "substitute"])
def test_where_all_of_the_set_fades_the_strongest_of_it_transmits_alone(mode: str) -> None:
    routing, faded = random_routing(0), torch.zeros(4, N, dtype=torch.bool)
    faded[1:3] = True
    gain_BK = torch.tensor([[3.0, 1, 2], [0.1, 0.3, 0.2], [0.1, 0.2, 0.4], [9, 1, 1]])
    truncated = truncate(routing, faded, mode)  # type: ignore[arg-type]
    result = keep_strongest(truncated, gain_BK)
    assert result.active_BK.tolist() == [[True] * 3, [False, True, False], [False, False, True], [True] * 3]
    assert torch.equal(result.transmit_BK, routing.selected_BK)
    assert result.all_faded_B.tolist() == [False, True, True, False]


def test_random_routing_replays_by_id_and_ignores_the_statistics(
    make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    model = make_model(routing={"rule": "random"}, channel={"kind": "ideal"})
    first = model(make_features(8, seed=0), range(8)).routing
    with torch.no_grad():
        model.clients.frl.prototypes_NMd.normal_()
    second = model(make_features(8, seed=1), range(8)).routing
    assert torch.equal(first.selected_BK, second.selected_BK)
    assert not torch.equal(first.prob_BN, second.prob_BN)
    assert not torch.equal(first.selected_BK, model(make_features(8), range(8, 16)).routing.selected_BK)


def test_random_routing_gives_every_client_its_fair_share(
    make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    model = make_model(routing={"rule": "random"}, channel={"kind": "ideal"})
    chosen = model(make_features(1, grid=(1, 2)).expand(2000, -1, -1, -1), range(2000)).routing.selected_BK
    share = torch.bincount(chosen.flatten(), minlength=4) / 2000  # K/N = 0.5 each
    assert (share - 0.5).abs().max() < 4 * (0.25 / 2000) ** 0.5


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, eps=st.floats(0.01, 1.0))
def test_fusion_weights_are_reciprocal_divergences_normalised_over_the_active(seed: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    delta, active = rng.uniform(0, np.log(2), (4, K)), rng.random((4, K)) < 0.6
    active[:, 1] = True
    beta = fusion_weights(torch.from_numpy(delta), torch.from_numpy(active), RoutingConfig(eps=eps)).numpy()
    for i in range(4):
        total = sum(1 / (eps + delta[i, k]) for k in range(K) if active[i, k])
        np.testing.assert_allclose(beta[i], [active[i, k] / (eps + delta[i, k]) / total for k in range(K)], rtol=1e-12)
    np.testing.assert_allclose(beta.sum(axis=1), 1, rtol=1e-12)
    assert (beta[~active] == 0).all()


def test_a_client_that_diverges_more_weighs_less_and_equal_fusion_does_not_care() -> None:
    delta = torch.tensor([[0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    active = torch.tensor([[True, True, False, True]])
    beta = fusion_weights(delta, active, RoutingConfig())[0]
    assert beta[0] > beta[1] > beta[3] > beta[2] == 0
    (slope,) = torch.autograd.grad(beta[0], delta)
    assert slope[0, 0] < 0 < slope[0, 1]
    assert slope[0, 2] == 0
    equal = fusion_weights(delta, active, RoutingConfig(fusion="equal"))
    torch.testing.assert_close(equal, torch.tensor([[1 / 3, 1 / 3, 0, 1 / 3]]))

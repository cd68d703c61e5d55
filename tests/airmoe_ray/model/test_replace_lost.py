"""Substitutes for clients lost before transmission: who may step in, for whom, and in which order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.config import RoutingConfig
from airmoe_ray.model.routing import Routing, replace_lost, route

CLIENTS, BATCH = 6, 3
BITS = st.lists(st.booleans(), min_size=BATCH * CLIENTS, max_size=BATCH * CLIENTS)


def case(seed: int, top_k: int, lost: list[bool], usable: list[bool]) -> tuple[Routing, Tensor, Tensor]:
    """A routing of 3 inputs to some of 6 clients, who of them was lost, and who may step in."""
    draw = torch.Generator().manual_seed(seed)
    query, stat = (torch.rand(*shape, 4, generator=draw).softmax(-1) for shape in ((BATCH,), (BATCH, CLIENTS)))
    routing = route(query, stat, config=RoutingConfig(top_k=top_k))
    return routing, torch.tensor(lost).view(BATCH, -1)[:, :top_k], torch.tensor(usable).view(BATCH, -1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, CLIENTS), BITS, BITS)
def test_substitutes_are_the_best_usable_clients_that_were_not_asked_yet(
    seed: int, top_k: int, lost: list[bool], usable: list[bool]
) -> None:
    routing, lost_BK, usable_BN = case(seed, top_k, lost, usable)
    replaced = replace_lost(routing, lost_BK, usable_BN)
    for row in range(BATCH):
        asked = routing.transmit_BK[row].tolist()
        spares = [c for c in routing.order_BN[row].tolist() if usable_BN[row, c] and c not in asked]
        places = lost_BK[row].nonzero()[:, 0].tolist()
        came = [int(replaced.transmit_BK[row, k]) for k in places if replaced.active_BK[row, k]]
        assert came == spares[: len(places)]  # distinct, usable, best first, and as many as there are


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, CLIENTS), BITS, BITS)
def test_the_lost_without_a_substitute_fall_silent_and_all_others_stay(
    seed: int, top_k: int, lost: list[bool], usable: list[bool]
) -> None:
    routing, lost_BK, usable_BN = case(seed, top_k, lost, usable)
    replaced = replace_lost(routing, lost_BK, usable_BN)
    assert torch.equal(replaced.transmit_BK[~lost_BK], routing.transmit_BK[~lost_BK])
    assert replaced.active_BK[~lost_BK].all()
    unfilled_BK = lost_BK & (replaced.transmit_BK == routing.transmit_BK)
    assert not replaced.active_BK[unfilled_BK].any()
    assert replaced.active_BK[lost_BK & ~unfilled_BK].all()
    assert torch.equal(replaced.selected_BK, routing.selected_BK)

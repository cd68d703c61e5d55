"""MoE-RM: which clients answer an input, Eq. (14)-(16), digital and low-rate.

Suffixes: B inputs, N clients, K routed, d statistic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from airmoe_ray.config import RoutingConfig
from airmoe_ray.errors import UserError
from airmoe_ray.model.statistics import js_divergence

# a rule of one's own: from Q (B, d) and the clients' statistics (B, N, d) to what they are sorted by (B, N), best first
RoutingRule = Callable[[Tensor, Tensor], Tensor]
Head = TypeVar("Head")
Participant = int | Literal["cloud"]  # a client's id, or the cloud's own head


class NobodyPresentError(RuntimeError):
    """No client that may be routed has answered the query."""


@dataclass(frozen=True)
class Participants:
    """Whose answer is wanted: everybody's, that of one participant alone, or that of all but one.

    A client that does not take part is treated as not present. The refiner is no participant: it is always at work.
    """

    only: Participant | None = None
    without: Participant | None = None

    @property
    def everybody(self) -> bool:
        """Whether nobody is left out."""
        return self.only is None and self.without is None

    @property
    def no_client(self) -> bool:
        """Whether the cloud's own head answers alone."""
        return self.only == "cloud"

    def check(self, clients: int, *, shared: bool) -> None:
        """Refuse a choice that a model of so many clients, with a head at the cloud or none, cannot answer."""
        if self.only is not None and self.without is not None:
            raise UserError("only and without: both are given; give one of them")
        for name, one in (("only", self.only), ("without", self.without)):
            if one == "cloud" and not shared:
                raise UserError(f"{name}: cloud: this model has no head at the cloud (experts.shared); name a client")
            if isinstance(one, int) and not 0 <= one < clients:
                cloud = ", and cloud" if shared else ""
                raise UserError(f"{name}: {one}: there are clients 0 to {clients - 1}{cloud}")
        if self.without == 0 and clients == 1:
            raise UserError("without: 0: it is the only client; nobody would be left")

    def includes(self, client: int) -> bool:
        """Whether this client may be routed."""
        return self.without != client if self.only is None else self.only == client

    def among(self, present_N: Tensor | None, reference_BN: Tensor) -> Tensor | None:
        """Who of those present may be routed, on the device of the reference; None: everybody."""
        if self.everybody:
            return present_N
        wanted_N = torch.tensor([self.includes(j) for j in range(reference_BN.shape[1])], device=reference_BN.device)
        return wanted_N if present_N is None else wanted_N & present_N

    def head(self, shared: Head | None) -> Head | None:
        """The cloud's own head where it takes part."""
        return shared if self.only in {None, "cloud"} and self.without != "cloud" else None


EVERYBODY = Participants()


@dataclass(frozen=True)
class Routing:
    """The cloud's decision for a batch."""

    js_BN: Tensor  # D_JS(Q || P_j), in [0, ln 2]
    score_BN: Tensor  # s_j
    prob_BN: Tensor  # pi_j, sums to 1
    order_BN: Tensor  # all clients, best first
    selected_BK: Tensor  # S = TopK(pi), best first, before truncation
    wanted_BK: Tensor  # False beyond an input's own K, where inputs of several K share a batch
    transmit_BK: Tensor  # who transmits; equals selected unless the faded are substituted
    active_BK: Tensor  # False where the client of transmit_BK is in deep fade and stays silent
    all_faded_B: Tensor  # nobody could transmit above the threshold

    @property
    def taken_BN(self) -> Tensor:
        """Who has a place in `transmit_BK`."""
        return torch.zeros_like(self.score_BN, dtype=torch.bool).scatter(1, self.transmit_BK, self.wanted_BK)

    @property
    def eligible_BN(self) -> Tensor:
        """Who could be routed at all: present, and a participant of the request."""
        return self.score_BN > -torch.inf


def score(js_BN: Tensor, config: RoutingConfig) -> Tensor:
    r"""s_j = 1 / (eps + D_JS), Eq. (15), or the linear -D_JS / eps.

    The reciprocal is steep near 0 (from 20 to 10 within 0.05 nats) and flat elsewhere, so softmax(s) is nearly one-hot
    and the load-balance gradient vanishes for everybody else. The linear score has the same order, hence the same
    TopK, and an even slope.
    """
    return 1.0 / (config.eps + js_BN) if config.score == "reciprocal" else -js_BN / config.eps


def route(
    query_dist_Bd: Tensor,
    stat_BNd: Tensor,
    *,
    config: RoutingConfig,
    gate_BN: Tensor | None = None,
    priority_BN: Tensor | None = None,
    present_N: Tensor | None = None,
    top_k_B: Sequence[int] | None = None,
) -> Routing:
    """Eq. (14)-(16): divergences, scores, probabilities and S = TopK(pi), with nobody truncated yet.

    Stable sort: ties go to the lower client id. `gate_BN`, the scores of a gate, take the place of Eq. (15);
    `priority_BN` takes the place of the score in the sort alone (the random control). Clients that are not `present_N`
    have no statistic: they score -inf and are never selected. `top_k_B` takes the place of the configured K,
    input by input.
    """
    js_BN = js_divergence(query_dist_Bd[:, None], stat_BNd)
    score_BN = score(js_BN, config) if gate_BN is None else gate_BN
    # s is sorted rather than pi: the order is the same, and probabilities that round to 0 would tie
    key_BN = score_BN if priority_BN is None else priority_BN
    top_k = config.top_k if top_k_B is None else max(top_k_B)
    if present_N is not None:
        if not present_N.any():
            raise NobodyPresentError("no client that may be routed has answered the query")
        score_BN, key_BN = (x.masked_fill(~present_N, -torch.inf) for x in (score_BN, key_BN))
        top_k = min(top_k, int(present_N.sum()))
    order_BN = torch.sort(key_BN.detach(), dim=-1, descending=True, stable=True).indices
    selected_BK = order_BN[:, :top_k]
    wanted_BK = torch.ones_like(selected_BK, dtype=torch.bool)
    if top_k_B is not None:
        k_B1 = torch.tensor(top_k_B, device=js_BN.device)[:, None]
        wanted_BK = torch.arange(selected_BK.shape[1], device=js_BN.device) < k_B1
    return Routing(
        js_BN=js_BN,
        score_BN=score_BN,
        prob_BN=torch.softmax(config.tau * score_BN, dim=-1),
        order_BN=order_BN,
        selected_BK=selected_BK,
        wanted_BK=wanted_BK,
        transmit_BK=selected_BK,
        active_BK=wanted_BK,
        all_faded_B=torch.zeros(len(js_BN), dtype=torch.bool, device=js_BN.device),
    )


def truncate(routing: Routing, faded_BN: Tensor, mode: Literal["drop", "substitute"]) -> Routing:
    """Truncated channel inversion: clients in deep fade leave S, or make room for the next best ones."""
    transmit_BK = routing.selected_BK
    if mode == "substitute":
        # stable: those able to transmit come first, best first, and the faded keep their order behind them
        faded_in_order_BN = faded_BN.gather(1, routing.order_BN).int()
        able_first_BN = torch.sort(faded_in_order_BN, dim=-1, stable=True).indices
        transmit_BK = routing.order_BN.gather(1, able_first_BN)[:, : transmit_BK.shape[1]]
    active_BK = ~faded_BN.gather(1, transmit_BK) & routing.wanted_BK
    return replace(routing, transmit_BK=transmit_BK, active_BK=active_BK, all_faded_B=~active_BK.any(dim=-1))


def keep_strongest(routing: Routing, gain_BK: Tensor) -> Routing:
    """Where all of S faded, the client of S with the largest |gamma|^2 transmits after all (a degraded answer)."""
    rescue_B1 = routing.all_faded_B[:, None]
    gain_BK = gain_BK.masked_fill(~routing.wanted_BK, -1.0)
    strongest_BK = torch.zeros_like(routing.active_BK).scatter(1, gain_BK.argmax(dim=-1, keepdim=True), True)
    return replace(
        routing,
        transmit_BK=torch.where(rescue_B1, routing.selected_BK, routing.transmit_BK),
        active_BK=torch.where(rescue_B1, strongest_BK, routing.active_BK),
    )


def nobody_routed(routing: Routing) -> Routing:
    """The same divergences with nobody selected: the cloud answers alone."""
    selected_BK = routing.selected_BK[:, :0]
    return replace(
        routing,
        selected_BK=selected_BK,
        wanted_BK=routing.wanted_BK[:, :0],
        transmit_BK=selected_BK,
        active_BK=torch.zeros_like(selected_BK, dtype=torch.bool),
    )


def replace_lost(routing: Routing, lost_BK: Tensor, usable_BN: Tensor) -> Routing:
    """Routed clients that were lost before transmission make room for the next best usable ones, or stay silent.

    Rank by rank, best first, so that two lost clients of one input get two different substitutes.
    """
    rows_B = torch.arange(len(lost_BK), device=lost_BK.device)
    transmit_BK, active_BK = routing.transmit_BK.clone(), routing.active_BK & ~lost_BK
    free_BN = (usable_BN & ~routing.taken_BN).gather(1, routing.order_BN)  # best first from here on
    for k in range(lost_BK.shape[1]):
        found_B = lost_BK[:, k] & free_BN.any(dim=-1)
        place_B = free_BN.int().argmax(dim=-1)
        transmit_BK[:, k] = torch.where(found_B, routing.order_BN[rows_B, place_B], transmit_BK[:, k])
        active_BK[:, k] |= found_B
        free_BN[rows_B, place_B] &= ~found_B
    return replace(routing, transmit_BK=transmit_BK, active_BK=active_BK)

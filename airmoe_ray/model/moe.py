"""The paper's algorithm box, `collaborate`, wherever the clients live; and AirMoE as one trainable model.

Suffixes: B inputs, N clients, K routed, M prototypes, d statistic, D features, C classes, h w grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from airmoe_ray.config import ChannelConfig, Config, RoutingConfig
from airmoe_ray.errors import UserError
from airmoe_ray.model.cloud_parts import CloudParts, Gate, GateInput, cloud_parts, gate_scores
from airmoe_ray.model.fusion import fusion_weights
from airmoe_ray.model.local_clients import LocalClients, LocalRound
from airmoe_ray.model.routing import (
    EVERYBODY,
    Participants,
    Routing,
    RoutingRule,
    keep_strongest,
    nobody_routed,
    route,
    truncate,
)
from airmoe_ray.model.seam import AirMoEOutput, Clients, R_co, Round
from airmoe_ray.radio.channel import distortion
from airmoe_ray.radio.power import receive, receive_scale
from airmoe_ray.runtime.rng import complex_normal_BN


def collaborate(
    query_dist_Bd: Tensor,
    features_BDhw: Tensor,
    ids_B: Sequence[int],
    clients: Clients[R_co],
    *,
    routing_config: RoutingConfig,
    channel: ChannelConfig,
    seed: int,
    shared: Callable[[Tensor], Tensor] | None = None,
    refine: Callable[[Tensor], Tensor] | None = None,
    participants: Participants = EVERYBODY,
    rule: RoutingRule | None = None,
    gate: Gate | None = None,
    domains_B: Tensor | None = None,
    top_k_B: Sequence[int] | None = None,
) -> AirMoEOutput[R_co]:
    """Algorithm 1 for one mini-batch: route, Eq. (1), and fuse, Eq. (2), from the broadcast of (Q, F) to the logits.

    With a `shared` head the cloud adds its own logits to what the air delivers; with `refine` it sharpens the sum.
    Everybody answers the query, but only `participants` are routed; the cloud's head alone needs no transmission.
    A `rule` sorts the clients in the place of the configured one; a `gate` scores them, and may look at the inputs'
    domains. `top_k_B` are the inputs' own K, where they differ.
    """
    round_ = clients.begin(ids_B, channel)

    reading = round_.read(query_dist_Bd)  # Eq. (9)-(10), (13)
    present_N = reading.present_N
    if not participants.no_client:
        present_N = participants.among(present_N, reading.faded_BN)
    gate_BN = None
    if gate is not None:
        gate_BN = gate_scores(gate, GateInput(features_BDhw, query_dist_Bd, reading.stat_BNd, domains_B))
    routing = route(  # Eq. (14)-(16)
        query_dist_Bd,
        reading.stat_BNd,
        config=routing_config,
        gate_BN=gate_BN,
        priority_BN=_priority(query_dist_Bd, reading.stat_BNd, ids_B, seed, routing_config, rule),
        present_N=present_N,
        top_k_B=top_k_B,
    )
    if participants.no_client:
        heard = _nothing(nobody_routed(routing), query_dist_Bd)
    else:
        silent_BN = reading.faded_BN if present_N is None else reading.faded_BN | ~present_N
        routing = truncate(routing, silent_BN, channel.truncation)
        if routing.all_faded_B.any():
            routing = keep_strongest(routing, round_.gains(routing.selected_BK))
        heard = _over_the_air(round_, features_BDhw, query_dist_Bd, routing, config=routing_config, channel=channel)

    logits_BChw, shared_BChw, head = heard.logits_BChw, None, participants.head(shared)
    if head is not None:
        shared_BChw = head(features_BDhw)
        logits_BChw = logits_BChw + shared_BChw
    return AirMoEOutput(
        logits_BChw=logits_BChw if refine is None else refine(logits_BChw),
        coarse_BChw=logits_BChw,
        query_dist_Bd=query_dist_Bd,
        routing=heard.routing,
        delta_BK=heard.delta_BK,
        beta_BK=heard.beta_BK,
        rho_B=heard.rho_B,
        nmse_B=heard.nmse_B,
        round=round_,
        shared_BChw=shared_BChw,
        alpha_BNM=reading.alpha_BNM,
        psi_BKd=heard.psi_BKd,
    )


class _Heard(NamedTuple):
    """What the routed clients delivered, and how."""

    logits_BChw: Tensor  # y^_ota; zeros (B, 1, 1, 1) where nobody transmitted
    routing: Routing  # as carried out
    delta_BK: Tensor
    beta_BK: Tensor
    rho_B: Tensor
    nmse_B: Tensor
    psi_BKd: Tensor | None


def _over_the_air(
    round_: Round,
    features_BDhw: Tensor,
    query_dist_Bd: Tensor,
    routing: Routing,
    *,
    config: RoutingConfig,
    channel: ChannelConfig,
) -> _Heard:
    """The routed clients run their experts, agree on weights, and transmit at once."""
    report = round_.forward(features_BDhw, query_dist_Bd, routing)  # Eq. (17)-(20)
    routing = report.routing
    while True:
        score_BK = routing.score_BN.gather(1, routing.transmit_BK)
        beta_BK = fusion_weights(report.delta_BK, routing.active_BK, config, score_BK=score_BK)  # Eq. (21)
        rho_B = receive_scale(report.scale_limit_BK, beta_BK, routing.active_BK)  # Eq. (22)
        if not channel.rho_grad:
            rho_B = rho_B.detach()
        received = round_.transmit(beta_BK, rho_B)  # Eq. (4)
        if received.lost_BK is None:
            break
        # weights must sum to 1 over those who are heard: the survivors renormalise and transmit again
        routing = replace(routing, active_BK=routing.active_BK & ~received.lost_BK)
    logits_BChw = receive(received.signal_BChw, rho_B)  # Eq. (23)
    return _Heard(logits_BChw, routing, report.delta_BK, beta_BK, rho_B, distortion(received), report.psi_BKd)


def _nothing(routing: Routing, query_dist_Bd: Tensor) -> _Heard:
    """Nobody transmits: nothing to add, nothing distorted."""
    batch = len(query_dist_Bd)
    nobody_BK = query_dist_Bd.new_zeros(batch, 0)
    zeros_B = query_dist_Bd.new_zeros(batch)
    return _Heard(zeros_B[:, None, None, None], routing, nobody_BK, nobody_BK, zeros_B + 1, zeros_B, None)


def _priority(  # noqa: PLR0917
    query_dist_Bd: Tensor,
    stat_BNd: Tensor,
    ids_B: Sequence[int],
    seed: int,
    config: RoutingConfig,
    rule: RoutingRule | None,
) -> Tensor | None:
    """What clients are sorted by, if not by their scores."""
    if rule is not None:
        priority_BN = rule(query_dist_Bd, stat_BNd)
        if priority_BN.shape != stat_BNd.shape[:2]:
            found, wanted = tuple(priority_BN.shape), tuple(stat_BNd.shape[:2])
            raise UserError(f"the routing rule gave {found}; expected a number per input and client, {wanted}")
        return priority_BN
    return _random_priority(stat_BNd, ids_B, seed) if config.rule == "random" else None


def _random_priority(stat_BNd: Tensor, ids_B: Sequence[int], seed: int) -> Tensor:
    """The control: an order of clients that has nothing to do with their statistics."""
    draws = complex_normal_BN(ids_B, stat_BNd.shape[1], seed=seed, purpose="random-routing")
    return torch.from_numpy(draws.real).to(stat_BNd)


class AirMoE(nn.Module):
    """The trainable whole in one process: the cloud's query and all clients. The frozen backbone stands before it."""

    def __init__(
        self,
        config: Config,
        *,
        feature_dim: int,
        classes: int,
        dilations: tuple[int, int, int],
        fine_dims: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.rule: RoutingRule | None = None  # one of one's own, in the place of the configured one
        shape: dict[str, Any] = {"feature_dim": feature_dim, "classes": classes, "dilations": dilations}
        self.query, self.shared, self.refiner, self.gate = cloud_parts(config, **shape, fine_dims=fine_dims)
        self.clients = LocalClients(config, **shape)

    @property
    def cloud(self) -> CloudParts:
        """What the cloud trains."""
        return CloudParts(self.query, self.shared, self.refiner, self.gate)

    def forward(
        self,
        features_BDhw: Tensor,
        ids_B: Sequence[int],
        *,
        fine: Sequence[Tensor] = (),
        routing_config: RoutingConfig | None = None,
        channel: ChannelConfig | None = None,
        participants: Participants = EVERYBODY,
        domains_B: Tensor | None = None,
    ) -> AirMoEOutput[LocalRound]:
        """Query, Eq. (8), then `collaborate`; `routing_config` and `channel` take the place of the configured ones.

        `fine` are the finer maps for the refiner, where there is one.
        """
        return collaborate(
            self.query(features_BDhw),
            features_BDhw,
            ids_B,
            self.clients,
            routing_config=routing_config or self.config.routing,
            channel=channel or self.config.channel,
            seed=self.config.seed,
            shared=self.shared,
            refine=self.cloud.refine(fine, apart=self.config.train.objective == "each"),
            participants=participants,
            rule=self.rule,
            gate=self.gate,
            domains_B=domains_B,
        )

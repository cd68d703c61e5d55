"""AirMoE in one process: the paper's algorithm box, `collaborate`, and the seam to the clients below it.

Everything above the seam (`Clients`, `Round`) is the same code wherever the clients live.
Suffixes: B inputs, N clients, K routed, M prototypes, d statistic, D features, C classes, h w grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from airmoe_ray.aggregation import fusion_weights, receive
from airmoe_ray.channel import Received
from airmoe_ray.clients import LocalClients, LocalRound, Reading, Report
from airmoe_ray.config import ChannelConfig, Config, RoutingConfig
from airmoe_ray.experts import shared_head
from airmoe_ray.power import receive_scale
from airmoe_ray.query import Query
from airmoe_ray.rng import complex_normal_BN, torch_generator
from airmoe_ray.routing import Routing, keep_strongest, route, truncate


class Round(Protocol):
    """One batch, from the clients' side: one method per exchange. What a client knows stays with the client."""

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """All N: statistic P_j, Eq. (3)-(4), (7), and the bit "in deep fade"."""
        ...

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2 of routed clients; asked only where all of them faded."""
        ...

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Routed clients run their experts; they report delta_j and c_j, Eq. (11)-(14), (17)."""
        ...

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """Clients with a weight transmit at once, Eq. (16)-(17)."""
        ...

    def renew(self) -> None:
        """Activated clients renew their FRL with the attention of this round's read, Eq. (5)-(6)."""
        ...


R_co = TypeVar("R_co", bound=Round, covariant=True)


class Clients(Protocol[R_co]):
    """The clients, wherever they live."""

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> R_co:
        """Start a round: every input has an id, from which its fading and noise follow."""
        ...


@dataclass(frozen=True)
class AirMoEOutput(Generic[R_co]):
    """The fused logits and the account of how they came about."""

    logits_BChw: Tensor  # y^_ota, plus the cloud's own where it has a head
    query_dist_Bd: Tensor
    routing: Routing
    delta_BK: Tensor  # D_JS(Q || R_j); meaningful where active
    beta_BK: Tensor  # fusion weights, 0 where silent
    rho_B: Tensor
    nmse_B: Tensor
    round: R_co
    shared_BChw: Tensor | None = None  # the cloud's own logits


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
) -> AirMoEOutput[R_co]:
    """Algorithm 1 for one mini-batch, from the broadcast of (Q, F) to the fused logits.

    With a `shared` head the cloud adds its own logits to what the air delivers.
    """
    round_ = clients.begin(ids_B, channel)

    reading = round_.read(query_dist_Bd)  # Eq. (3)-(4), (7)
    routing = route(  # Eq. (8)-(10)
        query_dist_Bd,
        reading.stat_BNd,
        config=routing_config,
        priority_BN=_random_priority(reading.stat_BNd, ids_B, seed) if routing_config.rule == "random" else None,
        present_N=reading.present_N,
    )
    silent_BN = reading.faded_BN if reading.present_N is None else reading.faded_BN | ~reading.present_N
    routing = truncate(routing, silent_BN, channel.truncation)
    if routing.all_faded_B.any():
        routing = keep_strongest(routing, round_.gains(routing.selected_BK))

    delta_BK, capacity_BK, routing = round_.forward(features_BDhw, query_dist_Bd, routing)  # Eq. (11)-(14)
    while True:
        beta_BK = fusion_weights(delta_BK, routing.active_BK, routing_config)  # Eq. (15)
        rho_B = receive_scale(capacity_BK, beta_BK, routing.active_BK)  # Eq. (17)
        if not channel.rho_grad:
            rho_B = rho_B.detach()
        received = round_.transmit(beta_BK, rho_B)  # Eq. (16)
        if received.lost_BK is None:
            break
        # weights must sum to 1 over those who are heard: the survivors renormalise and transmit again
        routing = replace(routing, active_BK=routing.active_BK & ~received.lost_BK)
    logits_BChw = receive(received.signal_BChw, rho_B) if channel.kind == "air" else received.signal_BChw  # Eq. (18)
    nmse_B = received.error_energy_B / received.clean_energy_B.clamp_min(torch.finfo(logits_BChw.dtype).tiny)
    shared_BChw = None
    if shared is not None:
        shared_BChw = shared(features_BDhw)
        logits_BChw = logits_BChw + shared_BChw
    return AirMoEOutput(logits_BChw, query_dist_Bd, routing, delta_BK, beta_BK, rho_B, nmse_B, round_, shared_BChw)


def _random_priority(stat_BNd: Tensor, ids_B: Sequence[int], seed: int) -> Tensor:
    """The control: an order of clients that has nothing to do with their statistics."""
    draws = complex_normal_BN(ids_B, stat_BNd.shape[1], seed=seed, purpose="random-routing")
    return torch.from_numpy(draws.real).to(stat_BNd)


class AirMoE(nn.Module):
    """The trainable whole in one process: the cloud's query and all clients. The frozen backbone stands before it."""

    def __init__(self, config: Config, *, feature_dim: int, classes: int, dilations: tuple[int, int, int]) -> None:
        super().__init__()
        self.config = config
        self.query = Query(
            feature_dim,
            config.frl.dim,
            temperature=config.routing.norm_temperature,
            generator=torch_generator(config.seed, "init/query"),
        )
        self.shared = shared_head(config, feature_dim=feature_dim, classes=classes, dilations=dilations)
        self.clients = LocalClients(config, feature_dim=feature_dim, classes=classes, dilations=dilations)

    def forward(
        self,
        features_BDhw: Tensor,
        ids_B: Sequence[int],
        *,
        routing_config: RoutingConfig | None = None,
        channel: ChannelConfig | None = None,
    ) -> AirMoEOutput[LocalRound]:
        """Query, Eq. (2), then `collaborate`; `routing_config` and `channel` take the place of the configured ones."""
        return collaborate(
            self.query(features_BDhw),
            features_BDhw,
            ids_B,
            self.clients,
            routing_config=routing_config or self.config.routing,
            channel=channel or self.config.channel,
            seed=self.config.seed,
            shared=self.shared,
        )

"""The clients in this process: the reference implementation of the seam in `moe.py`.

Suffixes: B inputs, N clients, K routed, M prototypes, d statistic, C classes, h w grid; P routed pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from airmoe_ray.channel import Received, draw_gamma, draw_noise, in_deep_fade, superpose, weighted_sum
from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.experts import Expert, ExpertOutput
from airmoe_ray.frl import FeatureRetrievalLibrary
from airmoe_ray.power import capacity, transmit_coefficient
from airmoe_ray.rng import torch_generator
from airmoe_ray.routing import Routing
from airmoe_ray.statistics import js_divergence, norm
from airmoe_ray.world import Alone, World


class Reading(NamedTuple):
    """What all clients answer to a query."""

    stat_BNd: Tensor  # P_j, Eq. (7)
    faded_BN: Tensor  # the bit "in deep fade"
    present_N: Tensor | None = None  # who answered; None: everybody


class Report(NamedTuple):
    """What the routed clients report after running their experts."""

    delta_BK: Tensor  # D_JS(Q || R_j), Eq. (14)
    capacity_BK: Tensor  # c_j, Eq. (17)
    routing: Routing  # as carried out: a client lost on the way has made room for another


class LocalClients(nn.Module):
    """Experts and FRLs of all N clients, or of the given ones (a host that holds only some)."""

    def __init__(
        self,
        config: Config,
        *,
        feature_dim: int,
        classes: int,
        dilations: tuple[int, int, int],
        clients: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        members = range(config.experts.count) if clients is None else clients
        self.experts = nn.ModuleList(
            Expert(
                config.experts,
                feature_dim=feature_dim,
                classes=classes,
                dim=config.frl.dim,
                bound=config.frl.bound,
                dilations=dilations,
                generator=torch_generator(config.seed, f"init/expert/{j}"),
            )
            for j in members
        )
        counts = config.frl.counts(max(members) + 1)
        self.frl = FeatureRetrievalLibrary(
            config.frl, [counts[j] for j in members], generator=torch_generator(config.seed, "init/frl")
        )

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> "LocalRound":
        """Start a round; every draw of the channel follows from the ids."""
        return LocalRound(self, ids_B, channel)

    def run(self, features_BDhw: Tensor, owner_P: Tensor, sample_P: Tensor) -> ExpertOutput:
        """Each expert once, on the samples routed to it and no others, Eq. (11)-(13); pairs are grouped by owner."""
        logits, psis, start = [], [], 0
        for j, count in enumerate(torch.bincount(owner_P, minlength=len(self.experts)).tolist()):
            if count:
                output = self.experts[j](features_BDhw[sample_P[start : start + count]])
                logits.append(output.logits_BChw)
                psis.append(output.psi_Bd)
                start += count
        if not logits:  # nobody was routed: a worker whose part of the batch is empty
            with torch.no_grad():  # a gradient of zero is not none: the expert would count as used, and move
                nothing: ExpertOutput = self.experts[0](features_BDhw[:0])
            return nothing
        return ExpertOutput(torch.cat(logits), torch.cat(psis))


class LocalRound:
    """One batch; keeps what clients would keep between exchanges: gamma, attention, outputs, psi."""

    def __init__(self, clients: LocalClients, ids_B: Sequence[int], channel: ChannelConfig) -> None:
        self.clients, self.ids_B, self.channel = clients, ids_B, channel
        self.temperature = clients.config.routing.norm_temperature
        self.gamma_BN = draw_gamma(ids_B, len(clients.experts), config=channel, seed=clients.config.seed)
        self.faded_BN = in_deep_fade(self.gamma_BN, channel)  # before any rounding: the same bit on every device

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """P_j = Norm(p~_j), Eq. (7), of every client, and who is in deep fade."""
        read = self.clients.frl.read(query_dist_Bd)
        self.alpha_BNM = read.alpha_BNM
        self.gamma_BN = self.gamma_BN.to(device=query_dist_Bd.device, dtype=query_dist_Bd.dtype.to_complex())
        return Reading(norm(read.value_BNd, self.temperature), self.faded_BN.to(query_dist_Bd.device))

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2 of the given clients."""
        return self.gamma_BN.abs().square().gather(1, selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Each expert runs once, on the samples routed to it and no others, Eq. (11)-(14)."""
        self.transmit_BK, self.active_BK = routing.transmit_BK, routing.active_BK
        batch, k = self.transmit_BK.shape
        place_P = self.active_BK.flatten().nonzero()[:, 0]
        owner_P = self.transmit_BK.flatten()[place_P]
        grouped_P = torch.sort(owner_P, stable=True).indices  # by expert, in sample order within
        place_P, owner_P = place_P[grouped_P], owner_P[grouped_P]
        output = self.clients.run(features_BDhw, owner_P, place_P // k)
        self.logits_BKChw = _scatter(output.logits_BChw, place_P, batch, k)
        self.psi_BKd = _scatter(output.psi_Bd, place_P, batch, k)
        delta_BK = js_divergence(query_dist_Bd[:, None], norm(self.psi_BKd, self.temperature))  # Eq. (13)-(14)
        energy_BK = self.logits_BKChw.square().sum(dim=(2, 3, 4))
        energy_budget = self.channel.power * self.logits_BKChw.shape[2:].numel()  # P0
        return Report(delta_BK, capacity(energy_BK, self.gains(self.transmit_BK), energy_budget), routing)

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """x_j = b_j y_j, all at once, Eq. (16)-(17); or the exact or quantised sum."""
        if self.channel.kind != "air":
            bits = self.channel.digital_bits if self.channel.kind == "digital" else None
            return weighted_sum(self.logits_BKChw, beta_BK, bits=bits)
        gamma_BK = self.gamma_BN.gather(1, self.transmit_BK)
        self.b_BK = transmit_coefficient(beta_BK, rho_B, gamma_BK)
        sent_BKChw = self.b_BK[..., None, None, None] * self.logits_BKChw
        noise_BChw = draw_noise(
            self.ids_B, self.logits_BKChw.shape[2:], config=self.channel, seed=self.clients.config.seed
        )
        return superpose(sent_BKChw, gamma_BK, noise_BChw.to(sent_BKChw))

    def renew(self, world: World | None = None) -> None:
        """Eq. (5)-(6) for the activated, untruncated clients, of all workers in sample order."""
        batch, clients = self.gamma_BN.shape
        shape = (batch, clients, self.psi_BKd.shape[-1])
        index_BKd = self.transmit_BK[..., None].expand_as(self.psi_BKd)
        psi_BNd = self.psi_BKd.new_zeros(shape).scatter(1, index_BKd, self.psi_BKd.detach())
        active_BN = torch.zeros_like(self.gamma_BN, dtype=torch.bool).scatter(1, self.transmit_BK, self.active_BK)
        world = world or Alone()
        alpha_BNM, psi_BNd, active_BN = map(world.concatenated, (self.alpha_BNM, psi_BNd, active_BN))
        self.clients.frl.renew(alpha_BNM, psi_BNd, active_BN)


def _scatter(rows_P: Tensor, places_P: Tensor, batch: int, k: int) -> Tensor:
    """Rows back to their (input, rank) place; zeros where nobody transmitted."""
    empty = rows_P.new_zeros((batch * k, *rows_P.shape[1:]))
    return empty.index_copy(0, places_P, rows_P).view(batch, k, *rows_P.shape[1:])

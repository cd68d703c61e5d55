"""The clients in this process: the reference implementation of the seam in `moe.py`.

Suffixes: B inputs, N clients, K routed, M prototypes, d statistic, C classes, h w grid; P routed pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from airmoe_ray.channel import Received, draw_gamma, draw_noise, in_deep_fade, superpose, weighted_sum
from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.experts import Expert
from airmoe_ray.frl import FeatureRetrievalLibrary
from airmoe_ray.power import capacity, transmit_coefficient
from airmoe_ray.rng import torch_generator
from airmoe_ray.routing import Routing
from airmoe_ray.statistics import js_divergence, norm


class LocalClients(nn.Module):
    """All N experts and their FRLs."""

    def __init__(self, config: Config, *, feature_dim: int, classes: int, dilations: tuple[int, int, int]) -> None:
        super().__init__()
        self.config = config
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
            for j in range(config.experts.count)
        )
        self.frl = FeatureRetrievalLibrary(
            config.frl, config.frl.counts(config.experts.count), generator=torch_generator(config.seed, "init/frl")
        )

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> "LocalRound":
        """Start a round; every draw of the channel follows from the ids."""
        return LocalRound(self, ids_B, channel)


class LocalRound:
    """One batch; keeps what clients would keep between exchanges: gamma, attention, outputs, psi."""

    def __init__(self, clients: LocalClients, ids_B: Sequence[int], channel: ChannelConfig) -> None:
        self.clients, self.ids_B, self.channel = clients, ids_B, channel
        self.temperature = clients.config.routing.norm_temperature
        self.gamma_BN = draw_gamma(ids_B, len(clients.experts), config=channel, seed=clients.config.seed)
        self.faded_BN = in_deep_fade(self.gamma_BN, channel)  # before any rounding: the same bit on every device

    def read(self, query_dist_Bd: Tensor) -> tuple[Tensor, Tensor]:
        """P_j = Norm(p~_j), Eq. (7), of every client, and who is in deep fade."""
        read = self.clients.frl.read(query_dist_Bd)
        self.alpha_BNM = read.alpha_BNM
        self.gamma_BN = self.gamma_BN.to(device=query_dist_Bd.device, dtype=query_dist_Bd.dtype.to_complex())
        return norm(read.value_BNd, self.temperature), self.faded_BN.to(query_dist_Bd.device)

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2 of the given clients."""
        return self.gamma_BN.abs().square().gather(1, selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Each expert runs once, on the samples routed to it and no others, Eq. (11)-(14)."""
        self.transmit_BK, self.active_BK = routing.transmit_BK, routing.active_BK
        batch, k = self.transmit_BK.shape
        silent = len(self.clients.experts)
        owner_P = self.transmit_BK.masked_fill(~self.active_BK, silent).flatten()
        order_P = torch.sort(owner_P, stable=True).indices  # pairs grouped by expert, in sample order within
        logits, psis, start = [], [], 0
        for j, count in enumerate(torch.bincount(owner_P, minlength=silent + 1)[:silent].tolist()):
            if count:
                samples = order_P[start : start + count] // k
                output = self.clients.experts[j](features_BDhw[samples])
                logits.append(output.logits_BChw)
                psis.append(output.psi_Bd)
                start += count
        self.logits_BKChw = _scatter(torch.cat(logits), order_P[:start], batch, k)
        self.psi_BKd = _scatter(torch.cat(psis), order_P[:start], batch, k)
        delta_BK = js_divergence(query_dist_Bd[:, None], norm(self.psi_BKd, self.temperature))  # Eq. (13)-(14)
        energy_BK = self.logits_BKChw.square().sum(dim=(2, 3, 4))
        energy_budget = self.channel.power * self.logits_BKChw[0, 0].numel()  # P0
        return delta_BK, capacity(energy_BK, self.gains(self.transmit_BK), energy_budget)

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

    def renew(self) -> None:
        """Eq. (5)-(6) for the activated, untruncated clients."""
        batch, clients = self.gamma_BN.shape
        shape = (batch, clients, self.psi_BKd.shape[-1])
        index_BKd = self.transmit_BK[..., None].expand_as(self.psi_BKd)
        psi_BNd = self.psi_BKd.new_zeros(shape).scatter(1, index_BKd, self.psi_BKd.detach())
        active_BN = torch.zeros_like(self.gamma_BN, dtype=torch.bool).scatter(1, self.transmit_BK, self.active_BK)
        self.clients.frl.renew(self.alpha_BNM, psi_BNd, active_BN)


def _scatter(rows_P: Tensor, places_P: Tensor, batch: int, k: int) -> Tensor:
    """Rows back to their (input, rank) place; zeros where nobody transmitted."""
    empty = rows_P.new_zeros((batch * k, *rows_P.shape[1:]))
    return empty.index_copy(0, places_P, rows_P).view(batch, k, *rows_P.shape[1:])

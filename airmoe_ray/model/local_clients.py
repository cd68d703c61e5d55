"""The clients of one process: the reference implementation of `seam.py`.

Suffixes: B inputs, N clients, K routed, M prototypes, d statistic, C classes, h w grid; P routed pairs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.model.client import answer_query, precode, report
from airmoe_ray.model.experts import Expert, ExpertOutput
from airmoe_ray.model.frl import FeatureRetrievalLibrary
from airmoe_ray.model.routing import Routing
from airmoe_ray.model.seam import Reading, Report
from airmoe_ray.radio.channel import Received, deliver, draw_gamma, in_deep_fade
from airmoe_ray.runtime.rng import torch_generator
from airmoe_ray.runtime.workers import OneWorker, Workers


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
        return LocalRound(self, self.run, ids_B, channel)

    def run(self, features_BDhw: Tensor, owner_P: Tensor, sample_P: Tensor) -> ExpertOutput:
        """Each expert once, on the samples routed to it and no others, Eq. (17)-(19); pairs are grouped by owner."""
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


# runs experts on (features, owners, samples); `LocalClients.run`, or one that remembers
RunExperts = Callable[[Tensor, Tensor, Tensor], ExpertOutput]


class OnAir(NamedTuple):
    """What the routed clients put on the air, for the checks of constraints (6d)-(6e)."""

    logits_BKChw: Tensor  # y_j
    gamma_BK: Tensor
    sent_BKChw: Tensor  # x_j = b_j y_j


class LocalRound:
    """One batch; keeps what clients would keep between exchanges: gamma, attention, outputs, psi."""

    routing: Routing
    on_air: OnAir

    def __init__(self, clients: LocalClients, run: RunExperts, ids_B: Sequence[int], channel: ChannelConfig) -> None:
        self.ids_B, self.channel = ids_B, channel
        self._frl, self._run, self._seed = clients.frl, run, clients.config.seed
        self._temperature = clients.config.routing.norm_temperature
        self.gamma_BN = draw_gamma(ids_B, len(clients.experts), config=channel, seed=self._seed)
        self.faded_BN = in_deep_fade(self.gamma_BN, channel)  # before any rounding: the same bit on every device

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """P_j of every client, Eq. (13), and who is in deep fade."""
        stat_BNd, self._alpha_BNM = answer_query(self._frl, query_dist_Bd, temperature=self._temperature)
        self.gamma_BN = self.gamma_BN.to(device=query_dist_Bd.device, dtype=query_dist_Bd.dtype.to_complex())
        return Reading(stat_BNd, self.faded_BN.to(query_dist_Bd.device), alpha_BNM=self._alpha_BNM)

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2 of the given clients."""
        return self.gamma_BN.abs().square().gather(1, selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Each expert runs once, on the samples routed to it and no others; delta_j and c_j of each pair."""
        self.routing = routing
        batch, k = routing.transmit_BK.shape
        place_P = routing.active_BK.flatten().nonzero()[:, 0]
        owner_P = routing.transmit_BK.flatten()[place_P]
        grouped_P = torch.sort(owner_P, stable=True).indices  # by expert, in sample order within
        place_P, owner_P = place_P[grouped_P], owner_P[grouped_P]
        output = self._run(features_BDhw, owner_P, place_P // k)
        self._logits_BKChw, self._psi_BKd = (_scatter(rows_P, place_P, batch, k) for rows_P in output)
        found = report(
            ExpertOutput(self._logits_BKChw, self._psi_BKd),
            query_dist_Bd[:, None],
            self.gains(routing.transmit_BK),
            channel=self.channel,
            temperature=self._temperature,
        )
        return Report(found.delta, found.scale_limit, routing, psi_BKd=self._psi_BKd)

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """All routed clients at once, through the channel."""
        gamma_BK = self.gamma_BN.gather(1, self.routing.transmit_BK)
        sent_BKChw = precode(self._logits_BKChw, beta_BK, rho_B[:, None], gamma_BK, channel=self.channel)
        self.on_air = OnAir(self._logits_BKChw, gamma_BK, sent_BKChw)
        return deliver(sent_BKChw, gamma_BK, beta_BK, ids_B=self.ids_B, config=self.channel, seed=self._seed)

    def renew(self, workers: Workers | None = None) -> None:
        """Renew the FRLs of the activated, untruncated clients of all workers, in sample order."""
        batch, clients = self.gamma_BN.shape
        shape = (batch, clients, self._psi_BKd.shape[-1])
        transmit_BK, active_BK = self.routing.transmit_BK, self.routing.active_BK
        index_BKd = transmit_BK[..., None].expand_as(self._psi_BKd)
        psi_BNd = self._psi_BKd.new_zeros(shape).scatter(1, index_BKd, self._psi_BKd.detach())
        active_BN = torch.zeros_like(self.gamma_BN, dtype=torch.bool).scatter(1, transmit_BK, active_BK)
        workers = workers or OneWorker()
        alpha_BNM, psi_BNd, active_BN = map(workers.concatenated, (self._alpha_BNM, psi_BNd, active_BN))
        self._frl.renew(alpha_BNM, psi_BNd, active_BN)


def _scatter(rows_P: Tensor, places_P: Tensor, batch: int, k: int) -> Tensor:
    """Rows back to their (input, rank) place; zeros where nobody transmitted."""
    empty = rows_P.new_zeros((batch * k, *rows_P.shape[1:]))
    return empty.index_copy(0, places_P, rows_P).view(batch, k, *rows_P.shape[1:])

"""Rounds that go both ways: the exchanges of `ray_round.py`, and the two of the way back.

Suffixes: B inputs, N clients, K routed, d statistic, C classes, h w grid; P routed pairs.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from actors.rounds.backward_messages import Descend, Learn, Learned, Weigh
from actors.rounds.calls import Ref
from actors.rounds.fault_policy import Exchange
from actors.rounds.pairs import NO_PAIRS, Pairs, pairs_by_host
from actors.rounds.ray_clients import RayClients
from actors.rounds.ray_round import RayRound
from actors.rounds.replies import Overdue
from actors.rounds.roster import Roster, RoundSpec
from actors.rounds.stubs import LearningHostCalls
from airmoe_ray.config import ChannelConfig
from airmoe_ray.model.routing import Routing
from airmoe_ray.model.seam import Reading, Report
from airmoe_ray.radio.channel import Received
from airmoe_ray.radio.ledger import Traffic
from airmoe_ray.training.split_backward import ReportGradients, fill_unknown


class FederatedClients(RayClients):
    """Starts rounds whose clients learn; everything that crosses is counted in `traffic`."""

    def __init__(self, roster: Roster, *, classes: int, overdue: Overdue, traffic: Traffic) -> None:
        super().__init__(roster, classes=classes, overdue=overdue)
        self.traffic = traffic

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> "FederatedRound":
        """Start a round."""
        return FederatedRound(self.next_round(ids_B, channel), self.traffic)


class FederatedRound(RayRound):
    """One batch there and back. What clients report is a leaf for the cloud's own chain rule."""

    stat_BNd: Tensor
    scale_limit_BK: Tensor
    beta_BK: Tensor

    def __init__(self, spec: RoundSpec, traffic: Traffic) -> None:
        super().__init__(spec)
        self.traffic = traffic  # where everything that crosses is counted

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """Read, with statistics that are leaves of the cloud's graph."""
        reading = super().read(query_dist_Bd.detach())
        self.stat_BNd = reading.stat_BNd.requires_grad_()
        heard = len(self.ids_B) * int(self.present_N.sum())
        self.traffic.down("query", reals=query_dist_Bd.numel())
        self.traffic.up("statistics", reals=heard * query_dist_Bd.shape[1], bits=heard)  # the bit: in deep fade
        return reading

    def gains(self, selected_BK: Tensor) -> Tensor:
        """Gains of the selected clients, counted."""
        asked = len(selected_BK.unique())
        self.traffic.down("whose gain is wanted", bits=self.roster.total)
        self.traffic.up("gains", reals=asked * len(self.ids_B))
        return super().gains(selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Forward, counted; c_j is kept for the way back."""
        report = super().forward(features_BDhw, query_dist_Bd.detach(), routing)
        self.scale_limit_BK = report.scale_limit_BK
        pairs = int(report.routing.active_BK.sum())
        self.traffic.down("features", reals=features_BDhw.numel())
        self.traffic.down("who is routed", bits=len(self.ids_B) * self.roster.total)
        self.traffic.up("reports", reals=2 * pairs)
        return report

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """Transmit, counted; beta_j is kept for the way back."""
        self.beta_BK = beta_BK.detach()
        received = super().transmit(self.beta_BK, rho_B.detach())
        self.traffic.down("weights", reals=int((beta_BK > 0).sum()) + len(rho_B))
        self.traffic.channel_uses += len(self.ids_B) * int(np.prod(self.output_shape))
        return received

    # the way back

    def weigh(self, g_BChw: Tensor) -> Tensor:
        """First exchange: g to the routed, a_j = <g, y_j> from them; see `fill_unknown` for one that is lost."""
        pairs, g = self._heard_pairs(), Ref.put(g_BChw.cpu().numpy())
        replies = self.replies.gather(
            {
                key: self._learner(key).weigh(Weigh(self.id, its.sample_P, its.client_P), g)
                for key, its in pairs.items()
            },
            Exchange.LEARN,
        )
        agreement_BK, known_BK = torch.zeros_like(self.beta_BK), torch.zeros_like(self.beta_BK, dtype=torch.bool)
        for key, agreement_P in replies.items():
            agreement_BK[pairs[key].places] = torch.from_numpy(agreement_P).to(agreement_BK)
            known_BK[pairs[key].places] = True
        self.traffic.down("loss gradient", reals=g_BChw.numel())
        self.traffic.up("agreement", reals=int(known_BK.sum()))
        return fill_unknown(agreement_BK, known_BK, self.beta_BK)

    def learn(
        self,
        stat_grad_BNd: Tensor,
        report: ReportGradients,
        *,
        align_share: float,
        learning_rate: float | None,
        own_work: Callable[[], object],
    ) -> dict[str, Learned]:
        """Second exchange, with every client that answered the read: derivatives down, parts of dL/dQ up.

        The cloud does its `own_work` while they learn. Without a learning rate nobody steps yet: `descend` follows.
        """
        pairs, stat_grad = self._heard_pairs(), stat_grad_BNd.cpu().numpy()
        beta, delta_grad, scale_limit_grad = (x.cpu().numpy() for x in (self.beta_BK, *report))
        calls = {}
        for key, host in self.hosts.items():
            if key in self.faults:
                continue
            its = pairs.get(key, NO_PAIRS)
            message = Learn(
                round_id=self.id,
                stat_grad_Bnd=np.ascontiguousarray(stat_grad[:, list(host.clients)]),
                sample_P=its.sample_P,
                client_P=its.client_P,
                beta_P=beta[its.places],
                delta_grad_P=delta_grad[its.places],
                scale_limit_grad_P=scale_limit_grad[its.places],
                align_share=align_share,
                learning_rate=learning_rate,
            )
            calls[key] = self._learner(key).learn(message)
            per_client = len(self.ids_B) * stat_grad.shape[-1]
            self.traffic.down("statistic gradients", reals=per_client * len(host.clients))
            self.traffic.down("report gradients", reals=len(its) * (2 if self.channel.rho_grad else 1))
        own_work()
        learned = self.replies.gather(calls, Exchange.LEARN)
        # several clients in one actor would each send their own part
        answered = sum(len(self.hosts[key].clients) for key in learned)
        self.traffic.up("query gradients", reals=answered * len(self.ids_B) * stat_grad.shape[-1])
        return learned

    def descend(self, keys: Iterable[str], *, learning_rate: float, scale: float) -> None:
        """The step, where gradients had to be scaled together first."""
        pairs = self._heard_pairs()
        calls = {}
        for key in keys:
            its = pairs.get(key, NO_PAIRS)
            message = Descend(self.id, its.sample_P, its.client_P, learning_rate, scale)
            calls[key] = self._learner(key).descend(message)
        self.replies.gather(calls, Exchange.LEARN)
        self.traffic.up("norms", reals=len(calls))
        self.traffic.down("norms", reals=1)

    def _heard_pairs(self) -> dict[str, Pairs]:
        pairs = pairs_by_host(self.routing.transmit_BK, self.routing.active_BK, self.serving)
        return {key: its for key, its in pairs.items() if key not in self.faults}

    def _learner(self, key: str) -> LearningHostCalls:
        calls = self.hosts[key].calls
        assert isinstance(calls, LearningHostCalls), "only hosts that learn take part in training"
        return calls

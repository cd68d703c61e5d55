"""Rounds that go both ways: the exchanges of `actors.clients`, and the two of the way back.

Suffixes: B inputs, N clients, K routed, d statistic, C classes, h w grid; P (input, rank, client) pairs.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.clients import RayClients
from actors.learner import Homework, Learned
from actors.policy import Fault
from actors.roster import Roster
from actors.round import RayRound
from actors.wire import Beside, pack
from airmoe_ray.channel import Received
from airmoe_ray.clients import Reading, Report
from airmoe_ray.config import ChannelConfig
from airmoe_ray.federated import ReportGradients
from airmoe_ray.ledger import Traffic
from airmoe_ray.routing import Routing

_NO_PAIRS = np.zeros((0, 3), dtype=np.int64)


class FederatedClients(RayClients):
    """Starts rounds whose clients learn; everything that crosses is counted in `traffic`."""

    def __init__(self, roster: Roster, *, classes: int, call_s: float, traffic: Traffic) -> None:
        super().__init__(roster, classes=classes, call_s=call_s)
        self.traffic = traffic

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> "FederatedRound":
        """Start a round."""
        round_ = self._begin(FederatedRound, ids_B, channel)
        round_.traffic = self.traffic
        return round_


class AnsweringClients(RayClients):
    """Starts rounds that only answer, and remembers who failed in them."""

    def __init__(self, roster: Roster, *, classes: int, call_s: float) -> None:
        super().__init__(roster, classes=classes, call_s=call_s)
        self.rounds: list[RayRound] = []

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> RayRound:
        """Start a round."""
        self.rounds.append(super().begin(ids_B, channel))
        return self.rounds[-1]

    @property
    def faults(self) -> dict[str, Fault]:
        """Of all rounds so far."""
        return {key: fault for round_ in self.rounds for key, fault in round_.faults.items()}


class FederatedRound(RayRound):
    """One batch there and back. What clients report is a leaf for the cloud's own chain rule."""

    traffic: Traffic  # where everything that crosses is counted
    stat_BNd: Tensor
    capacity_BK: Tensor
    beta_BK: Tensor

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """As ever; the statistics are leaves."""
        reading = super().read(query_dist_Bd.detach())
        self.stat_BNd = reading.stat_BNd.requires_grad_()
        heard = len(self.ids_B) * int(self.present_N.sum())
        self.traffic.down("query", reals=query_dist_Bd.numel())
        self.traffic.up("statistics", reals=heard * query_dist_Bd.shape[1], bits=heard)  # the bit: in deep fade
        return reading

    def gains(self, selected_BK: Tensor) -> Tensor:
        """As ever."""
        asked = len(selected_BK.unique())
        self.traffic.down("whose gain is wanted", bits=self.roster.total)
        self.traffic.up("gains", reals=asked * len(self.ids_B))
        return super().gains(selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """As ever."""
        report = super().forward(features_BDhw, query_dist_Bd.detach(), routing)
        self.capacity_BK = report.capacity_BK
        pairs = int(report.routing.active_BK.sum())
        self.traffic.down("features", reals=features_BDhw.numel())
        self.traffic.down("who is routed", bits=len(self.ids_B) * self.roster.total)
        self.traffic.up("reports", reals=2 * pairs)
        return report

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """As ever."""
        self.beta_BK = beta_BK.detach()
        received = super().transmit(self.beta_BK, rho_B.detach())
        self.traffic.down("weights", reals=int((beta_BK > 0).sum()) + len(rho_B))
        self.traffic.channel_uses += len(self.ids_B) * int(np.prod(self._output_shape))
        return received

    # the way back

    def weigh(self, g_BChw: Tensor) -> Tensor:
        """First exchange: g to the routed, a_j = <g, y_j> from them; one that is lost counts as of the rest's mind."""
        pairs, g = self._heard_pairs(), ray.put(g_BChw.cpu().numpy())
        calls = {key: pack("weigh", self.name, Beside(0), pair_P[:, 0], pair_P[:, 2]) for key, pair_P in pairs.items()}
        replies = self.replies.gather({key: self.asked[key].handle.exchange.remote(calls[key], g) for key in pairs})
        agreement_BK, known_BK = torch.zeros_like(self.beta_BK), torch.zeros_like(self.beta_BK)
        for key, agreement_P in replies.items():
            rows, ranks, _ = pairs[key].T
            agreement_BK[rows, ranks] = torch.from_numpy(agreement_P).to(agreement_BK)
            known_BK[rows, ranks] = 1.0
        self.traffic.down("loss gradient", reals=g_BChw.numel())
        self.traffic.up("agreement", reals=int(known_BK.sum()))
        share_B1 = (self.beta_BK * known_BK).sum(dim=-1, keepdim=True)
        mean_B1 = (self.beta_BK * agreement_BK).sum(dim=-1, keepdim=True) / share_B1.clamp_min(1e-30)
        return torch.where(known_BK > 0, agreement_BK, mean_B1)

    def learn(
        self,
        stat_grad_BNd: Tensor,
        report: ReportGradients,
        *,
        align_share: float,
        learning_rate: float | None,
        aside: Callable[[], object],
    ) -> dict[str, Learned]:
        """Second exchange, with every client that answered the read: derivatives down, parts of dL/dQ up.

        `aside` is what the cloud does meanwhile. Without a learning rate nobody steps yet: `descend` follows.
        """
        pairs, stat_grad = self._heard_pairs(), stat_grad_BNd.cpu().numpy()
        beta, delta_grad, capacity_grad = (x.cpu().numpy() for x in (self.beta_BK, *report))
        calls = {}
        for instance in self.asked.values():
            if instance.key in self.faults:
                continue
            rows, ranks, clients = pairs.get(instance.key, _NO_PAIRS).T
            work = Homework(
                np.ascontiguousarray(stat_grad[:, list(instance.clients)]),
                rows,
                clients,
                beta[rows, ranks],
                delta_grad[rows, ranks],
                capacity_grad[rows, ranks],
                align_share,
            )
            calls[instance.key] = instance.handle.exchange.remote(pack("learn", self.name, work, learning_rate))
            per_client = len(self.ids_B) * stat_grad.shape[-1]
            self.traffic.down("statistic gradients", reals=per_client * len(instance.clients))
            self.traffic.down("report gradients", reals=len(rows) * (2 if self.channel.rho_grad else 1))
        aside()
        learned: dict[str, Learned] = self.replies.gather(calls)
        # several clients in one actor would each send their own part
        answered = sum(len(self.asked[key].clients) for key in learned)
        self.traffic.up("query gradients", reals=answered * len(self.ids_B) * stat_grad.shape[-1])
        return learned

    def descend(self, keys: Iterable[str], *, learning_rate: float, scale: float) -> None:
        """The step, where gradients had to be scaled together first."""
        pairs = self._heard_pairs()
        calls = {}
        for key in keys:
            rows, _, clients = pairs.get(key, _NO_PAIRS).T
            packed = pack("descend", self.name, rows, clients, learning_rate, scale)
            calls[key] = self.asked[key].handle.exchange.remote(packed)
        self.replies.gather(calls)
        self.traffic.up("norms", reals=len(calls))
        self.traffic.down("norms", reals=1)

    def _heard_pairs(self) -> dict[str, NDArray[np.int64]]:
        pairs = self._pairs(self.routing.transmit_BK, self.routing.active_BK.cpu())
        return {key: pair_P for key, pair_P in pairs.items() if key not in self.faults}

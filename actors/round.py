"""One round over Ray: the five exchanges of `airmoe_ray.moe`, with clients that live in actors and may fail.

Small statistics come back to the caller (the cloud); features, outputs and gammas travel as object references and go
only where the paper lets them go.
Suffixes: B inputs, N clients, K routed, n clients of one host, d statistic, C classes, h w grid; P (input, rank) pairs.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError
from torch import Tensor

from actors.errors import ChannelLostError, NoExpertsError
from actors.policy import Decision, Exchange, Fault, decide
from actors.replies import Replies
from actors.roster import Roster
from actors.wire import Beside, pack, unseal
from airmoe_ray.channel import Received
from airmoe_ray.clients import Reading, Report
from airmoe_ray.config import ChannelConfig
from airmoe_ray.routing import Routing, replace_lost

Array = NDArray[Any]


class RayRound:
    """One batch; keeps references and who failed, never what belongs to a client."""

    faded_BN: Tensor
    present_N: Tensor
    routing: Routing

    def __init__(
        self,
        roster: Roster,
        replies: Replies,
        *,
        name: str,
        turn: int,
        ids_B: tuple[int, ...],
        channel: ChannelConfig,
        classes: int,
        finished: tuple[str, ...] = (),
    ) -> None:
        self.roster, self.replies, self.name = roster, replies, name
        self.ids_B, self.channel, self.classes = ids_B, channel, classes
        self.finished = finished  # earlier rounds, which hosts may forget
        self.serving = roster.serving(turn)
        self.faults = replies.faults
        self.heard: tuple[str, ...] = ()  # instances whose signal arrived
        self.skipped_B: list[dict[int, Fault]] = [dict(roster.missing) for _ in ids_B]
        self.versions: dict[int, int] = {}
        self.timings_ms: dict[str, float] = {}
        self.sealed_gamma_BK = b""  # of who transmitted; not for the cloud to open
        self.aside: Callable[[], object] = lambda: None  # the cloud's own work, while clients do theirs
        self.asked = {instance.key: instance for instance in self.serving.values()}
        self._gammas = self._sound()

    def _sound(self) -> list[Any]:
        """Pilots go out with the round's beginning: references to every instance's own gammas."""
        if not self.asked:
            raise NoExpertsError("no expert is up")
        hosts = [instance.clients for instance in self.asked.values()]
        call = pack("sound", self.ids_B, self.roster.drawn, hosts, self.channel)
        gammas: Any = self.roster.channel.emit.options(num_returns=len(hosts)).remote(call)
        return list(gammas) if len(hosts) > 1 else [gammas]

    def meanwhile(
        self, head: Callable[[Tensor], Tensor] | None, features_BDhw: Tensor
    ) -> Callable[[Tensor], Tensor] | None:
        """The same head, run while the routed clients run theirs; for `collaborate`, which asks when they are done."""
        if head is None:
            return None
        own_BChw = functools.cache(lambda: head(features_BDhw))
        self.aside = own_BChw
        return lambda _: own_BChw()

    # the exchanges

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """Every client on the roster answers with its statistic; those that do not are absent from this round."""
        started = time.perf_counter()
        query = query_dist_Bd.cpu().numpy()
        call = pack("read", self.name, query, Beside(0), self.channel, self.finished)
        replies = self.replies.gather(
            {
                key: instance.handle.exchange.remote(call, gamma)
                for (key, instance), gamma in zip(self.asked.items(), self._gammas, strict=True)
            }
        )
        batch, d, total = *query.shape, self.roster.total
        stat_BNd = np.full((batch, total, d), 1.0 / d, dtype=query.dtype)
        faded_BN, present_N = np.zeros((batch, total), dtype=bool), np.zeros(total, dtype=bool)
        for key, reply in replies.items():
            instance = self.asked[key]
            if reply.stat_Bnd.shape != (batch, len(instance.clients), d) or not np.isfinite(reply.stat_Bnd).all():
                self.faults[key] = Fault.INVALID
                continue
            spoken = [(n, j) for n, j in enumerate(instance.clients) if self.serving.get(j) is instance]
            columns, clients = map(list, zip(*spoken, strict=True))
            stat_BNd[:, clients], faded_BN[:, clients] = reply.stat_Bnd[:, columns], reply.faded_Bn[:, columns]
            present_N[clients] = True
            self.versions |= {client: reply.versions[column] for column, client in spoken}
        for client, instance in self.serving.items():
            if instance.key in self.faults:
                for skipped in self.skipped_B:
                    skipped[client] = self.faults[instance.key]
        if not present_N.any():
            if set(self.faults.values()) == {Fault.LATE}:  # all at once: it is rather the channel that hangs
                raise ChannelLostError("nobody answered in time")
            raise NoExpertsError("no expert answered", self.faults)
        self.faded_BN, self.present_N = torch.from_numpy(faded_BN), torch.from_numpy(present_N)
        self.timings_ms["read"] = 1e3 * (time.perf_counter() - started)
        present = None if present_N.all() else self.present_N.to(query_dist_Bd.device)
        device = query_dist_Bd.device
        return Reading(torch.from_numpy(stat_BNd).to(device), self.faded_BN.to(device), present)

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2, asked of the selected clients where all of them faded; 0 for one that does not answer."""
        gain_BN = torch.zeros(len(self.ids_B), self.roster.total, dtype=torch.float64)
        wanted = selected_BK.unique().tolist()
        keys = {self.serving[client].key for client in wanted}
        call = pack("gains", self.name)
        replies = self.replies.gather({key: self.asked[key].handle.exchange.remote(call) for key in keys})
        for client in wanted:
            if (instance := self.serving[client]).key in replies:
                gain_Bn = replies[instance.key]
                gain_BN[:, client] = torch.from_numpy(gain_Bn[:, instance.clients.index(client)]).double()
        return gain_BN.to(selected_BK.device).gather(1, selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Routed clients run their experts; one lost before transmission makes room for the next best."""
        started = time.perf_counter()
        device = query_dist_Bd.device
        features, query = ray.put(features_BDhw.cpu().numpy()), query_dist_Bd.cpu().numpy()
        delta_BK = np.zeros(routing.transmit_BK.shape, dtype=query.dtype)
        capacity_BK = np.ones_like(delta_BK)
        failed_N = ~self.present_N
        usable_BN = ~self.faded_BN | routing.all_faded_B.cpu()[:, None]
        wanted_BK = routing.active_BK.cpu()
        while True:
            lost_BK = torch.zeros_like(wanted_BK)
            pairs = self._pairs(routing.transmit_BK, wanted_BK)
            calls = {
                key: self.asked[key].handle.exchange.remote(
                    pack("forward", self.name, Beside(0), query, pair_P[:, 0], pair_P[:, 2]), features
                )
                for key, pair_P in pairs.items()
            }
            self.aside()
            replies = self.replies.gather(calls)
            for key, pair_P in pairs.items():
                rows, ranks, clients = pair_P.T
                if key in replies and self._is_report(replies[key], len(pair_P)):
                    delta_BK[rows, ranks], capacity_BK[rows, ranks] = replies[key]
                else:
                    lost_BK[rows, ranks] = True
                    failed_N[torch.from_numpy(np.unique(clients))] = True
                    self._skip(pair_P, self.faults.setdefault(key, Fault.INVALID))
            if not lost_BK.any():
                break
            usable_BN &= ~failed_N
            allowed_BN = usable_BN & self._may_substitute(routing, lost_BK, usable_BN)[:, None]
            routing = replace_lost(routing, lost_BK.to(device), allowed_BN.to(device))
            self._check_survivors(Exchange.FORWARD, routing.active_BK)
            wanted_BK = lost_BK & routing.active_BK.cpu()
        self.routing, self.features_shape = routing, features_BDhw.shape
        self.timings_ms["expert"] = 1e3 * (time.perf_counter() - started)
        return Report(torch.from_numpy(delta_BK).to(device), torch.from_numpy(capacity_BK).to(device), routing)

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """All at once: clients hand their symbols to the channel, which adds them up."""
        started = time.perf_counter()
        heard_BK = (beta_BK > 0).cpu()
        beta, rho = beta_BK.cpu().numpy(), rho_B.cpu().numpy()
        pairs = self._pairs(self.routing.transmit_BK, heard_BK)
        parts = {
            key: self.asked[key].handle.emit.remote(
                pack(
                    "transmit",
                    self.name,
                    pair_P[:, 0],
                    pair_P[:, 2],
                    beta[pair_P[:, 0], pair_P[:, 1]],
                    rho[pair_P[:, 0]],
                )
            )
            for key, pair_P in pairs.items()
        }
        call = pack(
            "superpose",
            self.ids_B,
            self.roster.drawn,
            self.channel,
            self.routing.transmit_BK.cpu().numpy(),
            beta,
            [pair_P[:, 0] * beta.shape[1] + pair_P[:, 1] for pair_P in pairs.values()],
            self._output_shape,
            *map(Beside, range(len(parts))),
        )
        arrival_ref = self.roster.channel.exchange.remote(call, *parts.values())
        guilty: list[str] = []
        try:
            arrival = unseal(ray.get(arrival_ref, timeout=self.replies.patience_s))
            guilty = [list(pairs)[number] for number in arrival.invalid]
            self.faults |= dict.fromkeys(guilty, Fault.INVALID)
        except RayError as error:  # a part failed, and with it the sum; or the channel itself
            self.replies.check_innocent(error)
            arrived = self.replies.gather(parts, timeout_s=0.05)
            guilty = [key for key in parts if key not in arrived]
            if not guilty:
                raise ChannelLostError("the channel does not answer") from None
        self.timings_ms["channel"] = self.timings_ms.get("channel", 0.0) + 1e3 * (time.perf_counter() - started)
        if not guilty:
            self.heard, self.sealed_gamma_BK = tuple(pairs), arrival.sealed_gamma_BK
            energies = (arrival.error_energy_B, arrival.clean_energy_B)
            return Received(*(torch.from_numpy(x).to(beta_BK.device) for x in (arrival.signal_BChw, *energies)))
        lost_BK = torch.zeros_like(heard_BK)
        for key in guilty:
            lost_BK[pairs[key][:, 0], pairs[key][:, 1]] = True
            self._skip(pairs[key], self.faults[key])
        self._check_survivors(Exchange.TRANSMIT, heard_BK & ~lost_BK)
        lost_BK = lost_BK.to(beta_BK.device)
        self.routing = replace(self.routing, active_BK=self.routing.active_BK & ~lost_BK)  # nor do they renew
        nothing = beta_BK.new_zeros(0)
        return Received(nothing, nothing, nothing, lost_BK)

    def renew(self) -> None:
        """Owners renew the FRLs of the clients that were heard, and have it on disk before this returns."""
        calls: dict[str, Any] = {}
        for key, pair_P in self._pairs(self.routing.transmit_BK, self.routing.active_BK.cpu()).items():
            instance, (rows, _, clients) = self.asked[key], pair_P.T
            if instance.owner:
                calls[key] = instance.handle.renew_round.remote(self.name, rows, clients)
            elif (owner := self.roster.owner_of(int(clients[0]))) is not None:
                records = instance.handle.collect.remote(self.name, rows, clients)
                calls[key] = owner.handle.renew.remote(records)
        self.replies.gather(calls)

    # inside

    @property
    def _output_shape(self) -> tuple[int, ...]:
        return (self.classes, *self.features_shape[2:])

    def _pairs(self, transmit_BK: Tensor, wanted_BK: Tensor) -> dict[str, NDArray[np.int64]]:
        """(input, rank, client) of the wanted places, by the instance that speaks for the client."""
        transmit = transmit_BK.cpu().numpy()
        grouped: dict[str, list[tuple[int, int, int]]] = {}
        for row, rank in zip(*wanted_BK.numpy().nonzero(), strict=True):
            client = int(transmit[row, rank])
            grouped.setdefault(self.serving[client].key, []).append((int(row), int(rank), client))
        return {key: np.asarray(found, dtype=np.int64) for key, found in grouped.items()}

    def _is_report(self, reply: tuple[Array, Array], pairs: int) -> bool:
        return all(part.shape == (pairs,) and np.isfinite(part).all() for part in reply)

    def _may_substitute(self, routing: Routing, lost_BK: Tensor, usable_BN: Tensor) -> Tensor:
        """Per input, whether policy wants the next best client instead of the lost ones."""
        taken_BN = torch.zeros_like(usable_BN).scatter(1, routing.transmit_BK.cpu(), True)
        survivors_B = (routing.active_BK.cpu() & ~lost_BK).sum(dim=1).tolist()
        spares_B = (usable_BN & ~taken_BN).sum(dim=1).tolist()
        left, call = self.replies.time_left_s, self.replies.call_s
        decisions = [
            decide(Exchange.FORWARD, survivors=alive, spares=spare, time_left_s=left, call_s=call)
            for alive, spare in zip(survivors_B, spares_B, strict=True)
        ]
        return torch.tensor([decision is Decision.SUBSTITUTE for decision in decisions])

    def _check_survivors(self, exchange: Exchange, active_BK: Tensor) -> None:
        fewest = int(active_BK.sum(dim=1).min())
        if decide(exchange, survivors=fewest, spares=0, time_left_s=0, call_s=0) is Decision.GIVE_UP:
            raise NoExpertsError("every routed expert was lost", self.faults)

    def _skip(self, pair_P: NDArray[np.int64], fault: Fault) -> None:
        for row, _, client in pair_P.tolist():
            self.skipped_B[row][client] = fault

"""One round over Ray: the five exchanges of `airmoe_ray.model.seam`, with clients that live in actors and may fail.

Small statistics come back to the caller (the cloud); features and outputs travel as object references and go only
where the paper lets them go. Gammas come back from the channel as sealed bytes: the cloud passes them on unopened, for
the account of the answer.
Suffixes: B inputs, N clients, K routed, n clients of one host, d statistic, C classes, h w grid; P routed pairs.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from actors.errors import ChannelLostError, Fault, NoExpertsError
from actors.rounds.calls import Ref, seal
from actors.rounds.fault_policy import Exchange
from actors.rounds.messages import (
    Array,
    Arrival,
    Collect,
    Forward,
    Gains,
    HostReport,
    Read,
    Renew,
    Superpose,
    Transmit,
)
from actors.rounds.pairs import Pairs, pairs_by_host
from actors.rounds.replies import Replies
from actors.rounds.roster import RoundSpec
from airmoe_ray.model.routing import Routing, replace_lost
from airmoe_ray.model.seam import Reading, Report
from airmoe_ray.radio.channel import Received


class RayRound:
    """One batch; keeps references and who failed, never what belongs to a client."""

    faded_BN: Tensor
    present_N: Tensor
    routing: Routing

    def __init__(self, spec: RoundSpec) -> None:
        self.spec, self.id, self.roster = spec, spec.id, spec.roster
        self.ids_B, self.channel = spec.ids_B, spec.channel
        self.replies = Replies(spec.overdue, ends_at=spec.ends_at)
        self.faults = self.replies.faults
        self.serving = spec.roster.serving(spec.turn)
        self.hosts = {host.key: host for host in self.serving.values()}
        self.heard: tuple[str, ...] = ()  # hosts whose signal arrived
        self.skipped_B: list[dict[int, Fault]] = [dict(spec.roster.missing) for _ in spec.ids_B]
        self.versions: dict[int, int] = {}
        self.processes: dict[str, int] = {}  # of hosts that answered: when each began
        self.renewed_B: list[set[int]] = [set() for _ in spec.ids_B]
        self.timings_ms: dict[str, float] = {}
        # of who transmitted, nobody so far; not for the cloud to open
        self.sealed_gamma_BK = seal(np.zeros((len(spec.ids_B), 0), dtype=np.complex64))
        self._own_work: Callable[[], object] = lambda: None
        if not self.hosts:
            raise NoExpertsError("no expert is up")

    def overlapped(
        self, head: Callable[[Tensor], Tensor] | None, features_BDhw: Tensor
    ) -> Callable[[Tensor], Tensor] | None:
        """The same head for `collaborate`, run earlier than it asks: while the routed clients run theirs."""
        if head is None:
            return None
        own_BChw = functools.cache(lambda: head(features_BDhw))
        self._own_work = own_BChw
        return lambda _: own_BChw()

    # the exchanges

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """Every client on the roster answers with its statistic; those that do not are absent from this round."""
        started = time.perf_counter()
        query, device = query_dist_Bd.cpu().numpy(), query_dist_Bd.device
        message = Read(self.id, self.ids_B, query, self.channel, self.spec.finished)
        asked = {key: host.calls for key, host in self.hosts.items() if self.replies.may_ask(key)}
        work = dict.fromkeys(asked, float(len(query)))
        replies = self.replies.gather({key: calls.read(message) for key, calls in asked.items()}, Exchange.READ, work)
        batch, d, total = *query.shape, self.roster.total
        stat_BNd = np.full((batch, total, d), 1.0 / d, dtype=query.dtype)
        faded_BN, present_N = np.zeros((batch, total), dtype=bool), np.zeros(total, dtype=bool)
        for key, reply in replies.items():
            host = self.hosts[key]
            if not reply.is_valid((batch, len(host.clients), d)):
                self.replies.blame(key, Fault.INVALID)
                continue
            self.processes[key] = reply.process
            arrived = self.replies.arrived_at.get(key, time.monotonic())
            self.replies.overdue.clocks.note(key, reply.process, reply.clock_s, arrived)
            spoken_for = [(n, client) for n, client in enumerate(host.clients) if self.serving.get(client) is host]
            columns, clients = map(list, zip(*spoken_for, strict=True))
            stat_BNd[:, clients], faded_BN[:, clients] = reply.stat_Bnd[:, columns], reply.faded_Bn[:, columns]
            present_N[clients] = True
            self.versions |= {client: reply.versions[column] for column, client in spoken_for}
        for client, host in self.serving.items():
            if host.key in self.faults:
                for skipped in self.skipped_B:
                    skipped[client] = self.faults[host.key]
        if not present_N.any():
            # all late at once: that is rather the cloud's own machine, or the way there, than every one of them
            blamed = {} if set(self.faults.values()) == {Fault.LATE} else self.replies.take_news()
            raise NoExpertsError("no expert answered", blamed)
        self.faded_BN, self.present_N = torch.from_numpy(faded_BN), torch.from_numpy(present_N)
        self.timings_ms["read"] = 1e3 * (time.perf_counter() - started)
        present = None if present_N.all() else self.present_N.to(device)
        return Reading(torch.from_numpy(stat_BNd).to(device), self.faded_BN.to(device), present)

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2, asked of the selected clients where all of them faded; 0 for one that does not answer."""
        gain_BN = torch.zeros(len(self.ids_B), self.roster.total, dtype=torch.float64)
        wanted, message = selected_BK.unique().tolist(), Gains(self.id)
        keys = {self.serving[client].key for client in wanted}
        replies = self.replies.gather({key: self.hosts[key].calls.gains(message) for key in keys}, Exchange.GAINS)
        for client in wanted:
            if (host := self.serving[client]).key in replies:
                gain_Bn = replies[host.key]
                gain_BN[:, client] = torch.from_numpy(gain_Bn[:, host.clients.index(client)]).double()
        return gain_BN.to(selected_BK.device).gather(1, selected_BK)

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Routed clients run their experts; one lost before transmission makes room for the next best."""
        started = time.perf_counter()
        device = query_dist_Bd.device
        features, query = Ref.put(features_BDhw.cpu().numpy()), query_dist_Bd.cpu().numpy()
        delta_BK = np.zeros(routing.transmit_BK.shape, dtype=query.dtype)
        scale_limit_BK = np.ones_like(delta_BK)
        failed_N = torch.zeros_like(self.present_N)
        usable_BN = routing.eligible_BN.cpu() & (~self.faded_BN | routing.all_faded_B.cpu()[:, None])
        wanted_BK = routing.active_BK.cpu()
        self.output_shape = (self.spec.classes, *features_BDhw.shape[2:])
        while True:
            lost_BK = torch.zeros_like(wanted_BK)
            pairs = pairs_by_host(routing.transmit_BK, wanted_BK, self.serving)
            replies = self._forward(pairs, features, query)
            for key, its in pairs.items():
                if key in replies:
                    delta_BK[its.places], scale_limit_BK[its.places] = replies[key].delta_P, replies[key].scale_limit_P
                else:
                    lost_BK[its.places] = True
                    failed_N[self._failed_with(key, its)] = True
                    self._skip(its, self.faults[key])
            if not lost_BK.any():
                break
            usable_BN &= ~failed_N
            allowed_BN = usable_BN & self.replies.may_substitute(routing, lost_BK, usable_BN)[:, None]
            routing = replace_lost(routing, lost_BK.to(device), allowed_BN.to(device))
            self.replies.check_survivors(Exchange.FORWARD, routing.active_BK)
            wanted_BK = lost_BK & routing.active_BK.cpu()
        self.routing = routing
        self.timings_ms["expert"] = 1e3 * (time.perf_counter() - started)
        return Report(torch.from_numpy(delta_BK).to(device), torch.from_numpy(scale_limit_BK).to(device), routing)

    def _forward(self, pairs: Mapping[str, Pairs], features: Ref[Array], query: Array) -> dict[str, HostReport]:
        """Reports of the hosts that answered well; the cloud does its own work while they do theirs."""
        calls = {
            key: self.hosts[key].calls.forward(Forward(self.id, query, its.sample_P, its.client_P), features)
            for key, its in pairs.items()
        }
        self._own_work()
        replies = self.replies.gather(calls, Exchange.FORWARD, self._work(pairs))
        valid = {key: reply for key, reply in replies.items() if reply.is_valid(len(pairs[key]))}
        for key in replies.keys() - valid.keys():
            self.replies.blame(key, Fault.INVALID)
        return valid

    def _failed_with(self, key: str, its: Pairs) -> list[int]:
        """Clients that no substitute is sought among: those that failed, or all of a host that does not answer."""
        if self.faults[key] in (Fault.LATE, Fault.LOST):
            return [client for client, host in self.serving.items() if host.key == key]
        return sorted(set(its.client_P.tolist()))

    def _work(self, pairs: Mapping[str, Pairs]) -> dict[str, float]:
        """How much each host has to do: pairs, times the cells of the grid."""
        return {key: float(len(its) * np.prod(self.output_shape[1:])) for key, its in pairs.items()}

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """All at once: clients hand their symbols to the channel, which adds them up."""
        started = time.perf_counter()
        heard_BK = (beta_BK > 0).cpu()
        pairs = pairs_by_host(self.routing.transmit_BK, heard_BK, self.serving)
        outcome = self._transmit(pairs, beta_BK.cpu().numpy(), rho_B.cpu().numpy())
        self.timings_ms["channel"] = self.timings_ms.get("channel", 0.0) + 1e3 * (time.perf_counter() - started)
        if isinstance(outcome, Arrival):
            self.heard, self.sealed_gamma_BK = tuple(pairs), outcome.sealed_gamma_BK
            parts = (outcome.signal_BChw, outcome.error_energy_B, outcome.clean_energy_B)
            return Received(*(torch.from_numpy(part).to(beta_BK.device) for part in parts))
        lost_BK = torch.zeros_like(heard_BK)
        for key in outcome:
            lost_BK[pairs[key].places] = True
            self._skip(pairs[key], self.faults[key])
        self.replies.check_survivors(Exchange.TRANSMIT, heard_BK & ~lost_BK)
        lost_BK = lost_BK.to(beta_BK.device)
        self.routing = replace(self.routing, active_BK=self.routing.active_BK & ~lost_BK)  # nor do they renew
        nothing = beta_BK.new_zeros(0)
        return Received(nothing, nothing, nothing, lost_BK)

    def _transmit(self, pairs: Mapping[str, Pairs], beta_BK: Array, rho_B: Array) -> Arrival | list[str]:
        """What arrived; or, where some failed and nothing was sent, the hosts that failed.

        The channel is called once all symbols are there: its calls run in order, and one that waited for a client would
        keep all later ones waiting.
        """
        symbols = {
            key: self.hosts[key].calls.transmit(
                Transmit(self.id, its.sample_P, its.client_P, beta_BK[its.places], rho_B[its.sample_P])
            )
            for key, its in pairs.items()
        }
        arrived = self.replies.await_each(symbols, Exchange.TRANSMIT, self._work(pairs))
        if len(arrived) < len(symbols):
            return [key for key in symbols if key not in arrived]
        message = Superpose(
            self.ids_B,
            self.channel,
            self.spec.snr_db_B,
            self.routing.transmit_BK.cpu().numpy(),
            beta_BK,
            tuple(its.sample_P * beta_BK.shape[1] + its.rank_P for its in pairs.values()),
            self.output_shape,
        )
        arriving = self.roster.channel.superpose(message, *symbols.values())
        outcome = self.replies.from_channel(self.roster.channel, arriving, sum(self._work(pairs).values()))
        if isinstance(outcome, Arrival):
            faults = {list(pairs)[number]: fault for number, fault in outcome.faults.items()}
        else:
            faults = {key: Fault.LOST for key in symbols if self.hosts[key].calls.actor_id == outcome}
        for key, fault in faults.items():
            self.replies.blame(key, fault)
        if not faults and not isinstance(outcome, Arrival):
            raise ChannelLostError("the channel lost what was sent to it")
        return outcome if isinstance(outcome, Arrival) and not faults else list(faults)

    def renew(self) -> None:
        """Owners renew the FRLs of the clients that were heard, and have it on disk before this returns.

        A renewal that is not confirmed in time is told with the answer, as of a client that was skipped.
        """
        pairs = pairs_by_host(self.routing.transmit_BK, self.routing.active_BK, self.serving)
        own = {key: its for key, its in pairs.items() if self.hosts[key].owner}
        calls = {key: self.hosts[key].calls.renew(self._renewal(key, its)) for key, its in own.items()}
        done = self.replies.gather(calls, Exchange.RENEW, {key: float(len(its)) for key, its in own.items()})
        for key, its in pairs.items():
            owner = key if key in own else self._renew_elsewhere(key, its)
            if owner in done or owner not in self.faults:
                for row, client in zip(its.sample_P.tolist(), its.client_P.tolist(), strict=True):
                    self.renewed_B[row].add(client)
            else:
                self._skip(its, self.faults[owner])

    def _renewal(self, key: str, its: Pairs) -> Renew:
        until = time.monotonic() + self.replies.patience.limit_s(key, Exchange.RENEW, float(len(its)))
        until = self.replies.overdue.clocks.at(key, until)
        return Renew(self.id, its.sample_P, its.client_P, self.spec.tickets_B, until)

    def _renew_elsewhere(self, key: str, its: Pairs) -> str:
        """What a replica has read goes to its owner, once it is there; the host to blame if that fails."""
        owner = self.roster.owner_of(int(its.client_P[0]))
        if owner is None:
            self.replies.excuse(key, Fault.RESTARTING)
            return key
        collected = self.hosts[key].calls.collect(Collect(self.id, its.sample_P, its.client_P, self.spec.tickets_B))
        if not self.replies.await_each({key: collected}, Exchange.RENEW):
            return key
        until = self._renewal(owner.key, its).until
        self.replies.gather({owner.key: owner.calls.renew_from(collected, until)}, Exchange.RENEW)
        return owner.key

    def _skip(self, pairs: Pairs, fault: Fault) -> None:
        for row, client in zip(pairs.sample_P.tolist(), pairs.client_P.tolist(), strict=True):
            self.skipped_B[row][client] = fault

"""One round over Ray: the five exchanges of `airmoe_ray.model.seam`, with clients that live in actors and may fail.

Small statistics come back to the caller (the cloud); features, outputs and gammas travel as object references and go
only where the paper lets them go.
Suffixes: B inputs, N clients, K routed, n clients of one host, d statistic, C classes, h w grid; P routed pairs.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from ray.exceptions import RayError
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
    Sound,
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
        self.replies = Replies(spec.roster.channel, call_s=spec.call_s, ends_at=spec.ends_at)
        self.faults = self.replies.faults
        self.serving = spec.roster.serving(spec.turn)
        self.hosts = {host.key: host for host in self.serving.values()}
        self.heard: tuple[str, ...] = ()  # hosts whose signal arrived
        self.skipped_B: list[dict[int, Fault]] = [dict(spec.roster.missing) for _ in spec.ids_B]
        self.versions: dict[int, int] = {}
        self.timings_ms: dict[str, float] = {}
        # of who transmitted, nobody so far; not for the cloud to open
        self.sealed_gamma_BK = seal(np.zeros((len(spec.ids_B), 0), dtype=np.complex64))
        self._own_work: Callable[[], object] = lambda: None
        self._gammas = self._sound()

    def _sound(self) -> dict[str, Ref[Array]]:
        """Pilots go out with the round's beginning: references to every host's own gammas."""
        if not self.hosts:
            raise NoExpertsError("no expert is up")
        clients = tuple(host.clients for host in self.hosts.values())
        refs = self.roster.channel.sound(Sound(self.ids_B, self.roster.drawn, self.channel, clients))
        return dict(zip(self.hosts, refs, strict=True))

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
        message = Read(self.id, query, self.channel, self.spec.finished)
        replies = self.replies.gather(
            {key: host.calls.read(message, self._gammas[key]) for key, host in self.hosts.items()}
        )
        batch, d, total = *query.shape, self.roster.total
        stat_BNd = np.full((batch, total, d), 1.0 / d, dtype=query.dtype)
        faded_BN, present_N = np.zeros((batch, total), dtype=bool), np.zeros(total, dtype=bool)
        for key, reply in replies.items():
            host = self.hosts[key]
            if not reply.is_valid((batch, len(host.clients), d)):
                self.faults[key] = Fault.INVALID
                continue
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
            if set(self.faults.values()) == {Fault.LATE}:  # all at once: it is rather the channel that hangs
                raise ChannelLostError("nobody answered in time")
            raise NoExpertsError("no expert answered", self.faults)
        self.faded_BN, self.present_N = torch.from_numpy(faded_BN), torch.from_numpy(present_N)
        self.timings_ms["read"] = 1e3 * (time.perf_counter() - started)
        present = None if present_N.all() else self.present_N.to(device)
        return Reading(torch.from_numpy(stat_BNd).to(device), self.faded_BN.to(device), present)

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2, asked of the selected clients where all of them faded; 0 for one that does not answer."""
        gain_BN = torch.zeros(len(self.ids_B), self.roster.total, dtype=torch.float64)
        wanted, message = selected_BK.unique().tolist(), Gains(self.id)
        keys = {self.serving[client].key for client in wanted}
        replies = self.replies.gather({key: self.hosts[key].calls.gains(message) for key in keys})
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
        while True:
            lost_BK = torch.zeros_like(wanted_BK)
            pairs = pairs_by_host(routing.transmit_BK, wanted_BK, self.serving)
            replies = self._forward(pairs, features, query)
            for key, its in pairs.items():
                if key in replies:
                    delta_BK[its.places], scale_limit_BK[its.places] = replies[key].delta_P, replies[key].scale_limit_P
                else:
                    lost_BK[its.places] = True
                    failed_N[np.unique(its.client_P)] = True
                    self._skip(its, self.faults[key])
            if not lost_BK.any():
                break
            usable_BN &= ~failed_N
            allowed_BN = usable_BN & self.replies.may_substitute(routing, lost_BK, usable_BN)[:, None]
            routing = replace_lost(routing, lost_BK.to(device), allowed_BN.to(device))
            self.replies.check_survivors(Exchange.FORWARD, routing.active_BK)
            wanted_BK = lost_BK & routing.active_BK.cpu()
        self.routing, self.output_shape = routing, (self.spec.classes, *features_BDhw.shape[2:])
        self.timings_ms["expert"] = 1e3 * (time.perf_counter() - started)
        return Report(torch.from_numpy(delta_BK).to(device), torch.from_numpy(scale_limit_BK).to(device), routing)

    def _forward(self, pairs: Mapping[str, Pairs], features: Ref[Array], query: Array) -> dict[str, HostReport]:
        """Reports of the hosts that answered well; the cloud does its own work while they do theirs."""
        calls = {
            key: self.hosts[key].calls.forward(Forward(self.id, query, its.sample_P, its.client_P), features)
            for key, its in pairs.items()
        }
        self._own_work()
        replies = self.replies.gather(calls)
        valid = {key: reply for key, reply in replies.items() if reply.is_valid(len(pairs[key]))}
        self.faults |= dict.fromkeys(replies.keys() - valid.keys(), Fault.INVALID)
        return valid

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """All at once: clients hand their symbols to the channel, which adds them up."""
        started = time.perf_counter()
        heard_BK = (beta_BK > 0).cpu()
        pairs = pairs_by_host(self.routing.transmit_BK, heard_BK, self.serving)
        outcome = self._superpose(pairs, beta_BK.cpu().numpy(), rho_B.cpu().numpy())
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

    def _superpose(self, pairs: Mapping[str, Pairs], beta_BK: Array, rho_B: Array) -> Arrival | list[str]:
        """What arrived; or, where some failed and nothing was sent, the hosts that failed."""
        symbols = {
            key: self.hosts[key].calls.transmit(
                Transmit(self.id, its.sample_P, its.client_P, beta_BK[its.places], rho_B[its.sample_P])
            )
            for key, its in pairs.items()
        }
        message = Superpose(
            self.ids_B,
            self.roster.drawn,
            self.channel,
            self.routing.transmit_BK.cpu().numpy(),
            beta_BK,
            tuple(its.sample_P * beta_BK.shape[1] + its.rank_P for its in pairs.values()),
            self.output_shape,
        )
        arriving = self.roster.channel.superpose(message, *symbols.values())
        try:
            arrival = arriving.get(self.replies.exchange_s)
            invalid = [list(pairs)[number] for number in arrival.invalid]
            self.faults |= dict.fromkeys(invalid, Fault.INVALID)
            return invalid or arrival
        except RayError as error:  # a host failed, and with it the sum; or the channel itself
            self.replies.check_host_at_fault(error)
        arrived = self.replies.gather(symbols, timeout_s=0.05)
        failed = [key for key in symbols if key not in arrived]
        if not failed:
            raise ChannelLostError("the channel does not answer")
        return failed

    def renew(self) -> None:
        """Owners renew the FRLs of the clients that were heard, and have it on disk before this returns."""
        calls: dict[str, Ref[tuple[int, ...]]] = {}
        pairs = pairs_by_host(self.routing.transmit_BK, self.routing.active_BK, self.serving)
        for key, its in pairs.items():
            host = self.hosts[key]
            if host.owner:
                calls[key] = host.calls.renew(Renew(self.id, its.sample_P, its.client_P))
            elif (owner := self.roster.owner_of(int(its.client_P[0]))) is not None:
                collected = host.calls.collect(Collect(self.id, its.sample_P, its.client_P))
                calls[key] = owner.calls.renew_from(collected)
        self.replies.gather(calls)

    def _skip(self, pairs: Pairs, fault: Fault) -> None:
        for row, client in zip(pairs.sample_P.tolist(), pairs.client_P.tolist(), strict=True):
            self.skipped_B[row][client] = fault

"""A host of clients as an actor: their experts, psi and FRLs, and the clients' side of every exchange.

A host holds one client, or several together; each keeps its own FRL, gamma and identity. Nothing here imports timm: an
expert costs a process torch and its own weights, no more.
Suffixes: B inputs, n clients of this host, M prototypes, d statistic, C classes, h w grid; P routed pairs.
"""

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

import ray
import torch
from ray.actor import ActorClass
from torch import Tensor

from actors.cluster.connection import node_ip
from actors.cluster.gpus import assigned_gpus, own_device
from actors.errors import Fault, InvalidOutputError, TooLateError, UnknownRoundError
from actors.processes.busy_time import BusyTime
from actors.processes.host_frls import HostFrls
from actors.processes.host_rounds import HostRound, HostRounds
from actors.rounds.calls import Endpoint, Pinned
from actors.rounds.messages import (
    Array,
    Collect,
    Forward,
    Gains,
    HostReport,
    HostSpec,
    HostState,
    HostStatistic,
    Read,
    Renew,
    RenewalInput,
    Transmit,
)
from actors.rounds.roster import expert_names
from airmoe_ray.model.client import answer_query, precode, report
from airmoe_ray.model.experts import ExpertOutput
from airmoe_ray.model.local_clients import LocalClients
from airmoe_ray.radio.channel import draw_gamma, in_deep_fade
from airmoe_ray.storage.checkpoint import compute_dtype, load_client, parse_tensors

# arrays from the object store are shared and read-only; nothing here writes to its inputs
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

F = TypeVar("F", bound=Callable[..., Any])
HostMessage = Read | Gains | Forward | Transmit | Renew | Collect
_PROBED = 16  # experts that a probe runs; where a host holds hundreds, all would take seconds


def _in_group(name: str) -> Callable[[F], F]:
    """Calls of the method run on the thread of this group; a plain method for whoever calls it here."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)  # type: ignore[assignment]
    return mark


class ExpertHost(Endpoint):
    """The clients' side of the protocol, over plain arrays."""

    learning = False  # where True, outputs keep their graphs

    def __init__(self, spec: HostSpec, files: Sequence[bytes | Pinned]) -> None:
        self.spec, self.config, self.process = spec, spec.config, time.time_ns()
        self.device = own_device(threads=spec.config.cluster.expert_threads)
        self.index_of = {client: index for index, client in enumerate(spec.clients)}
        self.clients = LocalClients(
            spec.config,
            feature_dim=spec.card.feature_dim,
            classes=len(spec.card.classes),
            dilations=spec.card.dilation_rates,
            clients=spec.clients,
        )
        fingerprints = self._load(files)
        journal_folder = None if spec.replica or spec.journal_folder is None else Path(spec.journal_folder)
        self.frls = HostFrls(self.clients.frl, spec.clients, fingerprints, journal_folder=journal_folder)
        self.suspects: set[int] = set()  # indices whose last output was not finite
        self.next_probed = 0
        self.rounds = HostRounds()
        self.busy = BusyTime()  # in exchanges, since the process began

    def _load(self, files: Sequence[bytes | Pinned]) -> list[bytes]:
        """Fill the clients from their files; the files' fingerprints."""
        fingerprints = []
        for index, (client, file) in enumerate(zip(self.spec.clients, files, strict=True)):
            content = file if isinstance(file, bytes) else file.get()  # one at a time: together they may be large
            if index == 0:
                self.dtype = compute_dtype(parse_tensors(content, "expert")["frl.prototypes"])
                self.clients.to(dtype=self.dtype)
            load_client(self.clients, index, content, f"expert {client}")
            fingerprints.append(hashlib.blake2b(content, digest_size=16).digest())
        self.clients.eval().to(self.device)
        return fingerprints

    def exchange(self, packed: bytes, *beside: Any) -> bytes:
        """Take a message for a small reply; the host is busy meanwhile."""
        with self.busy:
            return super().exchange(packed, *beside)

    def emit(self, packed: bytes, *beside: Any) -> Any:
        """Take a message for a reply that another actor takes; the host is busy meanwhile."""
        with self.busy:
            return super().emit(packed, *beside)

    def receive(self, message: HostMessage, *beside: Any) -> object:
        """Call the method for this type of message."""
        match message:
            case Read():
                return self.read(message, *beside)
            case Gains():
                return self.gains(message)
            case Forward():
                return self.forward(message, *beside)
            case Transmit():
                return self.transmit(message)
            case Renew():
                return self.renew(message)
            case Collect():
                return self.collect(message)
            case _:
                assert_never(message)

    @_in_group("experts")
    def compute(self, packed: bytes, *beside: Any) -> bytes:
        """Take a message that keeps the experts busy; a small reply, sealed."""
        return self.exchange(packed, *beside)

    @_in_group("memory")
    def remember(self, packed: bytes, *beside: Any) -> bytes:
        """Take a message that goes to the disk; a small reply, sealed."""
        return self.exchange(packed, *beside)

    # one method per exchange of `airmoe_ray.model.seam.Round`

    @torch.inference_mode()
    def read(self, message: Read) -> HostStatistic:
        """P_j, Eq. (9)-(10), (13), and the fade bit; each client draws its own gamma, as it would estimate it.

        Rounds that are `finished` are forgotten on the way, which saves a call each.
        """
        self.rounds.end(message.finished)
        query_dist_Bd, temperature = self._tensor(message.query_dist_Bd), self.config.routing.norm_temperature
        with self.frls.unchanged():
            stat_Bnd, alpha_BnM = answer_query(self.clients.frl, query_dist_Bd, temperature=temperature)
            versions = tuple(self.frls.versions)
        gamma = draw_gamma(message.ids_B, self.spec.clients, config=message.channel, seed=self.config.seed)
        faded_Bn = in_deep_fade(gamma, message.channel)  # before any rounding: the same bit on every device
        gamma = gamma.to(self.device, self.dtype.to_complex())
        self.rounds.begin(message.round_id, HostRound(message.channel, query_dist_Bd, gamma, alpha_BnM))
        return HostStatistic(stat_Bnd.cpu().numpy(), faded_Bn.numpy(), versions, self.process, time.monotonic())

    def gains(self, message: Gains) -> Array:
        """|gamma_j|^2 of this host's clients (B, n); asked only where all of S faded."""
        return self.rounds[message.round_id].gain_Bn.cpu().numpy()

    def forward(self, message: Forward, features_BDhw: Array) -> HostReport:
        """Run the experts on their routed inputs; delta_j and c_j of each pair, Eq. (17)-(20), (22)."""
        round_ = self.rounds[message.round_id]
        index_P = torch.tensor([self.index_of[int(client)] for client in message.client_P])
        rows_P = torch.from_numpy(message.sample_P)
        order_P = torch.sort(index_P, stable=True).indices
        index_P, rows_P = index_P[order_P], rows_P[order_P]
        used_P, local_P = torch.unique(rows_P, return_inverse=True)  # only these inputs go to the device
        features = torch.from_numpy(features_BDhw)[used_P].to(self.device, self.dtype)
        with torch.inference_mode(not self.learning):
            output = self.clients.run(features, index_P.to(self.device), local_P.to(self.device))
        found = report(
            ExpertOutput(*(part.detach() for part in output)),
            self._tensor(message.query_dist_Bd)[rows_P],
            round_.gain_Bn[rows_P, index_P],
            channel=round_.channel,
            temperature=self.config.routing.norm_temperature,
        )
        finite_P = torch.isfinite(found.energy) & torch.isfinite(output.psi_Bd).all(dim=1)
        if not finite_P.all():
            self._raise_not_finite(index_P[~finite_P.cpu()].tolist())
        for row, index, y, psi in zip(
            rows_P.tolist(), index_P.tolist(), output.logits_BChw, output.psi_Bd, strict=True
        ):
            round_.outputs[row, index] = (y, psi)
        back_P = torch.sort(order_P).indices
        return HostReport(found.delta[back_P].cpu().numpy(), found.scale_limit[back_P].cpu().numpy())

    @torch.inference_mode()
    def transmit(self, message: Transmit) -> Array:
        """x_j = b_j y_j, Eq. (22), complex; or y_j itself where there is no air."""
        round_ = self.rounds[message.round_id]
        index_P = [self.index_of[int(client)] for client in message.client_P]
        pairs = list(zip(message.sample_P.tolist(), index_P, strict=True))
        if any(pair not in round_.outputs for pair in pairs):
            raise UnknownRoundError(f"round {message.round_id}: asked to transmit what was never computed")
        y_PChw = torch.stack([round_.outputs[pair][0] for pair in pairs])
        gamma_P = round_.gamma_Bn[message.sample_P, index_P]
        beta, rho = self._tensor(message.beta_P), self._tensor(message.rho_P)
        return precode(y_PChw, beta, rho, gamma_P, channel=round_.channel).cpu().numpy()

    def renew(self, message: Renew) -> tuple[int, ...]:
        """Renew the FRLs of clients that ran here, Eq. (11)-(12); the new versions."""
        return self.renew_from(self._collected(message), message.until)

    def collect(self, message: Collect) -> dict[int, RenewalInput]:
        """What the owner of a client that ran here needs to renew it."""
        return self._collected(message)

    @_in_group("memory")
    def renew_from(self, collected: dict[int, RenewalInput] | Fault, until: float) -> tuple[int, ...]:
        """Renew from what was collected here or at a replica; the new versions.

        After `until` (`time.monotonic`) nobody waits for it: the answer has left, and said that this was not done.
        """
        if isinstance(collected, Fault):
            raise UnknownRoundError(f"the replica {collected.value}")
        if time.monotonic() > until:
            raise TooLateError("a renewal came too late, and is left undone")
        return self.frls.renew(collected)

    # FRLs and health

    @_in_group("memory")
    def snapshots(self, clients: tuple[int, ...]) -> dict[int, bytes]:
        """FRLs of the given clients, for replicas and for safekeeping."""
        return self.frls.snapshots(clients)

    @_in_group("memory")
    def adopt(self, snapshots: Mapping[int, bytes]) -> tuple[int, ...]:
        """Take over newer FRLs; the resulting versions."""
        return self.frls.adopt(snapshots)

    @_in_group("experts")
    @torch.inference_mode()
    def probe(self) -> HostState:
        """Run a small input through the FRLs and some experts, in turn: passes only if real work would.

        An expert whose output was not finite stays among them until it is.
        """
        d, dim, count = self.config.frl.dim, self.spec.card.feature_dim, len(self.spec.clients)
        query = torch.full((1, d), 1.0 / d, dtype=self.dtype, device=self.device)
        features = torch.ones(1, dim, 2, 2, dtype=self.dtype, device=self.device)
        turn = {(self.next_probed + step) % count for step in range(min(count, _PROBED))}
        self.next_probed = (self.next_probed + _PROBED) % count
        probed, self.suspects = turn | self.suspects, set()
        outputs = {index: self.clients.experts[index](features) for index in probed}
        broken = [index for index, parts in outputs.items() if not all(torch.isfinite(part).all() for part in parts)]
        if broken or not torch.isfinite(self.clients.frl.read(query).value_BNd).all():
            self._raise_not_finite(broken)
        return self.state()

    def state(self) -> HostState:
        """Where the host runs, and how its clients are."""
        context = ray.get_runtime_context()
        return HostState(
            clients=self.spec.clients,
            versions=tuple(self.frls.versions),
            snapshot_versions=tuple(self.frls.snapshot_versions),
            drift=self.frls.drift,
            node_id=context.get_node_id(),
            node_ip=node_ip(),
            gpu_ids=assigned_gpus(),
            pid=os.getpid(),
            busy_s=self.busy.seconds,
            process=self.process,
        )

    # inside

    def _collected(self, message: Renew | Collect) -> dict[int, RenewalInput]:
        round_ = self.rounds[message.round_id]
        return round_.collect(message.sample_P, message.client_P, message.tickets_B, self.index_of)

    def _raise_not_finite(self, indices: Sequence[int]) -> NoReturn:
        """Raise for these experts, which the next probe then looks at; for an FRL where there are none."""
        self.suspects |= set(indices)
        names = expert_names(sorted({self.spec.clients[index] for index in indices}))
        raise InvalidOutputError(f"the output of {names if indices else 'an FRL'} is not finite")

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.device, self.dtype)


def host_actor(host: type[Any]) -> ActorClass[Any]:
    """An `ExpertHost` as an actor whose calls run on three threads.

    A read or a transmission, a matter of milliseconds, does not wait for another batch's experts, nor for a disk.
    """
    as_actor: Any = ray.remote  # whose types do not know of groups
    actor: ActorClass[Any] = as_actor(concurrency_groups={"experts": 1, "memory": 1})(host)
    return actor


ExpertActor = host_actor(ExpertHost)

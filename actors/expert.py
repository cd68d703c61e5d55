"""A client's home: its expert, psi and FRL, and the client's side of every exchange.

One actor holds one client, or several packed together; each keeps its own FRL, gamma and identity. Nothing here imports
timm: an expert costs a process torch and its own weights, no more.
Suffixes: B inputs, n clients of this host, M prototypes, d statistic, C classes, h w grid; P (input, client) pairs.
"""

import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.cluster import node_ip
from actors.errors import InvalidOutputError, UnknownRoundError
from actors.host import HostSpec, HostState, Pinned, Statistic
from actors.journal import Journal, Renewal, Snapshot, parse_snapshot
from actors.roster import expert_names
from actors.wire import Receiver
from airmoe_ray.channel import in_deep_fade
from airmoe_ray.checkpoint import load_client, parse_tensors
from airmoe_ray.clients import LocalClients
from airmoe_ray.config import ChannelConfig
from airmoe_ray.device import pick_device
from airmoe_ray.power import capacity, transmit_coefficient
from airmoe_ray.statistics import js_divergence, norm

# arrays from the object store are shared and read-only; nothing here writes to its inputs
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

Array = NDArray[Any]
_ROUNDS_KEPT = 64  # rounds whose cloud vanished are forgotten after this many others
_PROBED = 16  # experts that a probe runs; of a large pack, all would take seconds


@dataclass
class _Round:
    """What a client keeps between the exchanges of one round."""

    channel: ChannelConfig
    gamma_Bn: Tensor
    alpha_BnM: Tensor
    outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # (input, index): y_j, psi_j


class ExpertHost(Receiver):
    """The clients' side of the protocol, over plain arrays."""

    learning = False  # where True, outputs keep their graphs

    def __init__(self, spec: HostSpec, files: Sequence[bytes | Pinned]) -> None:
        self.spec, self.config = spec, spec.config
        self.device = pick_device("auto", threads=spec.config.cluster.expert_threads)
        self.index_of = {client: index for index, client in enumerate(spec.clients)}
        self.clients = LocalClients(
            spec.config,
            feature_dim=spec.card.feature_dim,
            classes=len(spec.card.classes),
            dilations=spec.card.dilation_rates,
            clients=spec.clients,
        )
        self.fingerprints: list[bytes] = []
        for index, (client, file) in enumerate(zip(spec.clients, files, strict=True)):
            content = file if isinstance(file, bytes) else file.get()  # one at a time: together they may be large
            if index == 0:
                self.dtype = parse_tensors(content, "expert")["frl.prototypes"].dtype
                self.clients.to(dtype=self.dtype)
            load_client(self.clients, index, content, f"expert {client}")
            self.fingerprints.append(hashlib.blake2b(content, digest_size=16).digest())
        self.clients.eval().to(self.device)
        self.start_nMd = self.clients.frl.prototypes_NMd.detach().clone()
        self.versions = [0] * len(spec.clients)
        self.snapshot_versions = [0] * len(spec.clients)
        self.suspects: set[int] = set()  # indices whose last output was not finite
        self.next_probed = 0
        self.journals: list[Journal] = []
        self.rounds: OrderedDict[str, _Round] = OrderedDict()
        if spec.journal_folder and not spec.replica:
            self._open_journals(Path(spec.journal_folder))

    # one method per exchange of `moe.Round`

    @torch.inference_mode()
    def read(
        self,
        round_id: str,
        query_dist_Bd: Array,
        gamma_Bn: Array,
        channel: ChannelConfig,
        finished: Sequence[str] = (),
    ) -> Statistic:
        """P_j, Eq. (3)-(4), (7), and the fade bit; the client learns its own gamma as its channel estimate.

        Rounds that are `finished` are forgotten on the way, which saves a call each.
        """
        for done in finished:
            self.rounds.pop(done, None)
        read = self.clients.frl.read(self._tensor(query_dist_Bd))
        gamma = torch.from_numpy(gamma_Bn)
        faded_Bn = in_deep_fade(gamma, channel)  # before any rounding: the same bit on every device
        self.rounds[round_id] = _Round(channel, gamma.to(self.device, self.dtype.to_complex()), read.alpha_BNM)
        while len(self.rounds) > _ROUNDS_KEPT:
            self.rounds.popitem(last=False)
        stat_Bnd = norm(read.value_BNd, self.config.routing.norm_temperature)
        return Statistic(stat_Bnd.cpu().numpy(), faded_Bn.numpy(), tuple(self.versions))

    def gains(self, round_id: str) -> Array:
        """|gamma_j|^2 of this host's clients (B, n); asked only where all of S faded."""
        return self._round(round_id).gamma_Bn.abs().square().cpu().numpy()

    def forward(
        self, round_id: str, features_BDhw: Array, query_dist_Bd: Array, sample_P: Array, client_P: Array
    ) -> tuple[Array, Array]:
        """Run the experts on their routed inputs; delta_j and c_j of each pair, Eq. (11)-(14), (17)."""
        round_ = self._round(round_id)
        index_P = torch.tensor([self.index_of[int(client)] for client in client_P])
        rows_P = torch.from_numpy(sample_P)
        order_P = torch.sort(index_P, stable=True).indices
        index_P, rows_P = index_P[order_P], rows_P[order_P]
        used_P, local_P = torch.unique(rows_P, return_inverse=True)  # only these inputs go to the device
        features = torch.from_numpy(features_BDhw)[used_P].to(self.device, self.dtype)
        with torch.inference_mode(not self.learning):
            output = self.clients.run(features, index_P.to(self.device), local_P.to(self.device))
        energy_P = output.logits_BChw.detach().square().sum(dim=(1, 2, 3))
        fine_P = torch.isfinite(energy_P) & torch.isfinite(output.psi_Bd).all(dim=1)
        if not fine_P.all():
            self._suspect(index_P[~fine_P.cpu()].tolist())
        for row, index, y, psi in zip(
            rows_P.tolist(), index_P.tolist(), output.logits_BChw, output.psi_Bd, strict=True
        ):
            round_.outputs[row, index] = (y, psi)
        query_Pd = self._tensor(query_dist_Bd)[rows_P]
        delta_P = js_divergence(query_Pd, norm(output.psi_Bd.detach(), self.config.routing.norm_temperature))
        budget = round_.channel.power * output.logits_BChw[0].numel()  # P0
        gain_P = round_.gamma_Bn[rows_P, index_P].abs().square()
        capacity_P = capacity(energy_P, gain_P, budget)
        back_P = torch.sort(order_P).indices
        return delta_P[back_P].cpu().numpy(), capacity_P[back_P].cpu().numpy()

    @torch.inference_mode()
    def transmit(self, round_id: str, sample_P: Array, client_P: Array, beta_P: Array, rho_P: Array) -> Array:
        """x_j = b_j y_j, Eq. (17), complex; or y_j itself where there is no air."""
        round_ = self._round(round_id)
        index_P = [self.index_of[int(client)] for client in client_P]
        pairs = list(zip(sample_P.tolist(), index_P, strict=True))
        if any(pair not in round_.outputs for pair in pairs):
            raise UnknownRoundError(f"round {round_id}: asked to transmit what was never computed")
        y_PChw = torch.stack([round_.outputs[pair][0] for pair in pairs])
        if round_.channel.kind == "air":
            gamma_P = round_.gamma_Bn[sample_P, index_P]
            b_P1 = transmit_coefficient(self._tensor(beta_P)[:, None], self._tensor(rho_P), gamma_P[:, None])
            y_PChw = b_P1[..., None, None] * y_PChw
        return y_PChw.cpu().numpy()

    # renewal

    def collect(self, round_id: str, sample_P: Array, client_P: Array) -> dict[int, tuple[Array, Array]]:
        """Attention and psi of the inputs that activated each client, in input order: all a renewal needs."""
        round_ = self._round(round_id)
        records = {}
        for client in np.unique(client_P).tolist():
            rows, index = np.sort(sample_P[client_P == client]).tolist(), self.index_of[client]
            psi_Ad = torch.stack([round_.outputs[row, index][1] for row in rows]).detach()
            alpha_AM = round_.alpha_BnM[rows, index]
            records[client] = (alpha_AM.cpu().numpy(), psi_Ad.cpu().numpy())
        return records

    def renew(self, records: Mapping[int, tuple[Array, Array]]) -> tuple[int, ...]:
        """Eq. (5)-(6) from `collect`ed records, on disk before they take effect; the new versions."""
        for client, (alpha_AM, psi_Ad) in records.items():
            index = self.index_of[client]
            renewal = Renewal(self.versions[index] + 1, alpha_AM, psi_Ad)
            if self.journals:
                self.journals[index].append(renewal)
            self._apply(index, renewal)
            if self.journals and self.journals[index].full:
                self._compact(index)
        return tuple(self.versions)

    def renew_round(self, round_id: str, sample_P: Array, client_P: Array) -> tuple[int, ...]:
        """`collect` and `renew` in one, where the owner itself ran the round."""
        return self.renew(self.collect(round_id, sample_P, client_P))

    def snapshots(self, clients: Sequence[int] | None = None) -> dict[int, bytes]:
        """The FRL of the given clients, or of all, for replicas and for safekeeping."""
        places = {client: self.index_of[client] for client in (self.spec.clients if clients is None else clients)}
        return {client: self._snapshot(place).to_bytes(self.fingerprints[place]) for client, place in places.items()}

    def adopt(self, snapshots: Mapping[int, bytes]) -> tuple[int, ...]:
        """Take over newer snapshots of the same checkpoint; the resulting versions."""
        for client, content in snapshots.items():
            index = self.index_of.get(client)
            if index is None:
                continue
            snapshot = parse_snapshot(content, self.fingerprints[index])
            if snapshot is not None and snapshot.version > self.versions[index]:
                self._restore(index, snapshot)
                if self.journals:
                    self._compact(index)
        return tuple(self.versions)

    # health

    @torch.inference_mode()
    def probe(self) -> HostState:
        """A small input through the FRLs and some experts, in turn: passes only if real work would.

        An expert whose output was not finite stays among them until it is.
        """
        d, dim, count = self.config.frl.dim, self.spec.card.feature_dim, len(self.spec.clients)
        query = torch.full((1, d), 1.0 / d, dtype=self.dtype, device=self.device)
        features = torch.ones(1, dim, 2, 2, dtype=self.dtype, device=self.device)
        turn = {(self.next_probed + step) % count for step in range(min(count, _PROBED))}
        self.next_probed = (self.next_probed + _PROBED) % count
        asked, self.suspects = turn | self.suspects, set()
        outputs = {index: self.clients.experts[index](features) for index in asked}
        broken = [index for index, parts in outputs.items() if not all(torch.isfinite(part).all() for part in parts)]
        if broken or not torch.isfinite(self.clients.frl.read(query).value_BNd).all():
            self._suspect(broken)
        return self.state()

    def state(self) -> HostState:
        """Node, GPUs, versions."""
        context = ray.get_runtime_context()
        moved_n = (self.clients.frl.prototypes_NMd.detach() - self.start_nMd).norm(dim=(1, 2))
        return HostState(
            clients=self.spec.clients,
            versions=tuple(self.versions),
            snapshot_versions=tuple(self.snapshot_versions),
            drift=tuple((moved_n / self.start_nMd.norm(dim=(1, 2)).clamp_min(1e-12)).tolist()),
            node_id=context.get_node_id(),
            node_ip=node_ip(),
            gpu_ids=tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])),
            pid=os.getpid(),
        )

    # inside

    def _suspect(self, indices: Sequence[int]) -> NoReturn:
        self.suspects |= set(indices)
        names = expert_names(sorted({self.spec.clients[index] for index in indices}))
        raise InvalidOutputError(f"the output of {names if indices else 'an FRL'} is not finite")

    def _open_journals(self, folder: Path) -> None:
        for index, client in enumerate(self.spec.clients):
            journal = Journal(folder, client, fingerprint=self.fingerprints[index])
            snapshot, renewals = journal.load()
            self.journals.append(journal)
            if snapshot is not None:
                self._restore(index, snapshot)
            for renewal in renewals:
                self._apply(index, renewal)

    def _apply(self, index: int, renewal: Renewal) -> None:
        alpha_A1M = self._tensor(renewal.alpha_BM.copy())[:, None]
        psi_A1d = self._tensor(renewal.psi_Bd.copy())[:, None]
        active_A1 = torch.ones(alpha_A1M.shape[:2], dtype=torch.bool, device=self.device)
        self.clients.frl.renew(alpha_A1M, psi_A1d, active_A1, slice(index, index + 1))
        self.versions[index] = renewal.version

    def _snapshot(self, index: int) -> Snapshot:
        frl = self.clients.frl
        return Snapshot(
            self.versions[index],
            frl.prototypes_NMd.detach()[index].cpu().numpy(),
            frl.importance_NM[index].cpu().numpy(),
        )

    @torch.no_grad()
    def _restore(self, index: int, snapshot: Snapshot) -> None:
        self.clients.frl.prototypes_NMd[index].copy_(torch.from_numpy(snapshot.prototypes_Md))
        self.clients.frl.importance_NM[index].copy_(torch.from_numpy(snapshot.importance_M))
        self.versions[index] = self.snapshot_versions[index] = snapshot.version

    def _compact(self, index: int) -> None:
        self.journals[index].compact(self._snapshot(index))
        self.snapshot_versions[index] = self.versions[index]

    def _round(self, round_id: str) -> _Round:
        if round_id not in self.rounds:
            raise UnknownRoundError(f"round {round_id}: not begun here; the actor was restarted in between")
        return self.rounds[round_id]

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.device, self.dtype)


ExpertActor = ray.remote(ExpertHost)

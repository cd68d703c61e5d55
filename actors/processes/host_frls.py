"""The FRLs of one host's clients as they change: renewals, each client's journal and version, snapshots out and in.

Suffixes: n clients of this host, M prototypes, d statistic; A inputs that activated one client.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from actors.processes.frl_journal import Journal, Renewal, Snapshot, parse_snapshot
from actors.rounds.messages import Array, RenewalInput
from airmoe_ray.model.frl import FeatureRetrievalLibrary

log = logging.getLogger("airmoe")
_TICKETS_KEPT = 1024  # a request is tried again within seconds, or not at all


class HostFrls:
    """FRLs of some clients with their versions, which count renewals since the checkpoint.

    `fingerprints` are those of the clients' checkpoint files: journals and snapshots belong to one checkpoint.
    """

    def __init__(
        self,
        frl: FeatureRetrievalLibrary,
        clients: Sequence[int],
        fingerprints: Sequence[bytes],
        *,
        journal_folder: Path | None,
    ) -> None:
        self.frl, self.fingerprints = frl, fingerprints
        self.index_of = {client: index for index, client in enumerate(clients)}
        self.start_nMd = frl.prototypes_NMd.detach().clone()
        self.versions = [0] * len(clients)
        self.snapshot_versions = [0] * len(clients)
        self.journals: list[Journal] = []  # none without a folder
        self._tickets: list[dict[int, None]] = [{} for _ in clients]  # requests that each has renewed for, oldest first
        self._renewing = threading.Lock()  # one renewal at a time, with its disk
        self._memory = threading.Lock()  # prototypes, importance, versions: read and written as a whole
        if journal_folder is not None:
            for client, index in self.index_of.items():
                self._open_journal(journal_folder, client, index)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """No FRL changes while the block reads them."""
        with self._memory:
            yield

    def renew(self, collected: Mapping[int, RenewalInput]) -> tuple[int, ...]:
        """Renew some clients, Eq. (11)-(12), on disk before it takes effect; the versions of all.

        Each request counts once, however often it is sent: its ticket is on disk with what it changed.
        """
        with self._renewing:
            for client, found in collected.items():
                index = self.index_of[client]
                renewal = self._new_part(index, found)
                if renewal is None:
                    continue
                if self.journals:
                    self.journals[index].append(renewal)
                self._apply(index, renewal)
                if self.journals and self.journals[index].full:
                    try:
                        self._compact(index)
                    except OSError as error:  # the renewal itself is on disk, and the journal may grow a while longer
                        log.warning("the journal of expert %d cannot be compacted: %s", client, error)
            return tuple(self.versions)

    def _new_part(self, index: int, found: RenewalInput) -> Renewal | None:
        """The renewal by those rows of `found` that were not applied before; None where all of them were."""
        version = self.versions[index] + 1
        if not found.ticket_A:
            return Renewal(version, found.alpha_AM, found.psi_Ad)
        rows = [row for row, ticket in enumerate(found.ticket_A) if ticket not in self._tickets[index]]
        if not rows:
            return None
        tickets = tuple(found.ticket_A[row] for row in rows)
        return Renewal(version, found.alpha_AM[rows], found.psi_Ad[rows], tickets)

    def snapshots(self, clients: Iterable[int]) -> dict[int, bytes]:
        """FRLs of the given clients as files, for replicas and for safekeeping."""
        places = {client: self.index_of[client] for client in clients}
        return {client: self._snapshot(place).to_bytes(self.fingerprints[place]) for client, place in places.items()}

    def adopt(self, snapshots: Mapping[int, bytes]) -> tuple[int, ...]:
        """Take over newer snapshots of the same checkpoint; the resulting versions."""
        with self._renewing:
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

    @property
    def drift(self) -> tuple[float, ...]:
        """How far each client's prototypes have moved since the checkpoint, over their norm."""
        moved_n = (self.frl.prototypes_NMd.detach() - self.start_nMd).norm(dim=(1, 2))
        return tuple((moved_n / self.start_nMd.norm(dim=(1, 2)).clamp_min(1e-12)).tolist())

    # inside

    def _open_journal(self, folder: Path, client: int, index: int) -> None:
        journal = Journal(folder, client, fingerprint=self.fingerprints[index])
        snapshot, renewals = journal.load()
        self.journals.append(journal)
        if snapshot is not None:
            self._restore(index, snapshot)
        for renewal in renewals:
            self._apply(index, renewal)

    def _apply(self, index: int, renewal: Renewal) -> None:
        alpha_A1M = self._tensor(renewal.alpha_AM)[:, None]
        psi_A1d = self._tensor(renewal.psi_Ad)[:, None]
        active_A1 = torch.ones(alpha_A1M.shape[:2], dtype=torch.bool, device=alpha_A1M.device)
        with self._memory:
            self.frl.renew(alpha_A1M, psi_A1d, active_A1, slice(index, index + 1))
            self.versions[index] = renewal.version
        self._note(index, renewal.tickets)

    def _note(self, index: int, tickets: Iterable[int]) -> None:
        known = self._tickets[index]
        known |= dict.fromkeys(tickets)
        for ticket in list(known)[: max(len(known) - _TICKETS_KEPT, 0)]:
            del known[ticket]

    def _snapshot(self, index: int) -> Snapshot:
        return Snapshot(
            self.versions[index],
            self.frl.prototypes_NMd.detach()[index].cpu().numpy(),
            self.frl.importance_NM[index].cpu().numpy(),
            tuple(self._tickets[index]),
        )

    @torch.no_grad()
    def _restore(self, index: int, snapshot: Snapshot) -> None:
        with self._memory:
            self.frl.prototypes_NMd[index].copy_(torch.from_numpy(snapshot.prototypes_Md))
            self.frl.importance_NM[index].copy_(torch.from_numpy(snapshot.importance_M))
            self.versions[index] = self.snapshot_versions[index] = snapshot.version
        self._note(index, snapshot.tickets)

    def _compact(self, index: int) -> None:
        self.journals[index].compact(self._snapshot(index))
        self.snapshot_versions[index] = self.versions[index]

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values.copy()).to(
            self.frl.prototypes_NMd
        )  # a copy: what came by reference is read-only

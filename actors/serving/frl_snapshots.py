"""Copies of FRLs at the front end: for replicas, which read what owners renew, and for owners that lose a node."""

from collections.abc import Collection

from actors.rounds.messages import HostState
from actors.rounds.stubs import HostCalls


class FrlSnapshots:
    """The newest snapshot of each client that was worth fetching."""

    def __init__(self) -> None:
        self.renewals_lost = 0  # with a node and its journals, since the last snapshot kept here
        self._snapshots: dict[int, tuple[int, bytes]] = {}  # by client: version, file

    async def sync_owner(
        self, owner: HostCalls, before: HostState | None, seen: HostState, replicated: Collection[int]
    ) -> HostState:
        """Give an owner back what it has lost, or fetch what it has gained; its state afterwards."""
        if newer := self._newer_than(seen):  # it came back on another node, without its journal
            await owner.adopt(newer)
            seen = await owner.state()
        known = before.versions if before else seen.versions
        self.renewals_lost += sum(max(k - v, 0) for k, v in zip(known, seen.versions, strict=True))
        due = {
            client: version
            for client, version, compacted in zip(seen.clients, seen.versions, seen.snapshot_versions, strict=True)
            if self._version(client) < (version if client in replicated else compacted)
        }
        if due and not newer:
            snapshots = await owner.snapshots(tuple(due))
            self._snapshots |= {client: (due[client], content) for client, content in snapshots.items()}
        return seen

    async def sync_replica(self, replica: HostCalls, seen: HostState) -> None:
        """Hand a replica what its owner has renewed."""
        if newer := self._newer_than(seen):
            await replica.adopt(newer)

    def _newer_than(self, seen: HostState) -> dict[int, bytes]:
        known = zip(seen.clients, seen.versions, strict=True)
        return {client: self._snapshots[client][1] for client, version in known if self._version(client) > version}

    def _version(self, client: int) -> int:
        return self._snapshots[client][0] if client in self._snapshots else 0

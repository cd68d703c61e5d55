"""FRLs kept at the front end: for replicas, which read what their owner renews, and for owners that lose their host."""

from collections.abc import Collection
from typing import Any

from actors.host import HostState


class Keeper:
    """The newest snapshot of each client that was worth fetching."""

    def __init__(self) -> None:
        self.lost = 0  # renewals that a host lost with its journal, since the last snapshot kept here
        self._snapshots: dict[int, tuple[int, bytes]] = {}  # by client: version, bytes

    async def look_after(
        self, owner: Any, before: HostState | None, seen: HostState, replicated: Collection[int]
    ) -> HostState:
        """Give an owner back what it has lost, or fetch what it has gained; its state afterwards."""
        if older := self._newer_than(seen):  # it came back on another host, without its journal
            await _result(owner.adopt.remote(older))
            seen = await _result(owner.state.remote())
        known = before.versions if before else seen.versions
        self.lost += sum(max(k - v, 0) for k, v in zip(known, seen.versions, strict=True))
        due = {
            client: version
            for client, version, compacted in zip(seen.clients, seen.versions, seen.snapshot_versions, strict=True)
            if self._version(client) < (version if client in replicated else compacted)
        }
        if due and not older:
            snapshots = await _result(owner.snapshots.remote(tuple(due)))
            self._snapshots |= {client: (due[client], content) for client, content in snapshots.items()}
        return seen

    async def bring_up_to_date(self, replica: Any, seen: HostState) -> None:
        """Hand a replica what its owner has renewed."""
        if newer := self._newer_than(seen):
            await _result(replica.adopt.remote(newer))

    def _newer_than(self, seen: HostState) -> dict[int, bytes]:
        known = zip(seen.clients, seen.versions, strict=True)
        return {client: self._snapshots[client][1] for client, version in known if self._version(client) > version}

    def _version(self, client: int) -> int:
        return self._snapshots[client][0] if client in self._snapshots else 0


async def _result(ref: Any) -> Any:
    return await ref

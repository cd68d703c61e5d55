"""What is known about every host, the roster made of them, and the batches under way with each roster."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from actors.errors import Fault, NoExpertsError
from actors.rounds.calls import Ref
from actors.rounds.fault_policy import Health, State
from actors.rounds.messages import HostState
from actors.rounds.roster import Host, Roster
from actors.serving.system import System
from airmoe_ray.model.routing import Participants

log = logging.getLogger("airmoe")


@dataclass
class HostRecord:
    """One host and what is known about it."""

    host: Host
    health: Health = field(default_factory=Health)
    seen: HostState | None = None  # its last answer to a probe
    probing: bool = False
    asked_for: bool = False  # it is to be looked after now and on all its threads, not with the next poll


class HostRecords:
    """Records of all hosts by key, and the newest roster made of them."""

    def __init__(self, system: System, hosts: Mapping[str, tuple[Host, HostState]]) -> None:
        self.system = system
        self.total = system.config.experts.count  # N
        self.records = {key: HostRecord(host, Health(State.UP), seen) for key, (host, seen) in hosts.items()}
        self.changed = asyncio.Event()  # a host is new or missing: to be looked after at once
        self.version = 0  # of the newest roster
        self._under_way: Counter[int] = Counter()  # batches by the roster they were sent with
        self._published: tuple[Any, ...] = ()
        self.publish()

    def resize(self, clients: int) -> None:
        """Change N; the next roster that is published has it."""
        self.total = clients

    def publish(self) -> None:
        """Make a new roster if who takes part has changed, and send it to the cloud."""
        up = tuple(record.host for record in self.records.values() if record.health.state is State.UP)
        covered = {client for host in up for client in host.clients}
        by_client = self.by_client()
        missing = {
            client: fault
            for client in range(self.total)
            if client not in covered and (fault := _fault_of(by_client.get(client, []))) is not None
        }
        facts = (self.total, tuple(host.key for host in up), tuple(missing.items()))
        if facts == self._published:
            return
        self._published, self.version = facts, self.version + 1
        self._up = {client for client in covered if client < self.total}
        self._roster = Roster(self.version, self.total, self.system.channel, up, missing)
        self.send_roster()
        if missing:
            self.changed.set()

    def check_up(self, participants: Participants) -> None:
        """Raise where no client of a request is up; a round needs one, also where the cloud's head answers alone."""
        if any(participants.no_client or participants.includes(client) for client in self._up):
            return
        if isinstance(participants.only, int):
            raise NoExpertsError(f"expert {participants.only} is not up at the moment; it restarts by itself")
        raise NoExpertsError("no expert is up at the moment; they restart by themselves")

    def send_roster(self) -> Ref[None]:
        """Send the newest roster to the cloud; the reference tells when it has arrived."""
        return self.system.cloud.connect(self._roster)

    def by_client(self) -> dict[int, list[HostRecord]]:
        """Owner and replicas of each client, without those that are leaving."""
        found: dict[int, list[HostRecord]] = {}
        for record in self.records.values():
            if record.health.state is not State.DRAINING:
                for client in record.host.clients:
                    found.setdefault(client, []).append(record)
        return found

    def record_faults(
        self, faults: Mapping[str, Fault], *, answered: Collection[str] = (), heard: Collection[str] = ()
    ) -> None:
        """Enter the faults of a round in the health records; hosts that were `heard` did their whole work well."""
        for key, record in self.records.items():
            if key in faults:
                after = self.system.config.cluster.quarantine_after
                record.health = record.health.failed(faults[key], now=time.monotonic(), quarantine_after=after)
                record.asked_for = True
                log.warning(record.host.describe(faults[key].value))
            elif key in answered or key in heard:
                record.health = record.health.answered(heard=key in heard)
        if faults:
            self.changed.set()
            self.publish()

    def notice(self, processes: Mapping[str, int]) -> None:
        """A host that answers from another process than was last seen has restarted: it is looked after at once."""
        for key, process in processes.items():
            record = self.records.get(key)
            if record is not None and record.seen is not None and record.seen.process != process:
                record.asked_for = True
                self.changed.set()

    # hosts come and go

    def add(self, host: Host) -> None:
        """A new host, which takes part once a probe of it has passed."""
        self.records[host.key] = HostRecord(host)
        self.changed.set()

    def make_again(self, record: HostRecord) -> None:
        """Another actor for a host whose constructor failed: such a one Ray does not start again.

        Not for one that is leaving: nobody would end it.
        """
        if record.host.key in self.records and record.health.state is not State.DRAINING:
            fresh = self.system.remake_host(record.host)
            # the new record first, so that whoever looks meanwhile finds an owner of every client
            self.records[fresh.key] = HostRecord(fresh, seen=record.seen)
            del self.records[record.host.key]
            self.publish()

    async def drain(self, leaving: Collection[HostRecord]) -> None:
        """Take hosts off the roster, wait for the rounds they are in, then end them."""
        for record in leaving:
            record.health = Health(State.DRAINING)
        self.publish()
        while any(version < self.version for version in self._under_way):
            await asyncio.sleep(0.05)
        for record in leaving:
            self.records.pop(record.host.key, None)
            self.system.remove_host(record.host)

    @contextmanager
    def batch_under_way(self) -> Iterator[int]:
        """Count a batch as under way with the newest roster; its version."""
        version = self.version
        self._under_way[version] += 1
        try:
            yield version
        finally:
            self._under_way[version] -= 1
            if not self._under_way[version]:
                del self._under_way[version]


def _fault_of(records: Collection[HostRecord]) -> Fault | None:
    """Why nobody speaks for a client; None for a new one that has yet to come up: nothing is lost without it."""
    if records and all(record.health.state is State.STARTING and record.seen is None for record in records):
        return None
    return next((record.health.fault for record in records if record.health.fault), Fault.RESTARTING)

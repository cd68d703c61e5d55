"""Keeps the system whole: the loop that looks after hosts, their load, replicas, scaling and status.

Policy decides (`fault_policy.py`, `replica_policy.py`), the supervisor acts. All of it runs on the front end's event
loop and never makes a request wait.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from ray.exceptions import RayError

from actors.cluster.placement import HostPlan, plan_hosts
from actors.errors import ClusterError
from actors.rounds.messages import BatchResult, HostState
from actors.rounds.roster import Host
from actors.serving.cloud_link import CloudLink
from actors.serving.host_records import HostRecords
from actors.serving.load_window import LoadWindow
from actors.serving.probing import Prober
from actors.serving.replica_policy import BusyMeter, Pressure, hot_load, replicas_wanted
from actors.serving.status import ExpertStatus, status_of
from actors.serving.system import System
from airmoe_ray.errors import UserError
from airmoe_ray.model.routing import Participants
from airmoe_ray.radio.ledger import check_budget

log = logging.getLogger("airmoe")
_POLL_EVERY_S = 5.0  # how often hosts that are up are asked for their state


class Supervisor:
    """Looks after the clients of a served run, and answers for them."""

    def __init__(self, system: System, hosts: Mapping[str, tuple[Host, HostState]]) -> None:
        self.system, self.config = system, system.config
        self.hosts = HostRecords(system, hosts)
        self.prober, self.cloud = Prober(self.hosts), CloudLink(self.hosts)
        self.load = LoadWindow(self.total, self.config.serve.load_window)
        self.busy = BusyMeter()
        self._noted: dict[str, HostState] = {}  # states whose working time was taken in
        # one change of who takes part at a time: a host drains before its clients return
        self._scaling = asyncio.Lock()

    @property
    def total(self) -> int:
        """N: how many clients there are, up or not."""
        return self.hosts.total

    def check_up(self, participants: Participants) -> None:
        """Raise where no client of a request is up."""
        self.hosts.check_up(participants)

    @property
    def renewals_lost(self) -> int:
        """Renewals that hosts lost with their journals."""
        return self.prober.snapshots.renewals_lost

    def count(self, batch: BatchResult) -> None:
        """Count a finished batch as load."""
        for selected_K in batch.selected_BK.tolist():
            self.load.add(tuple(client for client in selected_K if 0 <= client < self.total))

    async def watch(self, waiting: Callable[[], int]) -> None:
        """Probe who is not up, poll who is, replicate who is hot; until cancelled.

        `waiting` counts the images that wait at the front end.
        """
        polled = rebalanced = time.monotonic()
        changed = self.hosts.changed
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self.config.cluster.probe_every_s)
            changed.clear()
            now = time.monotonic()
            poll = now - polled > _POLL_EVERY_S
            polled = now if poll else polled
            self.prober.start_probes(poll=poll)
            self._note_busy(now)
            if now - rebalanced > self.config.cluster.rebalance_every_s:
                rebalanced = now
                self._rebalance(waiting())

    # scaling

    def _note_busy(self, now: float) -> None:
        for key, record in self.hosts.records.items():
            if record.seen is not None and record.seen is not self._noted.get(key):
                self._noted[key] = record.seen
                self.busy.note(key, record.seen.busy_s, now)
        self.busy.forget_all_but(set(self.hosts.records))
        self._noted = {key: seen for key, seen in self._noted.items() if key in self.hosts.records}

    def _rebalance(self, images_waiting: int) -> None:
        cluster = self.config.cluster
        if cluster.max_replicas == 1 or len(self.load) < 20:
            return
        hot = hot_load(cluster.hot_load, clients=self.total, routed=self.config.routing.top_k)
        waiting = images_waiting > self.config.serve.max_batch
        for client, records in self.hosts.by_client().items():
            if client >= self.total:  # leaves with its host
                continue
            current = len(records)
            busy = sum(self.busy.share.get(record.host.key, 0.0) for record in records) / current
            pressure = Pressure(self.load.ratio_N[client], busy, waiting)
            wanted = replicas_wanted(
                pressure, hot_load=hot, hot_busy=cluster.hot_busy, most=cluster.max_replicas, current=current
            )
            if wanted != current:
                log.info("expert %d: %s, %d -> %d hosts", client, pressure, current, wanted)
                asyncio.create_task(self._follow(client, wanted))  # noqa: RUF006

    async def _follow(self, client: int, hosts: int) -> None:
        """Replicate as policy wants, where there is room."""
        try:
            await self.replicate(client, hosts)
        except ClusterError as error:
            log.warning("expert %d stays as it is: %s", client, error)

    async def replicate(self, client: int, hosts: int) -> None:
        """Bring a client to this many hosts (owner included) without stopping anything.

        A replica holds this one client, also where its owner holds several.
        """
        if not 0 <= client < self.total:
            raise UserError(f"expert {client}: there are experts 0 to {self.total - 1}")
        if hosts < 1:
            raise UserError(f"expert {client}: {hosts} hosts; at least 1, the owner")
        async with self._scaling:
            records = self.hosts.by_client().get(client, [])
            replica = HostPlan((client,), self.config.cluster.pin.get(client))
            if hosts > len(records):
                await asyncio.to_thread(self.system.check_room, [replica] * (hosts - len(records)))
            for _ in range(hosts - len(records)):
                self.hosts.add(self.system.make_host(replica, replica=True))
            replicas = [record for record in records if not record.host.owner]
            await self.hosts.drain(replicas[: max(len(records) - hosts, 0)])

    async def scale(self, experts: int) -> None:
        """Change N: new experts come from the run's checkpoint folder, removed ones are drained first.

        Added clients get hosts of their own. Of a host whose clients are removed in part, the rest goes on: its actor
        ends with its last client, and until then those who left can come back at once.
        """
        fewest = self.config.routing.top_k
        if experts < fewest:
            raise UserError(f"{experts} experts: routing.top_k = {fewest} needs at least as many")
        count = {"experts": self.config.experts.model_copy(update={"count": experts})}
        check_budget(self.config.model_copy(update=count))
        async with self._scaling:
            there = self.hosts.by_client().keys()
            added = [client for client in range(self.total, experts) if client not in there]
            for client in added:  # all files must be there before anything changes
                await asyncio.to_thread(self.system.fetch, client)
            hosts = plan_hosts(self.config.cluster, added, size=self.system.plan.experts_per_actor)
            if hosts:
                await asyncio.to_thread(self.system.check_room, hosts)
            records = self.hosts.records.values()
            leaving = [record for record in records if min(record.host.clients) >= experts]
            self.hosts.resize(experts)
            self.load.resize(experts)
            for host in hosts:
                self.hosts.add(self.system.make_host(host))
            self.hosts.publish()
            await self.hosts.drain(leaving)

    # what people see

    def status(self) -> list[ExpertStatus]:
        """Every client with its owner's node and state."""
        by_client, ratio, selected = self.hosts.by_client(), self.load.ratio_N, self.load.selected_N.tolist()
        knows = self.system.card.clients
        return [
            status_of(
                client,
                by_client.get(client, []),
                load_ratio=ratio[client],
                selected=selected[client],
                restarts=self.prober.restarts[client],
                knows=knows[client] if client < len(knows) else None,
            )
            for client in range(self.total)
        ]

    def close(self) -> None:
        """End every host."""
        for record in self.hosts.records.values():
            with contextlib.suppress(RayError, ValueError):
                self.system.remove_host(record.host)
        self.hosts.records.clear()

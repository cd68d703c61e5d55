"""Keeps the system whole: health of every host, the roster that rounds use, replicas, snapshots, scaling.

Policy decides (`policy.py`), the supervisor acts. All of it runs on the front end's event loop and never makes a
request wait.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayError

from actors.errors import last_line
from actors.host import HostState
from actors.keeper import Keeper
from actors.load import LoadWindow
from actors.messages import BatchAnswer
from actors.placement import Pack, packs
from actors.policy import Fault, Health, State, replicas_wanted
from actors.roster import Instance, Roster
from actors.status import ExpertStatus, Member, status_of
from actors.system import System
from airmoe_ray.errors import UserError
from airmoe_ray.ledger import check_budget

log = logging.getLogger("airmoe")
_POLL_EVERY_S = 5.0  # how often hosts that are up are asked for their state


class Supervisor:
    """Members, roster and the loop that mends them."""

    def __init__(self, system: System, hosts: dict[str, tuple[Instance, HostState]]) -> None:
        self.system, self.config = system, system.config
        self.total = self.config.experts.count
        self.load = LoadWindow(self.total, self.config.serve.load_window)
        self.members = {key: Member(i, Health(State.UP), seen) for key, (i, seen) in hosts.items()}
        self.in_flight: Counter[int] = Counter()  # batches by the roster they were sent with
        self._keeper = Keeper()
        self._restarts: Counter[int] = Counter()  # by client, of owners
        self._changed = asyncio.Event()
        self._scaling = (
            asyncio.Lock()
        )  # one change of who takes part at a time: a host drains before its clients return
        self._version = 0
        self._published: tuple[Any, ...] = ()
        self.publish()

    # the roster

    def publish(self) -> None:
        """Make a new roster if who takes part has changed."""
        up = tuple(m.instance for m in self.members.values() if m.health.state is State.UP)
        covered = {client for instance in up for client in instance.clients}
        holders = self._holders()
        missing = {
            client: fault
            for client in range(self.total)
            if client not in covered and (fault := _fault_of(holders.get(client, []))) is not None
        }
        facts = (self.total, tuple(i.key for i in up), tuple(missing.items()))
        if facts == self._published:
            return
        self._published, self._version = facts, self._version + 1
        self.someone_is_up = bool(up)
        self._roster = Roster(self._version, self.total, self.system.channel, up, missing)
        self.introduce()
        if missing:
            self._changed.set()

    @property
    def roster_version(self) -> int:
        """Of the newest roster."""
        return self._version

    def introduce(self) -> Any:
        """Send the newest roster to the cloud; the reference tells when it arrived."""
        return self.system.cloud.connect.remote(self._roster)

    def record(self, faults: Mapping[str, Fault], *, heard: Collection[str] = ()) -> None:
        """Enter the faults of a round in the health records; those `heard` did their whole work well."""
        for key, member in self.members.items():
            if key in faults:
                after = self.config.cluster.quarantine_after
                member.health = member.health.failed(faults[key], quarantine_after=after)
                log.warning(member.instance.told(faults[key].value))
            elif key in heard:
                member.health = member.health.answered()
        if faults:
            self.publish()

    def count(self, batch: BatchAnswer) -> None:
        """Load of a finished batch."""
        for selected_K in batch.selected_BK.tolist():
            self.load.add(tuple(c for c in selected_K if c < self.total))

    # the loop

    async def watch(self) -> None:
        """Probe who is not up, poll who is, replicate who is hot; until cancelled."""
        polled = rebalanced = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self.config.cluster.probe_every_s)
            self._changed.clear()
            now = time.monotonic()
            poll = now - polled > _POLL_EVERY_S
            polled = now if poll else polled
            for member in list(self.members.values()):
                if not member.probing and (poll or member.health.state not in (State.UP, State.DRAINING)):
                    member.probing = True
                    asyncio.create_task(self._probe(member))  # noqa: RUF006  ends by itself within a deadline
            if now - rebalanced > self.config.cluster.rebalance_every_s:
                rebalanced = now
                self._rebalance()

    async def _probe(self, member: Member) -> None:
        late, ok = False, False
        was_up = member.health.state is State.UP
        handle, cluster = member.instance.handle, self.config.cluster
        # calls to an actor that has never been up wait for its constructor; to one that restarts they fail at once
        patience_s = cluster.start_deadline_s if member.health.state is State.STARTING else cluster.call_deadline_s
        try:
            call: Any = handle.state.remote() if was_up else handle.probe.remote()
            seen = await asyncio.wait_for(_result(call), patience_s)
            await asyncio.wait_for(self._update(member, seen), patience_s)
            ok = True
        except TimeoutError:
            late = True
        except RayError as error:
            log.debug("probe of %s: %s", member.instance.key, type(error).__name__)
            if isinstance(error, RayActorError) and error.actor_init_failed:
                self._make_again(member, last_line(error))
        finally:
            member.probing = False
        if member.instance.key not in self.members:
            return
        if was_up and late:
            self.record({member.instance.key: Fault.LATE})
            return
        if late and member.health.state is State.STARTING:  # it does not hang, it has yet to be placed
            log.warning("%s, which an autoscaler may make", member.instance.told("is waiting for room on the cluster"))
            return
        if not ok and was_up:
            self.record({member.instance.key: Fault.LOST})
            return
        member.health = member.health.probed(ok, late=late) if not was_up else member.health
        if member.health.must_restart:
            log.warning("%s; restarting it", member.instance.told("is hanging"))
            member.health = Health(State.RESTARTING)
            self.system.restart(handle)
        self.publish()

    def _make_again(self, member: Member, why: str) -> None:
        """Ray does not start an actor again whose constructor failed: another takes its place."""
        log.warning("%s (%s); making it anew", member.instance.told("could not start"), why)
        if self.members.pop(member.instance.key, None) is not None:
            fresh = self.system.remake_host(member.instance)
            self.members[fresh.key] = Member(fresh, seen=member.seen)
            self.publish()

    async def _update(self, member: Member, seen: HostState) -> None:
        """Notice restarts and lost renewals, keep snapshots, bring replicas up to date."""
        before, handle, owner = member.seen, member.instance.handle, member.instance.owner
        if before is not None and before.pid != seen.pid and owner:
            self._restarts.update(seen.clients)
        if self.config.serve.renew_frl and owner:
            copied = {c for m in self.members.values() if not m.instance.owner for c in m.instance.clients}
            seen = await self._keeper.look_after(handle, before, seen, copied)
        elif self.config.serve.renew_frl:
            await self._keeper.bring_up_to_date(handle, seen)
        member.seen = seen

    @property
    def renewals_lost(self) -> int:
        """Renewals that hosts lost with their journals."""
        return self._keeper.lost

    # scaling

    def _rebalance(self) -> None:
        cluster = self.config.cluster
        if cluster.max_replicas == 1 or len(self.load) < 20:
            return
        holders = self._holders()
        for client, load in enumerate(self.load.ratio_N):
            current = len(holders.get(client, []))
            wanted = replicas_wanted(
                load, hot_load=cluster.hot_load, most=cluster.max_replicas, current=max(current, 1)
            )
            if wanted != current and current:
                log.info("expert %d: load %.2f of fair, %d -> %d instances", client, load, current, wanted)
                asyncio.create_task(self.replicate(client, wanted))  # noqa: RUF006

    async def replicate(self, client: int, instances: int) -> None:
        """Bring a client to this many instances (owner included) without stopping anything.

        A replica holds this one client, also where its owner holds a pack.
        """
        if not 0 <= client < self.total:
            raise UserError(f"expert {client}: there are experts 0 to {self.total - 1}")
        if instances < 1:
            raise UserError(f"expert {client}: {instances} instances; at least 1, the owner")
        async with self._scaling:
            holders = self._holders().get(client, [])
            for _ in range(instances - len(holders)):
                self._admit(self.system.make_host(Pack((client,), self.config.cluster.pin.get(client)), replica=True))
            surplus = [m for m in holders if not m.instance.owner][: max(len(holders) - instances, 0)]
            await self._drain(surplus)

    async def scale(self, experts: int) -> None:
        """Change N: new experts come from the run's checkpoint folder, removed ones are drained first.

        Added clients get packs of their own. Of a pack that is removed in part, the rest goes on: its actor ends with
        its last client, and until then those who left can come back at once.
        """
        fewest = self.config.routing.top_k
        if experts < fewest:
            raise UserError(f"{experts} experts: routing.top_k = {fewest} needs at least as many")
        count = {"experts": self.config.experts.model_copy(update={"count": experts})}
        check_budget(self.config.model_copy(update=count))
        async with self._scaling:
            there = self._holders().keys()
            added = [client for client in range(self.total, experts) if client not in there]
            for client in added:  # all files must be there before anything changes
                await asyncio.to_thread(self.system.fetch, client)
            leaving = [m for m in self.members.values() if min(m.instance.clients) >= experts]
            self.total = experts
            self.load.resize(experts)
            for pack in packs(self.config.cluster, added):
                self._admit(self.system.make_host(pack))
            self.publish()
            await self._drain(leaving)

    def _admit(self, instance: Instance) -> None:
        self.members[instance.key] = Member(instance)
        self._changed.set()

    async def _drain(self, leaving: list[Member]) -> None:
        """Take members off the roster, wait for the rounds they are in, then end them."""
        for member in leaving:
            member.health = Health(State.DRAINING)
        self.publish()
        while any(count > 0 for version, count in self.in_flight.items() if version < self._version):
            await asyncio.sleep(0.05)
        for member in leaving:
            self.members.pop(member.instance.key, None)
            self.system.remove_host(member.instance)

    # what people see

    def status(self) -> list[ExpertStatus]:
        """Every client with its owner's home and state."""
        holders, ratio, selected = self._holders(), self.load.ratio_N, self.load.selected_N.tolist()
        return [
            status_of(
                client,
                holders.get(client, []),
                load_ratio=ratio[client],
                selected=selected[client],
                restarts=self._restarts[client],
            )
            for client in range(self.total)
        ]

    def _holders(self) -> dict[int, list[Member]]:
        """Members by client, without those that are leaving."""
        found: dict[int, list[Member]] = {}
        for member in self.members.values():
            if member.health.state is not State.DRAINING:
                for client in member.instance.clients:
                    found.setdefault(client, []).append(member)
        return found

    def close(self) -> None:
        """End every host."""
        for member in self.members.values():
            with contextlib.suppress(RayError, ValueError):
                self.system.remove_host(member.instance)
        self.members.clear()


def _fault_of(holders: Collection[Member]) -> Fault | None:
    """Why nobody speaks for a client; None for a new one that has yet to come up: nothing is lost without it."""
    if holders and all(m.health.state is State.STARTING and m.seen is None for m in holders):
        return None
    return next((m.health.fault for m in holders if m.health.fault), Fault.RESTARTING)


async def _result(ref: Any) -> Any:
    return await ref

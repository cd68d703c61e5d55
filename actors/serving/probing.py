"""Looks after every host: probes those that are not up, polls those that are, and makes good what they lost."""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.errors import Fault, last_line
from actors.rounds.calls import Ref
from actors.rounds.fault_policy import Health, State
from actors.rounds.messages import HostState
from actors.serving.frl_snapshots import FrlSnapshots
from actors.serving.host_records import HostRecord, HostRecords

log = logging.getLogger("airmoe")
T = TypeVar("T")


async def _answer(ref: Ref[T]) -> T:
    return await ref


async def _any_answer(ref: Ref[T]) -> None:
    """Wait for an answer, which may be an error: whoever sends one does not hang."""
    with contextlib.suppress(RayTaskError):
        await ref


class Prober:
    """Keeps the records of hosts true to what they answer."""

    def __init__(self, hosts: HostRecords) -> None:
        self.hosts, self.config = hosts, hosts.system.config
        self.snapshots = FrlSnapshots()
        self.restarts: Counter[int] = Counter()  # by client, of owners

    def start_probes(self, *, poll: bool) -> None:
        """Ask hosts that are not up, and with `poll` all of them; the answers are entered as they come."""
        for record in list(self.hosts.records.values()):
            idle = record.health.state in (State.UP, State.DRAINING)
            if not record.probing and (poll or record.asked_for or not idle):
                thorough = record.asked_for or record.health.state is not State.UP
                record.probing, record.asked_for = True, False
                probing = self._probe(record, thorough=thorough)
                asyncio.create_task(probing)  # noqa: RUF006  ends by itself within a deadline

    async def _probe(self, record: HostRecord, *, thorough: bool) -> None:
        was_up, key = record.health.state is State.UP, record.host.key
        try:
            fault = await self._ask(record, thorough=thorough)
        finally:
            record.probing = False
        if key not in self.hosts.records:  # it has left, or another actor has taken its place
            return
        if was_up and fault is Fault.LATE and record.health.state is State.UP:
            log.warning("%s", record.host.describe("does not answer"))
            record.health = record.health.unanswered()
            self.hosts.publish()
            return
        if was_up and fault is not None:
            self.hosts.record_faults({key: fault})
            return
        if fault is Fault.LATE and record.health.state is State.STARTING:  # it does not hang, it has yet to be placed
            what = record.host.describe("is waiting for room on the cluster")
            log.warning("%s, which an autoscaler may make", what)
            return
        if not was_up:
            record.health = record.health.probed(fault is None, late=fault is Fault.LATE)
        if record.health.must_restart:
            log.warning("%s; restarting it", record.host.describe("is hanging"))
            record.health = Health(State.RESTARTING)
            record.host.calls.restart()
        self.hosts.publish()

    async def _ask(self, record: HostRecord, *, thorough: bool) -> Fault | None:
        """Ask a host for its state, a suspect one on each of its threads; what was wrong, None: it answered.

        Its calls run on three threads (`host_actor`), and one that hangs leaves the others as lively as ever.
        """
        calls, state, cluster = record.host.calls, record.health.state, self.config.cluster
        # calls to an actor that has never been up wait for its constructor; to one that restarts they fail at once
        limit_s = cluster.start_deadline_s if state is State.STARTING else cluster.call_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                first = _answer(calls.state())
                if not thorough:
                    seen = await first
                elif state is State.UP:  # whether its work is good is for its rounds to judge
                    seen, *_ = await asyncio.gather(first, _any_answer(calls.probe()), _any_answer(calls.snapshots(())))
                else:
                    seen, *_ = await asyncio.gather(first, _answer(calls.probe()), _answer(calls.snapshots(())))
            await asyncio.wait_for(self._update(record, seen), limit_s)
        except TimeoutError:
            return Fault.LATE
        except RayError as error:
            log.debug("probe of %s: %s", record.host.key, type(error).__name__)
            if isinstance(error, RayActorError) and error.actor_init_failed:
                log.warning("%s (%s); making it anew", record.host.describe("could not start"), last_line(error))
                self.hosts.make_again(record)
            return Fault.LOST
        return None

    async def _update(self, record: HostRecord, seen: HostState) -> None:
        """Notice restarts and lost renewals, keep snapshots, bring replicas up to date."""
        before, host = record.seen, record.host
        if before is not None and before.pid != seen.pid and host.owner:
            self.restarts.update(seen.clients)
        if self.config.serve.renew_frl and host.owner:
            others = (other.host for other in self.hosts.records.values())
            replicated = {client for other in others if not other.owner for client in other.clients}
            seen = await self.snapshots.sync_owner(host.calls, before, seen, replicated)
        elif self.config.serve.renew_frl:
            await self.snapshots.sync_replica(host.calls, seen)
        record.seen = seen

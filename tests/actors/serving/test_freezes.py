"""Clients that freeze, die or dawdle at any exchange under steady traffic: every request is answered, and soon.

With a deadline per exchange of 5 s, a round that waited for its slowest client would take as long.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.errors import Fault
from actors.processes.frl_journal import Journal
from actors.serving.results import ImageResult

RATE = 4.0  # requests per second
FROZEN_S = 3.0
EXCHANGES = ("read", "forward", "transmit", "renew")
SEED = 5  # of every request, so that it is known who is routed


@pytest.fixture(scope="module")
def service(own_ray: None, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("freezes")
    with serve(folder, serve={"renew_frl": True}, cluster={"storage": str(folder / "storage")}) as service:
        service.segment_many(range(8), renew=True)
        for _ in range(8):
            service.segment(SEED, renew=True)
        yield service


class Traffic:
    """Requests at a steady rate, however long earlier ones take; what came of each."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.answers: list[tuple[float, float, ImageResult]] = []  # sent, seconds, answer
        self.failed: list[BaseException] = []

    async def _one(self) -> None:
        sent = time.monotonic()
        try:
            answer = await self.service.ask(SEED, renew=True)
            self.answers.append((sent, time.monotonic() - sent, answer))
        except Exception as error:
            self.failed.append(error)

    async def during(self, work: Callable[[], Any]) -> None:
        """Keep asking while `work` goes on in a thread."""
        working, asking = asyncio.create_task(asyncio.to_thread(work)), []
        while not working.done():
            asking.append(asyncio.create_task(self._one()))
            await asyncio.sleep(1 / RATE)
        await asyncio.gather(*asking, working)

    @property
    def slowest_s(self) -> list[float]:
        return sorted(seconds for _, seconds, _ in self.answers)

    def skipped(self) -> Counter[tuple[int, Fault]]:
        return Counter((client, fault) for _, _, answer in self.answers for client, fault in answer.skipped.items())


def comes_true(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not (true := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return true


def wait_for(condition: Callable[[], bool], within_s: float = 20) -> None:
    assert comes_true(condition, within_s), "waited in vain"


def play(service: Any, exchange: str, what: str, client: int) -> Traffic:
    """Traffic while one client misbehaves at an exchange, until it is well again."""
    traffic, pid = Traffic(service), service.status()[client].pid

    def story() -> None:
        order = service.order(exchange, client, what)
        wait_for(lambda: not order.exists())
        if what == "stop":
            time.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        wait_for(lambda: service.all_up() and not service.segment(SEED, renew=True).degraded)

    service.run(traffic.during(story))
    return traffic


def parts(service: Any) -> list[int]:
    handles = (service.system.cloud.handle, service.system.channel.handle)
    return ray.get([handle.__ray_call__.remote(lambda _: os.getpid()) for handle in handles])


def check(service: Any, exchange: str, what: str) -> None:
    client = max(service.segment(SEED).clients, key=lambda c: c.weight).id
    before, healthy = parts(service), statistics.median(service_time(service) for _ in range(3))
    with health_record(service) as entered:
        traffic = play(service, exchange, what, client)
    assert not traffic.failed
    times = traffic.slowest_s
    print(
        f"{what} at {exchange}: {len(times)} answers, healthy {healthy:.2f}, p50 {times[len(times) // 2]:.2f}, ", end=""
    )
    print(f"p99 {times[int(0.99 * len(times))]:.2f} s; {dict(traffic.skipped())}")
    assert times[int(0.99 * len(times))] < 1.5
    assert {c for c, _ in traffic.skipped()} == {client}
    expected = Fault.LOST if what == "die" else Fault.LATE
    assert traffic.skipped()[client, expected] >= 1
    assert {c for clients, _ in entered for c in clients} == {client}
    assert ((client,), expected) in entered
    assert parts(service) == before  # neither cloud nor channel was taken for the culprit


@contextmanager
def health_record(service: Any) -> Iterator[list[tuple[tuple[int, ...], Fault]]]:
    """What is entered in the health records meanwhile: clients of the host, and its fault."""
    hosts, entered = service.supervisor.hosts, []
    enter = hosts.record_faults

    def record_faults(faults: Any, **kw: Any) -> None:
        entered.extend((hosts.records[key].host.clients, fault) for key, fault in faults.items())
        enter(faults, **kw)

    hosts.record_faults = record_faults
    yield entered
    del hosts.record_faults


def service_time(service: Any) -> float:
    started = time.monotonic()
    service.segment(SEED, renew=True)
    return time.monotonic() - started


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_client_frozen_at_any_exchange_is_not_waited_for(exchange: str, service: Any) -> None:
    check(service, exchange, "stop")


@pytest.mark.parametrize("exchange", ["forward", "renew"])
def test_a_late_reply_is_left_out_and_its_client_waited_for_again_once_it_has_answered(
    exchange: str, service: Any
) -> None:
    check(service, exchange, "delay")


@pytest.mark.slow
def test_a_client_frozen_for_good_is_ended_and_started_again(service: Any) -> None:
    client = max(service.segment(SEED).clients, key=lambda c: c.weight).id
    traffic, pid = Traffic(service), service.status()[client].pid

    def story() -> None:
        os.kill(pid, signal.SIGSTOP)  # never to go on
        wait_for(lambda: service.status()[client].pid != pid and service.all_up(), 60)
        wait_for(lambda: not service.segment(SEED, renew=True).degraded)

    began = time.monotonic()
    service.run(traffic.during(story))
    times = traffic.slowest_s
    print(
        f"frozen for good: up again after {time.monotonic() - began:.1f} s, p99 {times[int(0.99 * len(times))]:.2f} s"
    )
    assert not traffic.failed
    assert times[int(0.99 * len(times))] < 1.5
    assert {c for c, _ in traffic.skipped()} == {client}
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "what"), [*((one, "die") for one in EXCHANGES), ("read", "delay"), ("transmit", "delay")]
)
def test_a_client_killed_or_slow_at_any_exchange_costs_nobody_an_answer(exchange: str, what: str, service: Any) -> None:
    check(service, exchange, what)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_whoever_is_killed_the_journals_hold_what_answers_have_acknowledged_and_nothing_twice(
    kills: int, service: Any
) -> None:
    before = {client: len(on_disk(service, client)) for client in range(4)}
    traffic, draw = Traffic(service), random.Random(0)
    dead: set[int] = set()  # processes

    def story() -> None:
        while len(dead) < kills:
            # renewals move prototypes, and so who is routed
            client = draw.choice([client.id for client in service.segment(SEED).clients if client.weight > 0])
            pid = service.status()[client].pid
            if len(dead) % 2 == 0:  # in the middle of a renewal, or at any moment
                order = service.order("renew", client, "die")
                if not comes_true(lambda order=order: not order.exists(), 10):
                    order.unlink(missing_ok=True)
                    continue
            else:
                time.sleep(draw.uniform(0.0, 0.5))
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid, client=client: service.status()[client].pid != pid and service.all_up(), 60)
            dead.add(pid)

    service.run(traffic.during(story), within_s=60 + 30 * kills)
    print(f"{len(dead)} kills, {len(traffic.answers)} answers")
    assert not traffic.failed
    for client in range(4):
        records = on_disk(service, client)
        tickets = [ticket for record in records for ticket in record.tickets]
        assert len(tickets) == len(set(tickets))
        acknowledged = sum(client in answer.renewed for _, _, answer in traffic.answers)
        heard = sum(answer.clients[client].weight > 0 for _, _, answer in traffic.answers)
        added = sum(len(record.tickets) for record in records[before[client] :])
        assert acknowledged <= added <= heard  # what was written but not confirmed was told as skipped
    unconfirmed = [
        client
        for _, _, answer in traffic.answers
        for client in (c.id for c in answer.clients if c.weight > 0)
        if client not in answer.renewed and client not in answer.skipped
    ]
    assert not unconfirmed


def on_disk(service: Any, client: int) -> list[Any]:
    folder = Path(service.config.cluster.storage) / "frl"
    return Journal(folder, client, fingerprint=service.fingerprint(client)).load()[1]

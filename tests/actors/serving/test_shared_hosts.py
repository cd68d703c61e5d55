"""Many clients in few actors: the answers of one actor each, one fate per host, one memory per client."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.cluster.connection import cluster
from actors.serving.results import ImageResult

EXPERTS, PER_ACTOR = 40, 20
SHARED = {
    "experts": {"count": EXPERTS},
    "serve": {"renew_frl": True},
    "cluster": {"experts_per_actor": PER_ACTOR},
}


@pytest.fixture(scope="module")
def system(own_ray: None, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(tmp_path_factory.mktemp("shared"), **SHARED) as service:
        yield service


@pytest.fixture
def service(system: Any) -> Any:
    for order in system.faults.iterdir():
        order.unlink()
    system.wait(system.all_up)
    return system


def pids(service: Any) -> list[int | None]:
    return [status.pid for status in service.status()]


def test_clients_that_share_a_host_answer_as_the_in_process_model_does_and_keep_their_own_gamma(service: Any) -> None:
    assert [pids(service).count(pid) for pid in dict.fromkeys(pids(service))] == [PER_ACTOR, PER_ACTOR]
    for seed in range(3):
        answer, expected = service.segment(seed), service.expected(seed)
        assert service.agrees(answer, expected)
        js = np.array([client.js for client in answer.clients])
        assert np.allclose(js, expected.routing.js_BN[0].numpy(), atol=1e-6)
        gamma = expected.round.gamma_BN[0]
        assert all(abs(c.gamma - complex(gamma[c.id])) < 1e-6 for c in answer.clients if c.gamma is not None)


def test_a_frozen_host_of_many_clients_costs_one_wait_and_no_substitute_is_sought_there(service: Any) -> None:
    for _ in range(6):
        service.segment(5)
    client = max(service.segment(5).clients, key=lambda c: c.weight).id
    pid = service.status()[client].pid
    order = service.order("forward", client, "stop")
    began = time.monotonic()
    answer = service.segment(5)
    took_s = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    assert not order.exists()
    heard = [c.id for c in answer.clients if c.weight > 0]
    assert heard
    assert all(service.status()[c].pid != pid for c in heard)
    assert took_s < 2.5, "the host was waited for more than once"
    service.wait(lambda: not service.segment(5).degraded)


def test_some_clients_of_a_host_leave_and_come_back_while_requests_run(service: Any) -> None:
    homes = pids(service)

    async def change() -> list[ImageResult]:
        done, answers = asyncio.Event(), []

        async def ask() -> None:
            while not done.is_set():
                answers.append(await service.ask(len(answers)))

        asking = asyncio.create_task(ask())
        for experts in (30, 15, 40):
            await service.supervisor.scale(experts)
            while not (service.all_up() and len(service.status()) == experts):
                await asyncio.sleep(0.05)
            answers.append(await service.ask(7))
            assert len(answers[-1].clients) == experts
            after = pids(service)
            if experts == 30:
                assert after == homes[:30]  # ten left a host on which ten stayed
            elif experts == 15:
                assert after == homes[:15]
        done.set()
        await asking
        return answers

    answers = service.run(change())
    assert not any(answer.skipped for answer in answers)
    assert pids(service)[:20] == homes[:20]  # five of them had left, and came back where they were
    assert len(set(pids(service)[20:])) == 1
    assert pids(service)[20] != homes[20]  # the whole host had gone
    assert service.agrees(service.segment(7), service.expected(7))


def test_a_killed_host_is_named_as_one_and_comes_back_with_every_clients_memory(service: Any) -> None:
    renewed = {c.id for seed in range(8) for c in service.segment(seed, renew=True).clients if c.weight > 0}
    before = {client: service.memory(client) for client in renewed}
    lost = min(renewed) // PER_ACTOR
    restarts = [status.restarts for status in service.status()]
    service.kill(lost * PER_ACTOR)
    answer = service.segment(0)
    first, last = lost * PER_ACTOR, (lost + 1) * PER_ACTOR - 1
    assert answer.reason == f"experts {first}-{last} were lost"
    service.wait(service.all_up)
    assert {client: service.memory(client) for client in renewed} == before
    again = [status.restarts - r for status, r in zip(service.status(), restarts, strict=True)]
    assert again == [int(client // PER_ACTOR == lost) for client in range(EXPERTS)]
    journals = {
        path.stem.partition("-")[0] for path in (service.system.checkpoint.parent / "state" / "frl").glob("*.journal")
    }
    assert journals == {f"expert_{client:02d}" for client in renewed}  # only of clients that had something to keep


def test_one_broken_expert_keeps_its_host_quarantined_until_its_own_probe_passes(service: Any) -> None:
    client = max(service.segment(3).clients, key=lambda c: c.weight).id
    host = client // PER_ACTOR
    owner = service.owner(client).handle
    ray.get(owner.__ray_call__.remote(break_expert, client))
    for _ in range(3):
        assert service.segment(3).degraded
    assert service.status()[client].state == "quarantined"
    time.sleep(3 * service.config.cluster.probe_every_s)  # probes of the others' turn do not bring it back
    assert {status.state for status in service.status()[host * PER_ACTOR : (host + 1) * PER_ACTOR]} == {"quarantined"}
    ray.get(owner.__ray_call__.remote(mend_expert, client))
    service.wait(service.all_up)
    assert not service.segment(3).degraded


def break_expert(host: Any, client: int) -> None:
    bias = host.clients.experts[host.index_of[client]].decoder.bias
    host.kept_bias = bias.detach().clone()
    bias.data.fill_(float("nan"))


def mend_expert(host: Any, client: int) -> None:
    host.clients.experts[host.index_of[client]].decoder.bias.data.copy_(host.kept_bias)


def test_a_client_that_shares_a_host_can_have_a_replica_that_reads_what_its_owner_renews(service: Any) -> None:
    client = max(service.segment(2).clients, key=lambda c: c.weight).id
    service.run(service.supervisor.replicate(client, 2))
    service.wait(lambda: service.status()[client].replicas == 2)
    assert sum(status.replicas for status in service.status()) == EXPERTS + 1
    for _ in range(2):  # owner and replica in turn
        assert service.segment(2, renew=True).clients[client].weight > 0
    replica = next(record.host.calls for record in service.records if not record.host.owner)
    service.wait(lambda: replica.state().get().versions[0] == versions(service)[client])
    assert versions(service)[client] >= 2
    service.run(service.supervisor.replicate(client, 1))
    assert service.status()[client].replicas == 1


def versions(service: Any) -> list[int]:
    found = [0] * EXPERTS
    for record in service.records:
        if record.host.owner:
            state = record.host.calls.state().get()
            for client, version in zip(state.clients, state.versions, strict=True):
                found[client] = version
    return found


@pytest.mark.slow
def test_a_thousand_clients_start_on_two_cores_within_a_minute_and_answer(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    """The speed of their routing is a figure of `airmoe bench --only packed`."""
    ray.shutdown()
    with cluster(cpus=2), serve(tmp_path, experts={"count": 1000}, cluster={"experts_per_actor": 500}) as service:
        print(f"1000 clients up after {service.started_s:.1f} s")
        assert service.started_s < 60
        for seed in range(3):
            answer = service.segment(seed)
            assert service.agrees(answer, service.expected(seed))
            assert len(answer.clients) == 1000
            assert sum(c.js is not None for c in answer.clients) == 1000

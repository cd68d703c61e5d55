"""The whole system: requests in, the in-process model's answers out, while experts come and go."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.errors import DeadlineError, OverloadedError
from actors.processes.frl_journal import Journal
from actors.serving.results import ImageResult
from airmoe_ray.model.routing import Participants
from tests.actors.conftest import picture

SERVE = {"queue": 8, "max_batch": 4, "in_flight": 2, "renew_frl": True}


@pytest.fixture(scope="module")
def service(own_ray: None, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("service")
    with serve(folder, serve=SERVE, cluster={"storage": str(folder / "storage")}) as service:
        yield service


def test_a_request_gets_the_answer_of_the_in_process_model_with_its_account(service: Any) -> None:
    answer, expected = service.segment(1), service.expected(1)
    assert service.agrees(answer, expected)
    assert not answer.degraded
    routed = expected.routing.transmit_BK[0][expected.beta_BK[0] > 0].tolist()
    assert {client.id for client in answer.clients if client.weight > 0} == set(routed)
    gamma = expected.round.gamma_BN[0]
    assert all(abs(client.gamma - complex(gamma[client.id])) < 1e-6 for client in answer.clients if client.gamma)
    assert sum(client.weight for client in answer.clients) == pytest.approx(1)


def test_requests_at_once_share_batches_and_each_gets_its_own_answer(service: Any) -> None:
    service.batches.clear()
    answers = service.segment_many(range(8))
    assert all(service.agrees(answer, service.expected(seed)) for seed, answer in enumerate(answers))
    assert sum(service.batches) == 8
    assert 1 < max(service.batches) <= SERVE["max_batch"]


def test_only_equal_sizes_and_kinds_of_channel_share_a_batch(service: Any) -> None:
    kinds = [{}, {"size": (48, 64)}, {"kind": "digital"}, {"kind": "ideal"}]

    async def mixed() -> list[ImageResult]:
        return await asyncio.gather(*(service.ask(seed, **kinds[seed % 4]) for seed in range(8)))

    for seed, answer in enumerate(service.run(mixed())):
        assert answer.batch_size <= 2
        assert service.agrees(answer, service.expected(seed, **kinds[seed % 4]))


def test_requests_of_any_snr_and_k_share_a_batch_and_each_gets_the_answer_it_would_get_alone(service: Any) -> None:
    chosen = [{"snr_db": snr_db, "top_k": top_k} for snr_db, top_k in ((0.0, 1), (30.0, 2), (10.0, 4), (3.0, 3))]
    service.batches.clear()

    async def mixed() -> list[ImageResult]:
        return await asyncio.gather(*(service.ask(seed, **chosen[seed % 4]) for seed in range(8)))

    answers = service.run(mixed())
    assert max(service.batches) > 1
    for seed, answer in enumerate(answers):
        wanted = service.settings(**chosen[seed % 4])
        alone = service.reference.run([picture(seed)], [seed], routing_config=wanted.routing, channel=wanted.channel)
        assert service.agrees(answer, alone)
        assert sum(client.selected for client in answer.clients) == wanted.routing.top_k
        assert answer.channel.snr_db == wanted.channel.snr_db
        assert answer.nmse == pytest.approx(float(alone.nmse_B[0]), rel=1e-3)


def test_an_image_takes_a_call_per_client_and_exchange_and_two_more(service: Any) -> None:
    service.calls.clear()
    answer = service.segment(1)
    routed = sum(client.weight > 0 for client in answer.clients)
    assert service.calls == [4 + 2 * routed + 2]  # read; forward, transmit; what arrives, and the batch itself


def test_answers_of_one_client_or_without_one_batch_among_themselves_and_are_no_load(service: Any) -> None:
    choices: list[dict[str, Any]] = [{"only": 3}, {"without": 0}]
    service.segment(0)
    before, batches = [status.selected for status in service.status()], len(service.batches)

    async def mixed() -> list[ImageResult]:
        return await asyncio.gather(*(service.ask(seed, whose=Participants(**choices[seed % 2])) for seed in range(6)))

    for seed, answer in enumerate(service.run(mixed())):
        assert answer.batch_size <= 3
        assert service.agrees(answer, service.reference.run([picture(seed)], [seed], **choices[seed % 2]))
        chosen = [client.id for client in answer.clients if client.weight > 0]
        assert chosen == [3] if seed % 2 == 0 else 0 not in chosen
        left_out = answer.clients[0]
        assert (left_out.score, left_out.probability) == (None, 0.0)
        assert left_out.js is not None  # it answered the query like everybody
        assert not answer.degraded or answer.all_faded
    assert [status.selected for status in service.status()] == before
    assert len(service.batches) == batches


def test_one_more_than_the_queue_holds_is_refused_at_once(service: Any) -> None:
    answers = service.segment_many(range(20))
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert len(refused) == 20 - SERVE["queue"]
    assert all(isinstance(answer, ImageResult) for answer in answers if answer not in refused)


def test_a_request_whose_time_is_over_ends_with_that_and_blames_nobody(service: Any) -> None:
    order = service.order("read", 0, "hang")
    for _ in range(3):
        with pytest.raises(DeadlineError):
            service.segment(1, deadline_s=0.3)
    order.unlink()
    assert all(record.health.failures == 0 for record in service.records)
    assert not service.segment(1).degraded


def test_experts_and_replicas_come_and_go_while_requests_run_and_none_fails(service: Any) -> None:
    async def change() -> list[Any]:
        done, answers = asyncio.Event(), []

        async def ask() -> None:
            while not done.is_set():
                answers.append(await service.ask(len(answers)))

        asking = asyncio.create_task(ask())
        await service.supervisor.scale(3)
        answers.append(await service.ask(0))
        await service.supervisor.replicate(0, 2)
        await service.supervisor.scale(4)
        while [(s.state, s.replicas) for s in service.status()] != [("up", 2), ("up", 1), ("up", 1), ("up", 1)]:
            await asyncio.sleep(0.1)
        answers += [await service.ask(1), await service.ask(1)]  # owner and replica in turn
        await service.supervisor.replicate(0, 1)
        done.set()
        await asking
        return answers

    answers = service.run(change())
    assert {len(answer.clients) for answer in answers} == {3, 4}
    assert [s.replicas for s in service.status()] == [1, 1, 1, 1]
    assert all(service.agrees(answer, service.expected(1)) for answer in answers[-3:] if answer.seed == 1)


def test_an_answer_leaves_after_its_renewal_is_on_disk(service: Any, tmp_path: Path) -> None:
    activated = [0] * 4
    for seed in range(4):
        for client in service.segment(seed, renew=True).clients:
            activated[client.id] += client.weight > 0
        shutil.copytree(service.system.config.cluster.storage, tmp_path / str(seed))
        for client, count in enumerate(activated):
            assert len(on_disk(service, tmp_path / str(seed) / "frl", client)) == count
    assert sum(activated) >= 4


def test_an_expert_killed_after_renewals_comes_back_with_its_memory_bit_for_bit(service: Any) -> None:
    for seed in range(4, 10):
        service.segment(seed, renew=True)
    before = [service.memory(client) for client in range(4)]
    changed = max(range(4), key=lambda client: before[client][0])
    pid = service.status()[changed].pid
    service.kill(changed)
    service.wait(lambda: service.status()[changed].pid != pid and service.all_up())
    assert before[changed][0] > 0
    assert service.memory(changed) == before[changed]
    assert service.supervisor.renewals_lost == 0


def on_disk(service: Any, folder: Path, client: int) -> list[Any]:
    return Journal(folder, client, fingerprint=service.fingerprint(client)).load()[1]

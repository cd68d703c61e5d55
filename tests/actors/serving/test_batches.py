"""What becomes of a batch that fails: who is tried again, with whom, and who is told why. Without actors."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import DeadlineError, NoExpertsError, NotFiniteError, OverloadedError, ServiceError
from actors.rounds.messages import Settings
from actors.serving import orchestrator as module
from actors.serving.cloud_link import Again
from actors.serving.host_records import HostRecord, HostRecords
from actors.serving.orchestrator import Orchestrator
from actors.serving.service_rate import ServiceRate
from airmoe_ray.config import Config
from airmoe_ray.inference.masks import Prepared

IMAGE = Prepared(np.zeros((4, 4, 3), np.uint8), (4, 4), (4, 4))
Outcome = Callable[[tuple[int, ...]], Any]


class FakeCloud:
    """Answers each image with its ticket, unless told what else comes of a batch of these ids."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.batches, self.tickets = outcome, [], {}

    async def attempt(self, images: Any, ids: tuple[int, ...], tickets: tuple[int, ...], *_: Any, **__: Any) -> Any:
        self.batches.append(ids)
        for id, ticket in zip(ids, tickets, strict=True):
            self.tickets.setdefault(id, set()).add(ticket)
        await asyncio.sleep(0)
        found = self.outcome(ids)
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Again) else SimpleNamespace(ids=ids, calls=1)


async def never() -> None:
    await asyncio.Event().wait()


def served(
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    ids: range,
    watch: Callable[[], Coroutine[Any, Any, None]] = never,
) -> tuple[list[Any], FakeCloud, Orchestrator]:
    """Answers and errors of as many requests at once, all in one batch at first."""
    cloud = FakeCloud(outcome)
    config = Config.model_validate({"serve": {"max_batch": len(ids), "batch_wait_ms": 0}})
    system = SimpleNamespace(config=config, card=SimpleNamespace(feature_dim=1), stop=lambda: None)
    supervisor: Any = SimpleNamespace(
        cloud=cloud, watch=lambda _: watch(), check_up=lambda _: None, count=lambda _: None, close=lambda: None
    )
    monkeypatch.setattr(module, "results_of", lambda result, **_: list(result.ids))
    monkeypatch.setattr(module, "_RETRY_PAUSE_S", 0.0)

    async def ask() -> tuple[list[Any], Orchestrator]:
        settings = Settings(config.routing, config.channel)
        async with Orchestrator(system, supervisor) as orchestrator:  # type: ignore[arg-type]
            asking = [orchestrator.segment(IMAGE, id=id, settings=settings, deadline_s=5.0) for id in ids]
            return await asyncio.gather(*asking, return_exceptions=True), orchestrator

    answers, orchestrator = asyncio.run(ask())
    return answers, cloud, orchestrator


@pytest.mark.parametrize("bad", [0, 5, 7])
def test_an_image_that_makes_the_cloud_fail_is_found_by_halves_and_fails_alone(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, cloud, _ = served(monkeypatch, lambda ids: ServiceError("no") if bad in ids else None, range(8))
    assert [answer for answer in answers if answer != bad and not isinstance(answer, ServiceError)] == [
        id for id in range(8) if id != bad
    ]
    assert isinstance(answers[bad], ServiceError)
    assert len(cloud.batches) == 7  # 8, 4 + 4, 2 + 2, 1 + 1: not 8 again and again


def test_an_image_that_kills_cloud_after_cloud_is_given_up_and_its_neighbours_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, _, _ = served(monkeypatch, lambda ids: Again(suspect=True) if 2 in ids else None, range(4))
    assert [answers[id] for id in (0, 1, 3)] == [0, 1, 3]
    assert "lost over this image" in str(answers[2])


def test_a_cloud_that_dies_once_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fates = iter([Again(suspect=True)])
    answers, cloud, _ = served(monkeypatch, lambda _: next(fates, None), range(4))
    assert answers == [0, 1, 2, 3]
    assert cloud.batches == [(0, 1, 2, 3)] * 2
    assert all(len(tickets) == 1 for tickets in cloud.tickets.values())  # the same request, tried again


def test_an_image_without_survivors_is_tried_alone_and_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fates = iter([Again(alone=(1,))])
    answers, cloud, _ = served(monkeypatch, lambda _: next(fates, None), range(4))
    assert answers == [0, 1, 2, 3]
    assert cloud.batches == [(0, 1, 2, 3), (0, 2, 3), (1,)]


def test_an_image_whose_clients_do_not_answer_is_refused_after_three_attempts_and_its_place_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outcome(ids: tuple[int, ...]) -> Any:
        return Again(alone=(ids.index(1),), nobody=True) if 1 in ids else None

    answers, cloud, _ = served(monkeypatch, outcome, range(4))
    assert [answers[id] for id in (0, 2, 3)] == [0, 2, 3]
    assert isinstance(answers[1], NoExpertsError)
    assert sum(1 in batch for batch in cloud.batches) == 3
    answers, cloud, _ = served(monkeypatch, lambda _: Again(nobody=True), range(2))
    assert all(isinstance(answer, NoExpertsError) for answer in answers)
    assert cloud.batches == [(0, 1)] * 3


def test_features_that_are_not_finite_fail_their_image_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(ids: tuple[int, ...]) -> Any:
        return NotFiniteError("not finite", (ids.index(3),)) if 3 in ids else None

    answers, cloud, _ = served(monkeypatch, outcome, range(4))
    assert answers[:3] == [0, 1, 2]
    assert str(answers[3]) == "not finite"
    assert cloud.batches == [(0, 1, 2, 3), (0, 1, 2)]


def test_a_batch_out_of_time_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, cloud, _ = served(monkeypatch, lambda _: DeadlineError("over"), range(4))
    assert all(isinstance(answer, DeadlineError) for answer in answers)
    assert len(cloud.batches) == 1


def test_a_loop_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies() -> None:
        raise RuntimeError("a defect")

    found: list[str | None] = []

    def outcome(_: tuple[int, ...]) -> None:
        found.append(running[0].dead_loop)

    running: list[Orchestrator] = []
    entered = Orchestrator.__aenter__

    async def enter(self: Orchestrator) -> Orchestrator:
        running.append(self)
        return await entered(self)

    monkeypatch.setattr(Orchestrator, "__aenter__", enter)
    assert served(monkeypatch, outcome, range(1), dies)[0] == [0]
    assert found == ["supervisor"]
    found.clear()
    running.clear()
    served(monkeypatch, outcome, range(1))
    assert found == [None]


def test_a_host_that_answers_from_another_process_is_looked_after_at_once() -> None:
    hosts: Any = object.__new__(HostRecords)
    host: Any = None
    record = HostRecord(host, seen=SimpleNamespace(process=1))  # type: ignore[arg-type]
    hosts.changed, hosts.records = asyncio.Event(), {"a": record}
    hosts.notice({"a": 1, "gone": 2})
    assert not record.asked_for
    hosts.notice({"a": 2})
    assert record.asked_for
    assert hosts.changed.is_set()


# how many may wait


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 32), st.floats(0.01, 5)), min_size=1, max_size=40),
    st.integers(0, 500),
    st.floats(0.1, 60),
)
def test_whoever_is_let_in_has_time_at_the_rate_of_the_last_batches(
    batches: list[tuple[int, float]], ahead: int, time_s: float
) -> None:
    rate, now = ServiceRate(), 100.0
    rate.begun(now)
    for images, seconds in batches:
        now += seconds
        rate.done(images, now)
    slowest_s = max(seconds / images for images, seconds in batches)
    fastest_s = min(seconds / images for images, seconds in batches)
    assert (ahead + 1) * fastest_s * 0.999 <= rate.wait_s(ahead) <= (ahead + 1) * slowest_s * 1.001
    assert rate.has_room(ahead, time_s) == (ahead == 0 or rate.wait_s(ahead) <= 0.5 * time_s)


def test_time_without_work_does_not_count_as_slowness() -> None:
    rate = ServiceRate()
    for start in (0.0, 1000.0, 2000.0):
        rate.begun(start)
        rate.done(4, start + 1.0)
    assert rate.wait_s(39) == pytest.approx(10.0)


def test_more_than_can_be_answered_in_time_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, orchestrator = served(monkeypatch, lambda _: None, range(1))
    orchestrator.rate = ServiceRate()
    orchestrator.rate.begun(0.0)
    orchestrator.rate.done(10, 1.0)
    orchestrator.check_room(20, 5.0)
    with pytest.raises(OverloadedError, match="60 images are before it, which take 6"):
        orchestrator.check_room(60, 5.0)

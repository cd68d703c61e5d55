"""Three hundred clients at a real server: whoever is let in is answered in time, the others are told at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.bench.overload import CROWD, Load, deadline_of, keep_asking, overload_ratio
from tests.api.http.server_requests import PHOTO
from tests.api.support import Server


def check(load: Load, deadline_s: float) -> None:
    """The laws of overload.

    A machine that others use hears everything late; `/readyz`, which waits for nothing else, tells by how much.
    """
    assert not load.wrong  # 200, or a refusal with Retry-After: nothing else
    assert load.late(deadline_s + max(load.ready_s)) == 0
    assert load.refused_s
    assert sorted(load.refused_s)[int(0.9 * len(load.refused_s))] < 1.0
    assert not load.unready
    assert len(load.ready_s) > 3
    assert sorted(load.ready_s)[int(0.9 * len(load.ready_s))] < 1.0


def test_a_crowd_is_answered_in_time_or_refused_at_once_and_the_server_stays_ready(server: Server) -> None:
    load, _ = keep_asking(server.port, PHOTO, clients=CROWD, seconds=4)
    print(f"{len(load.answered)} answers, {len(load.refused_s)} refusals, /readyz within {max(load.ready_s):.2f} s")
    check(load, deadline_of(server.port))
    assert load.answered


@pytest.fixture(scope="module")
def hurried(run_folder: Path) -> Iterator[Server]:
    """A server whose queue is bounded by time alone."""
    server = Server(run_folder, "--set", "serve.deadline_s=4", "--set", "serve.queue=1000")
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.mark.slow
def test_where_time_alone_bounds_the_queue_a_crowd_gets_as_much_done_as_eight(hurried: Server) -> None:
    load, _ = keep_asking(hurried.port, PHOTO, clients=CROWD, seconds=8)
    check(load, 4)
    found = overload_ratio(hurried.port, PHOTO, rounds=3, seconds=8)
    print(found.as_dict())
    assert (found.detail["wrong"], found.detail["unready"]) == ({}, 0)
    assert found.value > 0.95

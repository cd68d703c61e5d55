"""Clients packed by what the cluster has: an actor per core, and the answers of one actor each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_there_is_an_actor_per_core_and_the_answers_are_the_same(
    own_ray: None, serve: Callable[..., Any], tmp_path: Path
) -> None:
    with serve(tmp_path, cluster={"experts_per_actor": "auto"}) as service:  # four clients, two cores
        pids = [status.pid for status in service.status()]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2]
        assert service.system.plan.packing == "4 experts in 2 actors, at most 2 in each"
        for seed in range(3):
            assert service.agrees(service.segment(seed), service.expected(seed))

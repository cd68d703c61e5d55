"""Three nodes, of which one vanishes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.cluster import _read_environment
from actors.messages import Answer

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes of one machine; Ray notices a lost one in a second or two instead of fifteen."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    _read_environment(loopback=True)
    small = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={**small, "_system_config": QUICK})
    for _ in range(2):
        nodes.add_node(wait=False, **small)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    nodes.wait_for_nodes()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_the_experts_of_a_lost_node_come_back_elsewhere_while_requests_are_answered(
    three_nodes: Cluster, serve: Callable[..., Any], tmp_path: Path
) -> None:
    with serve(tmp_path, cluster={"placement": "spread"}) as service:
        homes = [home(service, client) for client in range(4)]
        assert len(set(homes)) == 3
        lost = next(node for node in three_nodes.worker_nodes if node.node_id in homes)
        three_nodes.remove_node(lost, allow_graceful=False)
        started, answers = time.monotonic(), []
        while lost.node_id in [home(service, client) for client in range(4)] or not service.all_up():
            assert time.monotonic() - started < 60
            answers.append(service.segment(len(answers)))
        print(f"experts of the lost node up again after {time.monotonic() - started:.1f} s, {len(answers)} answers")
        assert all(isinstance(answer, Answer) for answer in answers)
        assert service.agrees(service.segment(5), service.expected(5))


def home(service: Any, client: int) -> str:
    members = service.supervisor.members.values()
    return next(m.seen.node_id for m in members if client in m.instance.clients)

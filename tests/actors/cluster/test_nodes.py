"""Several nodes: clients live where they must, a cluster that grows is waited for, and one that shrinks is mended."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from safetensors.torch import save_file

from actors.cluster.connection import _read_environment
from actors.errors import ClusterError
from actors.serving.results import ImageResult
from actors.training.progress_relay import RelayCalls
from airmoe_ray.config import BackboneConfig
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.runtime.device import LOGICAL_GPUS
from tests.api.support import Server, samples

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
GPU_ADVICE = "lower cluster.gpus_per_expert (0 is CPU only, auto divides what is there), or add GPUs"
SMALL = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three nodes of one machine; Ray notices a lost one in a second or two instead of fifteen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 32)
        patch.setenv(LOGICAL_GPUS, "1")  # the GPUs that one of them has do not exist
        _read_environment(loopback=True)
        three = Cluster(initialize_head=True, head_node_args={**SMALL, "_system_config": QUICK})
        for site in ("site_b", "site_c"):
            three.add_node(wait=False, resources={site: 1}, labels={"tier": site}, **SMALL)
        ray.init(address=three.address, log_to_driver=False, logging_level="ERROR")
        three.wait_for_nodes()
        yield three
        ray.shutdown()
        three.shutdown()


def home(service: Any, client: int) -> str:
    return next(record.seen.node_id for record in service.records if client in record.host.clients)


def offering(resource: str) -> str:
    return next(n["NodeID"] for n in ray.nodes() if n["Alive"] and resource in n["Resources"])  # type: ignore[no-untyped-call]


def test_pinned_clients_live_on_their_host_also_when_added_or_replicated_by_load(
    nodes: Cluster, serve: Callable[..., Any], tmp_path: Path
) -> None:
    pin = {1: "site_b", 3: "site_c"}
    by_load = {"max_replicas": 2, "rebalance_every_s": 0.5}
    with serve(tmp_path, cluster={"pin": pin, "experts_per_actor": 2, **by_load}) as service:
        assert (home(service, 1), home(service, 3)) == (offering("site_b"), offering("site_c"))
        assert home(service, 0) == home(service, 2)  # those that may live anywhere share a host
        service.run(service.supervisor.scale(3))
        service.run(service.supervisor.scale(4))
        for _ in range(20):
            service.supervisor.load.add((1,))
        service.wait(lambda: service.all_up() and service.status()[1].replicas == 2, within_s=60)
        assert home(service, 3) == offering("site_c")
        homes = {record.seen.node_id for record in service.records if 1 in record.host.clients}
        assert homes == {offering("site_b")}
        assert service.agrees(service.segment(5), service.expected(5))


def test_a_client_pinned_to_what_no_node_offers_is_refused_or_waited_for(
    nodes: Cluster, make_system: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make_system(tmp_path, cluster={"pin": {2: "site_d"}})
    with pytest.raises(ClusterError, match=r"^expert 2 is pinned to site_d .* nodes offer .*site_b, site_c; start"):
        system.start()
    with (
        caplog.at_level(logging.WARNING, "airmoe"),
        pytest.raises(ClusterError, match=r"^expert 2 is pinned to site_d .*\(waited 2 s\)$"),
    ):
        system.start(wait_s=2)
    assert "waiting for the autoscaler" in caplog.text
    assert not free_of_reservations()


def free_of_reservations() -> list[Any]:
    """Placement groups that are still there."""
    table: dict[str, Any] = ray.util.placement_group_table()  # type: ignore[no-untyped-call]
    return [group for group in table.values() if group["state"] != "REMOVED"]


def test_a_cluster_that_is_too_small_is_waited_for_until_it_has_grown(
    nodes: Cluster, make_system: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make_system(tmp_path, cluster={"gpus_per_expert": 0.5})
    with pytest.raises(ClusterError, match=r"^4 experts x 0\.5 GPU need 2 GPUs, the cluster has 0; lower"):
        system.start()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, "airmoe"):
        starting = pool.submit(system.start, wait_s=60)
        until = time.monotonic() + 30
        while not (told := [text for text in caplog.messages if "autoscaler" in text]):
            assert time.monotonic() < until
            time.sleep(0.1)
        new = nodes.add_node(num_gpus=3, **SMALL)
        hosts = starting.result()
    assert told[0].endswith("4 experts x 0.5 GPU and the cloud 0.5 need 3 GPUs, the cluster has 0; " + GPU_ADVICE)
    assert {state.node_id for _, state in hosts.values()} == {new.node_id}
    assert all(state.gpu_ids for _, state in hosts.values())
    for host, _ in hosts.values():
        system.remove_host(host)
    system.stop()
    nodes.remove_node(new)


def cloud() -> dict[str, Any]:
    """What Ray knows of the cloud's actor that is alive."""
    table: dict[str, Any] = actors()  # type: ignore[no-untyped-call]
    (found,) = [a for a in table.values() if a["ActorClassName"] == "Cloud" and a["State"] == "ALIVE"]
    return found


@ray.remote(num_cpus=0, label_selector={"tier": "site_c"})
def sees_there(path: str) -> bool:
    return Path(path).exists()


def test_roles_live_on_nodes_with_their_labels_and_the_cloud_gets_weights_that_its_node_has_not(
    nodes: Cluster, serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folder of the command; nodes were started elsewhere
    weights = "own.safetensors"
    body = load_backbone(BackboneConfig(), random_init_seed=7).body
    save_file(body.get_submodule("vit").state_dict(), weights)
    assert not ray.get(sees_there.remote(weights))
    labels = {"expert": {"tier": "site_b"}, "cloud": {"tier": "site_c"}}
    with serve(tmp_path, backbone={"weights": weights}, cluster={"labels": labels}) as service:
        service.run(service.supervisor.scale(3))
        service.run(service.supervisor.scale(4))  # one that joins later has to live there as well
        service.wait(service.all_up)
        assert {home(service, client) for client in range(4)} == {offering("site_b")}
        first = cloud()
        assert first["Address"]["NodeID"] == offering("site_c")
        assert service.agrees(service.segment(5), service.expected(5))
        os.kill(first["Pid"], signal.SIGKILL)
        assert service.agrees(service.segment(6), service.expected(6))  # a cloud that is started again has them, too
        assert cloud()["Pid"] != first["Pid"]


def test_a_label_that_no_node_has_is_told_at_once_in_one_line(
    nodes: Cluster, make_system: Callable[..., Any], tmp_path: Path
) -> None:
    system = make_system(tmp_path, cluster={"labels": {"expert": {"tier": "sea"}}})
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=r"^the expert asks for a node with tier=sea .*, which none has;") as caught:
        system.start()
    assert time.monotonic() - begun < 5
    assert "tier=site_b, tier=site_c; start one with" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_relay_of_a_training_lives_where_the_command_was_given(nodes: Cluster) -> None:
    relays = [RelayCalls.start() for _ in range(4)]
    for relay in relays:
        relay.take().get(timeout_s=60)
    table: dict[str, Any] = actors()  # type: ignore[no-untyped-call]
    homes = {a["Address"]["NodeID"] for a in table.values() if a["ActorClassName"] == "ProgressRelay"}
    assert homes == {ray.get_runtime_context().get_node_id()}


def test_a_front_end_killed_and_started_again_serves_and_leaves_nothing_of_the_first(
    nodes: Cluster, make_system: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_system(tmp_path, experts={"count": 2}).checkpoint.parent
    before = resources()
    first = Server(run, "--address", nodes.address)
    try:
        first.wait_until_ready()
        old = actor_pids()
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        begun = time.monotonic()
        second = Server(run, "--address", nodes.address)
        second.wait_until_ready(timeout_s=60)
        print(f"serving again {time.monotonic() - begun:.1f} s after the start")
        assert not old & actor_pids()
        assert len(actor_pids()) == 4  # cloud, channel, two experts
        assert len(free_of_reservations()) == 1
        assert samples(second.url)['airmoe_expert_up{expert="1"}'] == 1
        code, left = second.stop()
        assert code == 0
        assert not left
    finally:
        first.stop()
    until = time.monotonic() + 20
    while (after := resources()) != before or free_of_reservations():
        assert time.monotonic() < until, after
        time.sleep(0.2)


def actor_pids() -> set[int]:
    """Of actors that are alive, of any driver."""
    table: dict[str, Any] = actors()  # type: ignore[no-untyped-call]
    return {actor["Pid"] for actor in table.values() if actor["State"] == "ALIVE"}


def resources() -> dict[str, float]:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return {name: round(amount, 3) for name, amount in free.items() if not name.startswith(("object", "memory"))}


def test_the_experts_of_a_lost_node_come_back_elsewhere_while_requests_are_answered(
    nodes: Cluster, serve: Callable[..., Any], tmp_path: Path
) -> None:
    with serve(tmp_path, cluster={"placement": "spread"}) as service:
        homes = [home(service, client) for client in range(4)]
        assert len(set(homes)) == 3
        lost = next(node for node in nodes.worker_nodes if node.node_id in homes)
        nodes.remove_node(lost, allow_graceful=False)
        started, answers = time.monotonic(), []
        while lost.node_id in [home(service, client) for client in range(4)] or not service.all_up():
            assert time.monotonic() - started < 60
            answers.append(service.segment(len(answers)))
        print(f"experts of the lost node up again after {time.monotonic() - started:.1f} s, {len(answers)} answers")
        assert all(isinstance(answer, ImageResult) for answer in answers)
        assert service.agrees(service.segment(5), service.expected(5))

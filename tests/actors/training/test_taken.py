"""Training beside a front end: what others hold is said and not waited for without end. GPUs are logical ones."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from actors.cluster.autoscaler import _IN_KUBERAY, most_gpus
from actors.cluster.connection import cluster, nodes
from actors.cluster.placement import plan
from actors.cluster.reservation import reserve
from actors.errors import ClusterError
from actors.training.crew import Watch, await_room, plan_crew
from actors.training.ray_train import train_on_ray
from airmoe_ray.config import ClusterConfig
from tests.actors.training.support import Notes
from tests.airmoe_ray.training.tiny_runs import tiny_config


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    with cluster(cpus=4, gpus=4):
        yield


@pytest.fixture
def serving(four_gpus: None) -> Iterator[ray.util.placement_group]:
    """A front end's reservation: a GPU for the cloud, and half a one for each of five experts."""
    config = ClusterConfig(gpus_per_expert=0.5, gpus_per_cloud=1)
    group = reserve(plan(config, 5, nodes()), config)
    yield group
    remove_placement_group(group)
    until = time.monotonic() + 10
    while ray.available_resources().get("GPU", 0) < 4:  # type: ignore[no-untyped-call]
        assert time.monotonic() < until
        time.sleep(0.1)


def test_training_beside_a_front_end_says_who_holds_the_gpus_instead_of_hanging(
    serving: object, tmp_path: Path
) -> None:
    notes, config = Notes(), tiny_config(tmp_path, **{"cluster.autoscale_wait_s": 4})
    said = r"--workers 2: 0 of the cluster's 4 GPUs are free, serving holds 3.5 \(waited 4 s\); stop serving first"
    with pytest.raises(ClusterError, match=said):
        train_on_ray(config, tmp_path / "run", workers=2, resume=False, report=notes)
    assert notes.lines[0].endswith("4 are there, 0 of them free, waiting for others to let go of 2")
    assert notes.lines[1].startswith("waiting, ")
    assert not (tmp_path / "run").exists()


def test_what_can_never_fit_is_refused_at_once(serving: object, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="--workers 5: the cluster has 4 GPUs; ask for 4"):
        train_on_ray(tiny_config(tmp_path), tmp_path / "run", workers=5, resume=False, report=Notes())
    assert time.monotonic() - begun < 5


def test_gpus_that_are_let_go_of_in_time_are_taken(four_gpus: None, serving: ray.util.placement_group) -> None:
    threading.Timer(2, remove_placement_group, [serving]).start()
    await_room(plan_crew("cuda", 4, nodes(), None), Notes(), wait_s=60)


def test_workers_that_wait_for_room_while_a_training_runs_say_so(
    serving: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.training.crew._REPEAT_S", 0.0)
    notes, crew = Notes(), plan_crew("cuda", 2, nodes(), None)
    group = ray.util.placement_group([{"GPU": 1}] * 2)  # as Ray Train does
    assert not group.wait(1)
    Watch(crew, notes).look()
    remove_placement_group(group)
    assert notes.lines == ["workers wait for room: --workers 2: 0 of the cluster's 4 GPUs are free, serving holds 3.5"]


def test_pods_of_kuberay_do_not_know_how_many_gpus_can_come(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_gpus() is None
    monkeypatch.setenv(_IN_KUBERAY, "1")
    assert most_gpus() == float("inf")

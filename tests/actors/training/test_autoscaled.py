"""GPUs that an autoscaler has yet to bring: training says so and waits for them; nobody trains on the CPU unasked.

The autoscaler is Ray's own, and brings nodes of this machine; their GPUs are logical ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.cluster.autoscaler import gpus_within, most_gpus
from actors.cluster.connection import _read_environment, nodes
from actors.errors import ClusterError
from actors.training.ray_train import train_on_ray
from airmoe_ray.runtime.device import LOGICAL_GPUS
from tests.actors.training.support import Notes
from tests.airmoe_ray.training.tiny_runs import tiny_config
from tests.api.support import free_port

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "t" * 32,
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "0",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    LOGICAL_GPUS: "1",
}
SMALL = 100 << 20  # object store
HEAD, WORKER = "ray.head.default", "with a GPU"
COMMANDS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")


def cluster_file(gcs_address: str) -> dict[str, object]:
    """As `ray up` leaves it on the head; the provider is Ray's own for tests."""
    resources = {"CPU": 1, "GPU": 1, "object_store_memory": SMALL}
    return {
        "cluster_name": "grows",
        "max_workers": 1,
        "upscaling_speed": 10,
        "idle_timeout_minutes": 10,
        "provider": {"type": "fake_multinode", "gcs_address": gcs_address},
        "available_node_types": {
            HEAD: {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            WORKER: {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 4},
        },
        "head_node_type": HEAD,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{name: [] for name in (*COMMANDS, *STARTS)},
    }


@pytest.fixture(scope="module")
def grows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A head without a GPU, and an autoscaler that may bring one node with one."""
    file, port = tmp_path_factory.mktemp("grows") / "ray_bootstrap_config.yaml", free_port()
    file.write_text(json.dumps(cluster_file(f"127.0.0.1:{port}")))
    about = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": SMALL, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        _read_environment(loopback=True)
        before = set(psutil.Process().children())
        head = {**about, "gcs_server_port": port, "autoscaling_config": str(file)}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield file
        started = set(psutil.Process().children()) - before
        family = [child for process in started for child in process.children(recursive=True)]
        ray.shutdown()
        cluster.shutdown()
        for process in psutil.wait_procs(family, timeout=1)[1]:  # the node that came outlives its autoscaler
            process.kill()


def test_the_file_that_the_autoscaler_works_from_says_how_many_gpus_there_can_be(grows: Path) -> None:
    assert most_gpus() == 1  # four of its kind, but one worker at most
    file = cluster_file("any")
    assert gpus_within({**file, "max_workers": 9}) == 4
    assert gpus_within({**file, "max_workers": 9, "head_node_type": WORKER}) == 5
    assert gpus_within({**file, "provider": {"type": "local"}}) is None  # a list of hosts brings no more of them


def test_training_says_that_it_waits_and_then_trains_on_the_gpu_that_came(grows: Path, tmp_path: Path) -> None:
    quick = {"train.epochs": 1, "train.cache": False, "data.train_count": 5, "data.val_count": 1}
    config, notes = tiny_config(tmp_path, **quick), Notes()
    with pytest.raises(ClusterError, match="--workers 2: the cluster has 0 GPUs and can have 1; ask for 1"):
        train_on_ray(config, tmp_path / "two", workers=2, resume=False, report=notes)
    assert sum(node.gpus for node in nodes()) == 0
    summary = train_on_ray(config, tmp_path / "run", workers=1, resume=False, report=notes)
    assert "1 worker with a GPU each; 0 are there, waiting for the autoscaler to bring 1" in notes.lines
    assert sum(node.gpus for node in nodes()) == 1
    assert summary["epochs"] == 1


def test_gpus_that_do_not_come_in_time_are_told(grows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.training.ray_train.most_gpus", lambda: 4)  # more than it will ever bring
    config = tiny_config(tmp_path, **{"cluster.autoscale_wait_s": 1})
    with pytest.raises(ClusterError, match=r"^--workers 4: \d of the cluster's \d GPUs are free.* \(waited 1 s"):
        train_on_ray(config, tmp_path / "run", workers=4, resume=False, report=Notes())

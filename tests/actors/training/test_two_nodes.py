"""Two nodes that share no folder but a bucket train as one process does, also when one of them loses its worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.cluster.connection import cluster
from actors.training.ray_train import train_on_ray
from airmoe_ray.config import Config
from airmoe_ray.storage.remote_run import RemoteRun
from airmoe_ray.training.run import train_run
from tests.actors.training.support import Notes
from tests.object_store import ObjectStore, object_store

EPOCHS = 6
# A node with mounts of its own: /tmp is empty there, and nobody else's. `ray start` would not join on loopback.
# a checkout that is itself below /tmp comes back into the empty one
MOUNTS = """
set -e
mount --make-rprivate /
case "$CHECKOUT" in /tmp/*) mount --bind "$CHECKOUT" /mnt;; esac
mount -t tmpfs tmpfs /tmp
case "$CHECKOUT" in /tmp/*) mkdir -p "$CHECKOUT"; mount --bind /mnt "$CHECKOUT";; esac
cd /tmp
exec "$@"
"""
CHECKOUT = str(Path(__file__).parents[3])
NODE = """
import signal, sys
from actors.cluster.connection import _read_environment
from ray._private.node import Node
from ray._private.parameter import RayParams
_read_environment(loopback=True)
about = {"num_cpus": 1, "num_gpus": 0, "resources": {"apart": 1}, "object_store_memory": 100 << 20}
Node(RayParams(gcs_address=sys.argv[1], node_ip_address="127.0.0.1", include_dashboard=False, **about), head=False)
signal.pause()
"""


def can_unshare() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="a node with mounts of its own needs root")


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch, object_store() as found:
        for name, value in {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_TOKEN", "t" * 32)
        yield found


@pytest.fixture(scope="module")
def two_nodes(store: ObjectStore, tmp_path_factory: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """This machine, and a node that sees nothing of its /tmp."""
    told = tmp_path_factory.mktemp("nodes") / "node.log"
    with cluster(cpus=1):
        start = ["unshare", "--mount", "bash", "-c", MOUNTS, "node", sys.executable, "-c", NODE]
        with told.open("w") as log:
            address = ray.get_runtime_context().gcs_address
            environment = {**os.environ, "PYTHONPATH": CHECKOUT, "CHECKOUT": CHECKOUT}
            node = subprocess.Popen([*start, address], env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while "apart" not in ray.cluster_resources():  # type: ignore[no-untyped-call]
                assert node.poll() is None, told.read_text()
                assert time.monotonic() < until, told.read_text()
                time.sleep(0.2)
            yield node
        finally:
            family = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            node.terminate()
            node.wait(30)
            for process in psutil.wait_procs(family, timeout=10)[1]:
                process.kill()


def config_of(cache: Path) -> Config:
    return Config.model_validate(
        {
            "data": {"train_count": 20, "val_count": 5, "image_size": 64, "cache_dir": str(cache)},
            "experts": {"count": 4, "hidden": 16, "width": 16},
            "frl": {"dim": 8, "prototypes": 3},
            "routing": {"top_k": 2},
            "train": {"epochs": EPOCHS, "batch_size": 8, "threads": 1},
        }
    )


def rows(content: bytes | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (content or b"").splitlines()]


def kill_the_worker_apart(run: RemoteRun, node: "subprocess.Popen[bytes]", killed: list[int]) -> None:
    """kill -9 of the worker on the other node, once the bucket holds a checkpoint."""
    while not run.holds("checkpoint"):
        time.sleep(0.1)
    family = psutil.Process(node.pid).children(recursive=True)
    for process in family:
        if "RayTrainWorker" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)


def test_a_worker_killed_on_a_node_apart_changes_nothing(
    two_nodes: "subprocess.Popen[bytes]", store: ObjectStore, tmp_path: Path
) -> None:
    config, run, notes = config_of(tmp_path / "cache"), RemoteRun(store.url("two")), Notes()
    train_run(config, tmp_path / "one")
    expected = rows((tmp_path / "one" / "metrics.jsonl").read_bytes())
    apart, killed = config_of(tmp_path / "other cache"), list[int]()
    trouble = threading.Thread(target=kill_the_worker_apart, args=[run, two_nodes, killed], daemon=True)
    trouble.start()
    run.check(resume=False)
    summary = train_on_ray(apart, run, workers=2, resume=False, report=notes)
    assert len(killed) == 1
    assert any("each computes and keeps its own features" in line for line in notes.lines)
    found = rows(run.bucket.read("metrics.jsonl"))
    assert [row["epoch"] for row in found] == list(range(1, EPOCHS + 1))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert summary["epochs"] == EPOCHS
    assert not run.bucket.list("state")
    # and goes on from what the bucket holds
    longer = apart.model_copy(update={"train": apart.train.model_copy(update={"epochs": EPOCHS + 1})})
    train_on_ray(longer, run, workers=1, resume=True, report=notes)
    assert len(rows(run.bucket.read("metrics.jsonl"))) == EPOCHS + 1

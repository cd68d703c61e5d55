"""Two containers that share no folder but a bucket train as one process does, also when one of them is killed.

Each has a file system and an address of its own. Another one takes the place of the one that is lost, as a new machine
does for one that was taken back: it knows of the training what the bucket holds.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.support import wait_for
from tests.deploy import containers
from tests.deploy.containers import IMAGE, podman
from tests.object_store import BUCKET, ObjectStore, object_store

pytestmark = [pytest.mark.image, pytest.mark.slow]
EPOCHS = 12
SETTINGS = {
    "data.train_count": 40,
    "data.val_count": 5,
    "data.image_size": 64,
    "experts.count": 4,
    "experts.hidden": 16,
    "experts.width": 16,
    "frl.dim": 8,
    "frl.prototypes": 3,
    "routing.top_k": 2,
    "train.epochs": EPOCHS,
    "train.batch_size": 8,
    "train.threads": 1,
}
AIRMOE = ["airmoe", "train", *(part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}"))]


class Nodes:
    """Containers of the image, each a node of one Ray cluster with room for one worker."""

    def __init__(self) -> None:
        self.name = f"am{secrets.token_hex(3)}"
        podman("network", "create", self.name)
        (net,) = json.loads(podman("network", "inspect", self.name).stdout)
        self.gateway = str(net["subnets"][0]["gateway"])
        self.base = self.gateway.rpartition(".")[0]
        self.started: list[str] = []
        token = secrets.token_hex(32)
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}

    def start(self) -> str:
        """One more, the first of them the head; its name, once it is in the cluster."""
        number = len(self.started)
        name, address = f"{self.name}-{number}", f"{self.base}.{50 + number}"
        join = [f"--address={self.base}.50:6379"] if number else ["--head", "--port=6379", "--include-dashboard=false"]
        options = [f"--env={variable}={value}" for variable, value in self.environment.items()]
        options += ["--detach", "--read-only", "--shm-size=512m", f"--name={name}", f"--ip={address}"]
        command = ["ray", "start", *join, f"--node-ip-address={address}", "--num-cpus=1", "--num-gpus=0", "--block"]
        podman("run", *options, f"--network={self.name}", IMAGE, *command)
        self.started.append(name)
        wait_for(lambda: address in self.alive(), timeout_s=90)
        assert address in self.alive(), podman("logs", name, check=False)
        return name

    def alive(self) -> list[str]:
        """Addresses of the cluster's nodes."""
        script = "import ray; ray.init('auto', log_to_driver=False); "
        script += "print('nodes', *[node['NodeManagerAddress'] for node in ray.nodes() if node['Alive']])"
        told = podman("exec", self.started[0], "python", "-c", script, check=False).stdout.splitlines()
        return told[-1].split()[1:] if told and told[-1].startswith("nodes") else []

    def kill(self, name: str) -> None:
        """kill -9 of all that runs in it, at once."""
        os.kill(int(podman("inspect", "--format={{.State.Pid}}", name).stdout), signal.SIGKILL)

    def close(self) -> None:
        for name in self.started:
            podman("rm", "--force", "--volumes", "--time=2", name, check=False)
        podman("network", "rm", "--force", self.name, check=False)


@pytest.fixture
def nodes(image: str) -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.start()
        nodes.start()
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def store(nodes: Nodes) -> Iterator[ObjectStore]:
    """A bucket on this side of the containers' network, which is there once a container is."""
    with object_store(nodes.gateway) as found:
        yield found


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def in_bucket(store: ObjectStore, name: str) -> str:
    """An object of the run; empty while it is not there."""
    client = store.client("s3")
    try:
        return str(client.get_object(Bucket=BUCKET, Key=f"two/{name}")["Body"].read().decode())
    except client.exceptions.NoSuchKey:
        return ""


def test_a_container_killed_on_the_way_is_replaced_and_the_curve_is_that_of_one_process(
    nodes: Nodes, store: ObjectStore
) -> None:
    head, other = nodes.started
    podman("exec", head, *AIRMOE, "--set", "train.engine=local", "--set", "data.cache_dir=apart", "--run", "one")
    expected = rows(podman("exec", head, "cat", "one/metrics.jsonl").stdout)

    command = [*AIRMOE, "--address", "auto", "--workers", "2", "--run", store.url("two")]
    training = containers.begin("exec", head, *command)
    until = time.monotonic() + 120
    while len(rows(in_bucket(store, "metrics.jsonl"))) < 3:
        assert training.poll() is None, training.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    nodes.kill(other)
    done_before = rows(in_bucket(store, "metrics.jsonl"))
    started = time.monotonic()
    third = nodes.start()
    told = training.communicate(timeout=400)[0]
    print(f"killed after epoch {len(done_before)}, trained {time.monotonic() - started:.0f} s later\n{told}")
    assert training.returncode == 0, told

    assert len(done_before) < EPOCHS
    assert told.count(f"epoch   1/{EPOCHS}") == 1  # it went on, and did not begin anew
    assert "each computes and keeps its own features" in told
    found = rows(in_bucket(store, "metrics.jsonl"))
    assert [row["epoch"] for row in found] == list(range(1, EPOCHS + 1))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert podman("exec", third, "ls", ".airmoe").stdout.strip()  # it has taken part: features of its own
    assert "one" not in podman("exec", third, "ls").stdout.split()  # and has seen nobody else's folder

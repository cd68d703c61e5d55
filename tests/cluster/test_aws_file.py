"""cluster.yaml from `ray up` to `ray down`, with its provider replaced by a cloud of hosts here that run the image.

Token, key, run and shared folder arrive in containers, experts come up on workers that the autoscaler asked for, and a
worker that is taken away is replaced. The tests build on each other.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.actors.conftest import write_checkpoint
from tests.cluster.cloud import Cloud, cloud
from tests.cluster.conftest import ROOT, Operator, served_config
from tests.cluster.hosts import wait_until
from tests.cluster.hosts import why_not as no_hosts
from tests.deploy import containers

pytestmark = pytest.mark.slow


class AtLaptop(Operator):
    """An operator of the AWS file."""

    cloud: Cloud

    @property
    def url(self) -> str:
        head = next(found for found in self.cloud.nodes().values() if found["tags"]["ray-node-type"] == "head")
        return f"http://{head['address']}:8000"

    def workers(self) -> dict[str, str]:
        """Node -> address, of workers that have not ended."""
        nodes = self.cloud.nodes()
        return {name: one["address"] for name, one in nodes.items() if one["tags"]["ray-node-type"] == "worker"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtLaptop]:
    if reason := no_hosts() or containers.why_not():
        pytest.skip(reason)
    containers.build()
    tree = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    image = tree["docker"]["image"]
    containers.podman("tag", containers.IMAGE, image)
    with cloud(tmp_path_factory.mktemp("cloud")) as (made, url):
        operator = AtLaptop(tmp_path_factory.mktemp("laptop"), made.hosts)
        operator.cloud = made
        operator.make_secrets()
        write_checkpoint(operator.folder / "runs/quickstart/checkpoint", served_config())
        module = "tests.cluster.provider.NamespaceProvider"
        tree["provider"] = {"type": "external", "module": module, "url": url, "key": str(made.hosts.key)}
        tree |= {"cluster_name": made.hosts.bridge, "cluster_synced_files": [], "file_mounts_sync_continuously": False}
        operator.file.write_text(yaml.safe_dump(tree, sort_keys=False, width=10_000))
        started = time.monotonic()
        print(operator.ray("up", "-y", "--no-config-cache", operator.file, timeout_s=900)[-3000:])
        print(f"ray up took {time.monotonic() - started:.0f} s")
        yield operator
        operator.clean()
    containers.podman("untag", containers.IMAGE, image)


def test_ray_up_ends_when_the_front_end_answers(up: AtLaptop) -> None:
    assert up.is_ready()


def test_a_photo_is_answered_from_outside(up: AtLaptop, tmp_path: Path) -> None:
    photo = tmp_path / "street.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(photo)
    done = up.airmoe("segment", photo, "--url", up.url, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["degraded"] is None
    assert np.asarray(Image.open(tmp_path / "out/street_mask.png")).shape == (64, 96)


def test_experts_live_on_workers_that_the_autoscaler_asked_for(up: AtLaptop) -> None:
    homes = {expert["node"] for expert in up.experts()}
    assert homes == set(up.workers().values())
    assert len(homes) == 2  # six quarters of a GPU; the file's own minimum is one


def test_the_head_knows_how_many_gpus_the_autoscaler_may_bring(up: AtLaptop) -> None:
    script = "import ray; from actors.cluster.autoscaler import most_gpus; ray.init('auto'); print('most', most_gpus())"
    assert "most 5.0" in up.ray(
        "exec", up.file, f'RAY_AUTH_MODE=token python -c "{script}"'
    )  # its own and four workers'


def test_what_was_sent_is_in_the_containers_and_belongs_to_their_user(up: AtLaptop) -> None:
    script = "stat -c %u ~/.ray/auth_token ~/airmoe/api_key ~/airmoe/run/checkpoint ~/airmoe/serve.log /shared; id -u"
    said = up.ray("exec", up.file, f"{script}; touch /shared/seen; touch /usr/here || echo read-only").split()
    assert [word for word in said if word.isdigit()][-6:] == 6 * ["1000"]
    assert "read-only" in said
    assert (up.cloud.shared / "seen").exists()


def test_a_worker_that_is_taken_away_is_replaced_and_its_experts_come_back(up: AtLaptop) -> None:
    lost, address = next(iter(up.workers().items()))
    up.cloud.terminate(lost)

    def all_elsewhere() -> bool:
        experts = up.experts()
        homes = {expert["node"] for expert in experts if expert["state"] == "up"}
        return len([expert for expert in experts if expert["state"] == "up"]) == 6 and address not in homes

    took = wait_until(all_elsewhere, 400, f"the experts of {lost} elsewhere")
    print(f"all experts up again {took:.0f} s after {lost} was taken away")
    assert lost not in up.workers()


def test_ray_down_leaves_nothing(up: AtLaptop) -> None:
    up.ray("down", "-y", up.file)
    assert up.cloud.nodes() == {}

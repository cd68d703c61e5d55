"""The on-prem file from `ray up` to `ray down`, on hosts that are lost meanwhile. The tests build on each other."""

import collections
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from tests.cluster.conftest import BIN, PORT, Operator
from tests.cluster.hosts import Host, Hosts, wait_until

READY_S = 240  # from `ray up` to the first answer, on a busy machine


@pytest.fixture(scope="module")
def cluster(operator: Operator) -> Operator:
    """The file, brought up."""
    bring_up(operator)
    return operator


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "street.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(path)
    return path


def bring_up(operator: Operator) -> None:
    started = time.monotonic()
    operator.ray("up", "-y", "--no-config-cache", operator.file)
    up = time.monotonic() - started
    try:
        wait_until(operator.is_ready, READY_S, "the front end")
    except AssertionError:
        for command in ("tail -n 20 ~/airmoe/serve.log", "tail -n 40 /tmp/ray/session_latest/logs/monitor.out"):
            print(operator.hosts.head.ssh(command).stdout)
        raise
    print(f"ray up took {up:.0f} s, the first answer came after {time.monotonic() - started:.0f} s")


def homes(operator: Operator) -> dict[int, str]:
    """Client -> address of its host, of those that are up."""
    return {expert["id"]: expert["node"] for expert in operator.experts() if expert["state"] == "up"}


def is_balanced(operator: Operator) -> bool:
    """Six experts, and cloud and channel on the head, over three hosts: nobody has two more than another."""
    at_home = homes(operator)
    actors = collections.Counter({host.address: 0 for host in operator.hosts.all})
    actors.update([*at_home.values(), *2 * [operator.hosts.head.address]])
    return len(at_home) == 6 and max(actors.values()) - min(actors.values()) <= 1


def titles(host: Host) -> list[str]:
    found = []
    for process in host.processes():
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def front_end(operator: Operator) -> psutil.Process:
    served = [
        p for p in operator.hosts.head.processes() if "airmoe serve" in " ".join(p.cmdline()) and p.name() != "bash"
    ]
    return served[0]


@contextmanager
def load(operator: Operator, photo: Path) -> Iterator[list[dict[str, Any]]]:
    """Requests one after the other in the background; what became of each."""
    outcomes: list[dict[str, Any]] = []
    stop = threading.Event()
    picture = photo.read_bytes()

    def ask() -> None:
        with httpx.Client(base_url=operator.url, headers={"X-API-Key": operator.api_key}, timeout=60) as client:
            while not stop.is_set():
                started = time.monotonic()
                try:
                    response = client.post("/segment", files={"file": picture})
                    body = response.json()
                    reason = body["routing"]["reason"] if response.is_success else body["error"]
                    outcome = {"code": response.status_code, "reason": reason}
                except httpx.TransportError as error:
                    outcome = {"code": 0, "reason": type(error).__name__}
                outcomes.append({**outcome, "seconds": time.monotonic() - started})
                stop.wait(0.1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield outcomes
    finally:
        stop.set()
        asking.join()


def test_images_are_segmented_from_outside_the_head(cluster: Operator, photo: Path) -> None:
    done = cluster.airmoe("segment", photo, "--url", cluster.url, "--out", cluster.folder / "segmented", "--json")
    assert done.returncode == 0, done.stderr
    mask = np.asarray(Image.open(cluster.folder / "segmented" / "street_mask.png"))
    assert mask.shape == (64, 96)
    assert json.loads(done.stdout)[0]["degraded"] is None


def test_strangers_are_refused(cluster: Operator) -> None:
    assert httpx.get(f"{cluster.url}/experts", timeout=30).status_code == 401


def test_experts_are_spread_and_the_cloud_lives_beside_the_front_end(cluster: Operator, hosts: Hosts) -> None:
    assert is_balanced(cluster), homes(cluster)
    assert any("ray::Cloud" in title for title in titles(hosts.head))
    assert not any("ray::Cloud" in title for worker in hosts.workers for title in titles(worker))


def test_experts_are_scaled_from_the_laptop(cluster: Operator, hosts: Hosts) -> None:
    # the token that the front end wrote for its owner on the head
    token = json.loads((hosts.head.home / f"airmoe/run/state/server-{PORT}.json").read_text())["admin_token"]

    def scale(*wish: object) -> list[dict[str, Any]]:
        done = cluster.airmoe("scale", *wish, "--url", cluster.url, "--admin-token", token, "--json")
        assert done.returncode == 0, done.stderr
        return cluster.experts()

    assert len(scale("--experts", 4)) == 4
    assert len(scale("--experts", 6, "--replicas", "0=2")) == 6
    wait_until(lambda: len(homes(cluster)) == 6, 90, "six experts")
    wait_until(lambda: cluster.experts()[0]["replicas"] == 2, 90, "a second instance of expert 0")
    assert scale("--replicas", "0=1")[0]["replicas"] == 1


def test_a_killed_front_end_serves_again_within_a_minute(cluster: Operator) -> None:
    old = front_end(cluster)
    old.kill()
    wait_until(lambda: not old.is_running(), 10, "its end")
    took = wait_until(lambda: cluster.is_ready() and len(homes(cluster)) == 6, 180, "the front end")
    print(f"front end killed, all experts up again after {took:.0f} s")
    assert took < 60


def test_requests_are_answered_while_a_host_is_lost_and_its_experts_come_back(
    cluster: Operator, hosts: Hosts, photo: Path
) -> None:
    lost = hosts.workers[1]
    orphans = [client for client, home in homes(cluster).items() if home == lost.address]
    assert orphans
    with load(cluster, photo) as outcomes:
        wait_until(lambda: len(outcomes) >= 5, 60, "some answers")
        lost.kill()

        def all_elsewhere() -> bool:
            now = homes(cluster)
            return len(now) == 6 and lost.address not in now.values()

        took = wait_until(all_elsewhere, 180, f"experts {orphans} elsewhere")
    codes = collections.Counter(outcome["code"] for outcome in outcomes)
    degraded = collections.Counter(outcome["reason"] for outcome in outcomes if outcome["reason"])
    slowest = max(outcome["seconds"] for outcome in outcomes)
    print(
        f"experts {orphans} back after {took:.0f} s; answers {dict(codes)}, degraded {dict(degraded)}, {slowest:.1f} s"
    )
    assert set(codes) == {200}


def test_after_the_head_is_lost_ray_up_brings_everything_back(cluster: Operator, hosts: Hosts) -> None:
    hosts.head.kill()
    hosts.head.boot()
    hosts.workers[1].boot()
    bring_up(cluster)
    wait_until(lambda: is_balanced(cluster), 60, "experts on all hosts")


def test_ray_down_leaves_no_process(cluster: Operator, hosts: Hosts) -> None:
    cluster.ray("down", "-y", cluster.file)

    def left() -> list[str]:
        return [f"{host.name}: {title[:100]}" for host in hosts.all for title in titles(host)]

    try:
        took = wait_until(lambda: not left(), 150, "the end of all processes")
    except AssertionError:
        print("\n".join(left()))
        raise
    print(f"no process left {took:.0f} s after ray down")


@pytest.mark.slow
def test_ray_up_fails_with_the_log_where_the_front_end_does_not_come_up(operator: Operator, tmp_path: Path) -> None:
    """On the head alone, which is quicker. It needs none of the tests before it."""
    start = yaml.safe_load(operator.file.read_text())["head_start_ray_commands"]
    file = operator.write_file(
        tmp_path / "cluster.yaml",
        provider__worker_ips=[],
        max_workers=0,
        min_workers=0,
        head_start_ray_commands=[
            command.replace("cluster.placement=spread", "cluster.placement=sprad") for command in start
        ],
    )
    started = time.monotonic()
    done = operator.call(BIN / "ray", "up", "-y", "--no-config-cache", file)
    print(f"ray up gave up after {time.monotonic() - started:.0f} s")
    operator.ray("down", "-y", file)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "The front end does not come up. The end of ~/airmoe/serve.log" in told
    assert told.count("cluster.placement") >= 3  # it was started three times, and said why it ended each time

"""The pods of kuberay.yaml, run by podman: commands, users, read-only roots and volumes are the file's own.

KubeRay's part (the `ray start` of head and workers) and kubelet's (addresses, secrets, fsGroup) are done here. There is
no GPU: the workers' GPUs are logical ones.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from api.cli.doctor.cluster_file import read_documents
from api.cli.doctor.kubernetes.pods import Pod, pods
from tests.actors.conftest import tiny, write_checkpoint
from tests.api.support import wait_for
from tests.deploy import containers
from tests.deploy.containers import IMAGE

FILE = Path(__file__).parents[2] / "configs/cluster/kuberay.yaml"
PODS = {pod.name: pod for pod in pods(read_documents(FILE))}
FRONT = PODS["airmoe-front"]
KEYS = {"AIRMOE_API_KEY": secrets.token_hex(16), "AIRMOE_ADMIN_TOKEN": secrets.token_hex(16)}
USER = 1000

pytestmark = pytest.mark.slow


def podman(*arguments: object, check: bool = True) -> str:
    return containers.podman(*arguments, check=check, timeout_s=300).stdout.strip()


class Namespace:
    """Pods in a network of their own, on a volume that all of them see."""

    def __init__(self, volume: Path) -> None:
        self.volume, self.name, self.token = volume, f"am{secrets.token_hex(3)}", secrets.token_hex(32)
        podman("network", "create", self.name)
        (net,) = json.loads(podman("network", "inspect", self.name))
        base = net["subnets"][0]["subnet"].rpartition(".")[0]
        self.addresses = {name: f"{base}.{50 + n}" for n, name in enumerate(("head", "front", "one", "two"))}

    @property
    def url(self) -> str:
        return f"http://{self.addresses['front']}:8000"

    def run(self, name: str, pod: Pod, command: list[str]) -> None:
        """Start a pod's container with all that the file says of it."""
        locked, user = pod.main["securityContext"], pod.spec["securityContext"]
        options = ["--read-only", "--read-only-tmpfs=false"] if locked["readOnlyRootFilesystem"] else []
        options += [f"--cap-drop={capability}" for capability in locked["capabilities"]["drop"]]
        options += ["--security-opt=no-new-privileges", f"--user={user['runAsUser']}:{user['runAsGroup']}"]
        for mount in pod.main["volumeMounts"]:
            place = mount["mountPath"]
            if mount["name"] == "shared":
                options.append(f"--volume={self.volume}:{place}")
            elif place == "/dev/shm":
                options.append("--shm-size=2g")
            else:
                options.append(f"--mount=type=tmpfs,destination={place},tmpfs-mode=1777")
        stated = {entry["name"]: entry["value"] for entry in pod.main["env"] if "value" in entry}
        given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "AIRMOE_LOGICAL_GPUS": "1"}
        given |= {"POD_IP": self.addresses[name], "NAMESPACE": "lab"} | (KEYS if pod is FRONT else {})
        options += [f"--env={variable}={value}" for variable, value in (stated | given).items()]
        options.append("--restart=on-failure:5")  # as kubelet does: on a busy machine a node may take too long to start
        place = ["--network", self.name, "--ip", self.addresses[name]]
        place += ["--add-host", f"airmoe-head-svc:{self.addresses['head']}", "--name", f"{self.name}-{name}"]
        podman("run", "--detach", *place, *options, "--entrypoint", command[0], IMAGE, *command[1:])

    def ray_start(self, name: str, pod: Pod, *more: str) -> None:
        """As KubeRay starts head and workers."""
        options = [*more, f"--node-ip-address={self.addresses[name]}", "--block"]
        options += [f"--{option}={value}" for option, value in pod.start.items()]
        self.run(name, pod, ["ray", "start", *options])

    def actors(self, name: str) -> list[str]:
        titles = podman("exec", f"{self.name}-{name}", "ps", "-eo", "args").splitlines()
        return sorted(title.split()[0].removeprefix("ray::") for title in titles if title.startswith("ray::"))

    def ask(self, path: str, **more: Any) -> httpx.Response:
        headers = {"X-API-Key": KEYS["AIRMOE_API_KEY"]} | more.pop("headers", {})
        return httpx.request(more.pop("method", "GET"), f"{self.url}{path}", headers=headers, timeout=60, **more)

    def logs(self) -> str:
        """The last words of every pod, errors included."""
        names = [f"{self.name}-{name}" for name in self.addresses]
        told = [containers.podman("logs", "--tail=8", name, check=False) for name in names]
        return "\n".join(f"{name}:\n{each.stdout}{each.stderr}" for name, each in zip(names, told, strict=True))

    def close(self) -> None:
        for name in self.addresses:
            podman("rm", "--force", "--time=2", f"{self.name}-{name}", check=False)
        podman("network", "rm", "--force", self.name, check=False)


@pytest.fixture(scope="module")
def namespace(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    volume = tmp_path_factory.mktemp("volume")
    namespace = Namespace(volume)
    try:
        yield namespace
    finally:
        namespace.close()


@pytest.fixture(scope="module")
def served(namespace: Namespace) -> Namespace:
    """Head, front end and two workers, as `kubectl apply` brings them up, and a run on the volume."""
    run = namespace.volume / "runs/quickstart"
    write_checkpoint(run / "incoming", tiny(experts={"count": 6}))
    for place in (namespace.volume, *namespace.volume.rglob("*")):
        shutil.chown(place, USER, USER)  # fsGroup's part
    namespace.ray_start("head", PODS["head"], "--head", "--port=6379")
    wait_for(lambda: "success" in podman("exec", f"{namespace.name}-head", *_healthy(), check=False), timeout_s=60)
    for name in ("one", "two"):
        namespace.ray_start(name, PODS["experts"], "--address=airmoe-head-svc:6379", "--num-cpus=3", "--num-gpus=1")
    init = FRONT.spec["initContainers"][0]
    options = ["--rm", "--read-only", f"--user={USER}:{USER}", f"--volume={namespace.volume}:/srv/airmoe"]
    command = ["--entrypoint", init["command"][0], IMAGE, *init["command"][1:], *init["args"]]
    waits = containers.begin("run", *options, *command)
    time.sleep(3)
    assert waits.poll() is None  # for the run
    (run / "incoming").rename(run / "checkpoint")
    assert waits.wait(60) == 0
    namespace.run("front", FRONT, [*FRONT.main["command"], *FRONT.main["args"]])

    def ready() -> bool:
        try:
            return namespace.ask("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(ready, timeout_s=240)
    assert ready(), namespace.logs()
    return namespace


def _healthy() -> list[str]:
    """As KubeRay asks a node how it is."""
    return ["wget", "-qO-", "http://127.0.0.1:52365/api/local_raylet_healthz"]


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("photo") / "street.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(path)
    return path.read_bytes()


def test_cloud_and_channel_live_with_the_front_end_and_experts_on_workers(served: Namespace) -> None:
    assert {"Cloud", "Channel"} <= set(served.actors("front"))
    assert "ExpertHost" not in served.actors("front")
    experts = served.ask("/experts").json()["experts"]
    assert {expert["node"] for expert in experts} == {served.addresses["one"], served.addresses["two"]}
    assert not {"Cloud", "Channel", "ExpertHost"} & set(served.actors("head"))


def test_the_front_end_answers_to_its_services_name_and_to_no_other(served: Namespace) -> None:
    assert served.ask("/experts", headers={"Host": "airmoe.lab.svc"}).status_code == 200
    assert served.ask("/experts", headers={"Host": "airmoe.elsewhere"}).status_code == 421


def test_every_pod_exports_rays_metrics(served: Namespace) -> None:
    for name, address in served.addresses.items():
        wait_for(lambda at=address: "ray_node_cpu_count" in httpx.get(f"http://{at}:8080/metrics", timeout=30).text)
        assert "ray_node_cpu_count" in httpx.get(f"http://{address}:8080/metrics", timeout=30).text, name


def test_images_are_answered_also_when_a_worker_is_taken_away(served: Namespace, photo: bytes) -> None:
    whole = served.ask("/segment", method="POST", files={"file": photo})
    assert whole.status_code == 200, whole.text
    lost = served.addresses["two"]
    podman("kill", f"{served.name}-two")

    def up_there() -> list[int]:
        return [e["id"] for e in served.ask("/experts").json()["experts"] if (e["node"], e["state"]) == (lost, "up")]

    wait_for(lambda: not up_there(), timeout_s=60)
    assert not up_there()
    after = served.ask("/segment", method="POST", files={"file": photo})
    assert after.status_code == 200, after.text

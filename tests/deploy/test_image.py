"""The image as the Dockerfile builds it: who it runs as, what it may write, what is in it, and that it serves."""

import base64
import io
import json
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.deploy import containers
from tests.deploy.containers import IMAGE, ROOT, podman

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.usefixtures("image")]
HOME = "/home/airmoe"


@contextmanager
def container(*arguments: object) -> Iterator[str]:
    """A container that runs for the duration of the block; its id."""
    name = podman("run", "--detach", "--read-only", *arguments).stdout.strip()
    try:
        yield name
    finally:
        podman("rm", "--force", "--volumes", "--time=20", name, check=False)


def inside(command: str, *options: object) -> str:
    """What a command prints in a container of its own, read-only but for the image's volumes."""
    return podman("run", "--rm", "--read-only", "--network=none", *options, IMAGE, "bash", "-c", command).stdout.strip()


def photo(height: int, width: int) -> bytes:
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(picture).save(written, "PNG")
    return written.getvalue()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder of the image's user, as `ray up` leaves it on a node."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_it_serves_the_model_in_the_box_as_user_1000_from_a_read_only_root() -> None:
    key, port = secrets.token_hex(16), free_port()
    command = ("airmoe", "serve", "--host", "0.0.0.0", "--port", "8000")
    with container(f"--env=AIRMOE_API_KEY={key}", f"--publish=127.0.0.1:{port}:8000", IMAGE, *command) as name:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": key}, timeout=60) as client:
            _await_ready(client, name)
            answer = client.post("/segment", files={"file": photo(height=120, width=200)})
            assert answer.status_code == 200, answer.text
            mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["mask"]))))
            assert mask.shape == (120, 200)
            assert answer.json()["routing"]["reason"] is None
            assert client.get("/experts", headers={"X-API-Key": "another"}).status_code == 401
        assert podman("exec", name, "id", "-u").stdout.strip() == "1000"
        assert set(podman("exec", name, "ps", "-eo", "uid=").stdout.split()) == {"1000"}
        assert podman("exec", name, "touch", "/usr/here", check=False).returncode != 0


def _await_ready(client: httpx.Client, name: str, within_s: float = 180) -> None:
    until = time.monotonic() + within_s
    while True:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        running = podman("inspect", "--format={{.State.Running}}", name).stdout.strip()
        assert running == "true", podman("logs", name, check=False)
        assert time.monotonic() < until, podman("logs", name, check=False)
        time.sleep(1)


def test_ray_finds_the_home_of_its_user_and_the_token_in_it(tmp_path: Path) -> None:
    said = json.loads(podman("image", "inspect", "--format={{json .Config.Env}}", IMAGE).stdout)
    assert f"HOME={HOME}" in said  # `ray up` mounts ~/… below it, and below /root where it is missing
    token = tmp_path / "auth_token"
    token.write_text("t" * 32)
    token.chmod(0o644)
    script = "from ray._raylet import AuthenticationTokenLoader as A; print(A.instance().has_token())"
    found = inside(f"RAY_AUTH_MODE=token python -c '{script}'", f"--volume={token}:{HOME}/.ray/auth_token")
    assert found.splitlines()[-1] == "True"


def test_its_user_may_write_beside_what_is_mounted(checkpoint: Path) -> None:
    script = "touch ~/airmoe/serve.pid ~/airmoe/serve.log && mkdir ~/airmoe/run/state && ls ~/airmoe/run/checkpoint"
    assert inside(script, f"--volume={checkpoint}:{HOME}/airmoe/run/checkpoint") == "config.json"


def test_the_head_can_speak_to_aws() -> None:
    script = "import boto3, ray.autoscaler._private.aws.node_provider as aws; print(aws.AWSNodeProvider.__name__)"
    assert inside(f'python -c "{script}"') == "AWSNodeProvider"


def test_it_has_what_ray_up_calls() -> None:
    wanted = ["rsync", "ssh", "ps", "hostname", "wget", "setsid", "pgrep", "ray", "airmoe"]
    assert inside(f"command -v {' '.join(wanted)} | wc -l") == str(len(wanted))


def test_every_version_is_the_locks() -> None:
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    brought = json.loads(inside("pip list --format=json --disable-pip-version-check"))
    ours = {_normal(part["name"]): part["version"].partition("+")[0] for part in brought}
    base = {_normal(name) for name in podman("run", "--rm", containers.BASE, "pip", "list").stdout.split()}
    wanted = {_normal(name): version for name, version in lock.items()}
    assert ours["ray"] == wanted["ray"]
    strangers = {name: version for name, version in ours.items() if wanted.get(name) != version}
    assert not strangers.keys() - base - {"airmoe-ray"}, strangers


def test_the_cpu_image_has_no_cuda() -> None:
    assert inside("pip list 2>/dev/null | grep -ci '^nvidia\\|^triton ' || true") == "0"
    assert inside('python -c "import torch; print(torch.version.cuda)"') == "None"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

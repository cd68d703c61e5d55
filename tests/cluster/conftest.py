"""Three hosts for a session, and an operator beside them: a folder, keys, a run, the on-prem file filled in."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from airmoe_ray.config import Config
from tests.actors.conftest import tiny, write_checkpoint
from tests.cluster.hosts import Hosts, three_hosts, why_not

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORT = 8000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@dataclass
class Operator:
    """Someone at a laptop who has a copy of the project and the keys of the hosts."""

    folder: Path
    hosts: Hosts

    @property
    def file(self) -> Path:
        return self.folder / "cluster.yaml"

    @property
    def url(self) -> str:
        return f"http://{self.hosts.head.address}:{PORT}"

    @property
    def api_key(self) -> str:
        return (self.folder / "home/.airmoe/api_key").read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AIRMOE_"))}
        return kept | {
            "HOME": str(self.folder / "home"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "AIRMOE_API_KEY": self.api_key,
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "300",
        }

    def make_secrets(self) -> None:
        """The token and the key, as docs/cluster.md makes them."""
        for name in (".ray/auth_token", ".airmoe/api_key"):
            path = self.folder / "home" / name
            path.parent.mkdir(parents=True)
            path.write_text(secrets.token_hex(32))
            path.chmod(0o600)

    def prepare(self) -> None:
        """Secrets, the wheel, a run, and the shipped file with these hosts in it."""
        self.make_secrets()
        build_wheel(self.folder)
        write_checkpoint(self.folder / "runs/quickstart/checkpoint", served_config())
        self.write_file()

    def write_file(self, path: Path | None = None, **replaced: Any) -> Path:
        """The shipped file with our hosts in it; `auth=…` replaces a block, `auth__ssh_user=…` a value."""
        tree = yaml.safe_load((ROOT / "configs/cluster/onprem.yaml").read_text())
        tree["cluster_name"] = self.hosts.bridge
        tree["provider"] |= {"head_ip": self.hosts.head.address, "worker_ips": [w.address for w in self.hosts.workers]}
        tree["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.hosts.key)}
        for name, value in replaced.items():
            block, _, key = name.partition("__")
            tree[block] = {**tree[block], key: value} if key else value
        path = path or self.file
        path.write_text(yaml.safe_dump(tree, sort_keys=False, width=10_000))
        return path

    def call(self, *command: object, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """A command at the laptop."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def ray(self, *command: object, timeout_s: float = 300) -> str:
        """`ray …`, which must succeed."""
        done = self.call(BIN / "ray", *command, timeout_s=timeout_s)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def airmoe(self, *command: object) -> subprocess.CompletedProcess[str]:
        """`airmoe …` of this checkout."""
        return self.call(sys.executable, "-m", "api.cli.main", *command)

    def get(self, path: str) -> httpx.Response | None:
        """An answer of the front end, over the wire between the hosts; None where nobody answers."""
        try:
            return httpx.get(f"{self.url}{path}", headers={"X-API-Key": self.api_key}, timeout=30)
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        response = self.get("/readyz")
        return response is not None and response.status_code == 200

    def experts(self) -> list[dict[str, Any]]:
        """Of the front end; none while it does not answer."""
        response = self.get("/experts")
        return response.json()["experts"] if response is not None and response.is_success else []

    def clean(self) -> None:
        """What `ray up` keeps at the laptop, outside its folder."""
        for end in ("state", "lock"):
            Path(f"/tmp/ray/cluster-{self.hosts.bridge}.{end}").unlink(missing_ok=True)
        for sockets in Path("/tmp").glob(f"ray_ssh_*/{sha256(self.hosts.bridge.encode()).hexdigest()[:10]}"):
            shutil.rmtree(sockets, ignore_errors=True)


def served_config() -> Config:
    """Six small experts, K = 2."""
    return tiny(experts={"count": 6})


def build_wheel(folder: Path) -> None:
    """As `make wheel` does, from a copy: a build leaves files beside the sources."""
    source = folder / "source"
    unwanted = shutil.ignore_patterns(".*", "runs", "build", "dist", "tests", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder / "dist", source], check=True, capture_output=True)
    shutil.copy(ROOT / "constraints.txt", folder / "dist")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with three_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def operator(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("operator"), hosts)
    operator.prepare()
    yield operator
    operator.clean()

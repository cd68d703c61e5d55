"""A cloud of namespace hosts that run containers: machines are made and ended over HTTP, as a provider's are.

Each looks as a machine image for `ray up` does: a user `ubuntu` with uid 1000 who may use sudo, a `docker` command
(podman), and an NFS server to mount, which is a folder here. No registry is at hand: images are there already.
"""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, Hosts
from tests.deploy.containers import STORAGE, settings

HERE = Path(__file__).parent
_MORE = """
mkdir -p /tmp/ray_tmp_mount
for place in /run /mnt /home /tmp/ray_tmp_mount; do mount -t tmpfs -o mode=1777 tmpfs $place; done
mkdir -p /home/ubuntu
mount --bind {folder}/home /home/ubuntu
mount --bind {folder}/shadow /etc/shadow
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/sudoers /etc/sudoers
mount -t overlay overlay -o lowerdir={folder}/sbin:/usr/sbin /usr/sbin
"""
_DOCKER = """#!/bin/bash
# what a GPU node's runtime would bring is said to be there; limits are lowered to what may be given here
podman() {{ sudo -n env {variables} podman "$@"; }}
case "$1" in
  pull) podman image exists "$2" ;;
  info) echo "map[runc:{{runc}}]" ;;
  run) shift; podman run -v {here}:/provider/tests/cluster:ro -e PYTHONPATH=/provider -e AIRMOE_LOGICAL_GPUS=1 \\
    --ulimit nproc=8192:8192 "${{@//65536:65536/16384:16384}}" ;;
  *) podman "$@" ;;
esac
"""


class Machine(Host):
    """A host that runs containers."""

    user = "ubuntu"

    def __init__(self, number: int, hosts: Hosts, shared: Path) -> None:
        super().__init__(number, hosts.folder / f"node{number}", hosts.bridge, hosts.net, hosts.key)
        self.more = _MORE.format(folder=self.folder)
        self.shared = shared

    @property
    def keys(self) -> str:
        return "/home/ubuntu/.ssh/authorized_keys"

    def prepare(self) -> None:
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        shutil.copy(self.key.with_suffix(".pub"), self.home / ".ssh/authorized_keys")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "hostkey")], check=True)
        users = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != "1000"]
        (self.folder / "passwd").write_text("\n".join([*users, "ubuntu:x:1000:1000::/home/ubuntu:/bin/bash"]) + "\n")
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        (self.folder / "shadow").write_text("root:*:1::::::\nubuntu:*:1::::::\n")
        (self.folder / "sudoers").write_text("root ALL=(ALL) ALL\nubuntu ALL=(ALL) NOPASSWD: ALL\n")
        (self.folder / "sudoers").chmod(0o440)
        _script(self.folder / "sbin/mount.nfs4", f'#!/bin/sh\nexec mount --bind {self.shared} "$2"\n')
        _script(self.home / "bin/docker", _DOCKER.format(variables=self._variables(), here=HERE))
        for name in (".bashrc", ".profile"):
            (self.home / name).write_text('export PATH="$HOME/bin:$PATH"\n')
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, 1000, 1000)

    def _variables(self) -> str:
        """Podman with a store of its own, which takes images from that of the machine underneath."""
        own = STORAGE.replace("/var/lib/containers/storage", f"{self.folder}/storage")
        images = '[storage.options]\nadditionalimagestores = ["/var/lib/containers/storage"]\n'
        return " ".join(f"{name}={value}" for name, value in settings(self.folder, own + images).items())


class Cloud:
    """Machines, made when somebody asks for them; node id -> machine and tags."""

    def __init__(self, folder: Path) -> None:
        self.hosts = Hosts(folder, count=0)
        self.shared = folder / "shared"
        self.machines: dict[str, Machine] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._maker = ThreadPoolExecutor(1)  # a machine ends with the thread that made it

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Tags and address of each node that has not ended."""
        with self._lock:
            return {
                node: {"tags": self.tags[node], "address": machine.address}
                for node, machine in self.machines.items()
                if machine.pid is not None
            }

    def create(self, tags: dict[str, str], count: int) -> None:
        self._maker.submit(self._create, tags, count).result()

    def _create(self, tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            machine = Machine(len(self.machines), self.hosts, self.shared)
            machine.prepare()
            machine.boot()
            with self._lock:
                self.machines[machine.name], self.tags[machine.name] = machine, dict(tags)

    def tag(self, node: str, tags: dict[str, str]) -> None:
        with self._lock:
            self.tags[node] |= tags

    def terminate(self, node: str) -> None:
        self.machines[node].kill()

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._maker.shutdown()
        self.hosts.close()


@contextmanager
def cloud(folder: Path) -> Iterator[tuple[Cloud, str]]:
    """A cloud and the address it listens on, which its machines reach too."""
    made = Cloud(folder)
    made.shared.mkdir()

    class Calls(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            call, arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert call in ("nodes", "create", "tag", "terminate")
            answer = json.dumps(getattr(made, call)(**arguments)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    made.hosts.wire()
    server = ThreadingHTTPServer((f"{made.hosts.net}.254", 0), Calls)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made, f"http://{made.hosts.net}.254:{server.server_port}"
    finally:
        server.shutdown()
        made.close()


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

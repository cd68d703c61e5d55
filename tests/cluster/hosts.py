"""Three hosts on one machine: each has its own network, processes, mounts, home and sshd. Needs root.

A host's first process is its sshd: killing it takes every process and the network link of the host with it, as pulling
the plug does. Bridge and net are new in every run, so that two runs do not meet.
"""

import contextlib
import getpass
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PARTS = ("ip", "unshare", "setpriv", "sshd", "ssh", "ssh-keygen", "rsync", "pgrep", "setsid")
_UNSHARE = ("unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null")

_INNER = """
mount --make-rprivate /
mkdir -p /tmp/ray /tmp/ray_ssh_{user}
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /tmp/ray_ssh_{user}
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind {folder}/passwd /etc/passwd
{more}
mkdir -p /run/sshd
hostname {name}
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add {address}/24 dev eth0
ip link set eth0 up
exec {sshd} -D -e -o Port=22 -o ListenAddress={address} -o HostKey={folder}/hostkey -o PidFile=none \
  -o PermitRootLogin=yes -o PasswordAuthentication=no -o StrictModes=no -o UsePAM=no \
  -o AuthorizedKeysFile={keys}
"""


def why_not() -> str | None:
    """What is missing for hosts to be made here; None if nothing is."""
    if os.geteuid() != 0:
        return "making hosts needs root"
    if missing := [part for part in PARTS if shutil.which(part, path=_PATH) is None]:
        return f"making hosts needs {', '.join(missing)} (make test-deps)"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": _PATH},
    )
    return None if tried.returncode == 0 else f"namespaces are not permitted here ({tried.stderr.strip()})"


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Seconds until it holds; fails with `what` was waited for when it never does."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"waited {within_s:g} s in vain for {what}"
        time.sleep(0.1)
    return time.monotonic() - started


class Host:
    """One machine."""

    user = "root"
    more = ""  # what else happens when it boots, before it can be reached

    def __init__(self, number: int, folder: Path, bridge: str, net: str, key: Path) -> None:
        self.name, self.folder, self.key, self.bridge = f"host{number}", folder, key, bridge
        self.address = f"{net}.{10 + number}"
        self.link = f"{bridge}-{number}"
        self.home = folder / "home"
        self.pid: int | None = None

    @property
    def keys(self) -> str:
        """File of the keys that open it."""
        return f"{self.home}/.ssh/authorized_keys"

    def prepare(self) -> None:
        """Its files: keys, and a home of which root's password entry speaks."""
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        shutil.copy(self.key.with_suffix(".pub"), self.home / ".ssh" / "authorized_keys")
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "hostkey")
        entries = Path("/etc/passwd").read_text().splitlines()
        ours = f"root:x:0:0:root:{self.home}:/bin/bash"
        (self.folder / "passwd").write_text(
            "\n".join([ours, *(e for e in entries if not e.startswith("root:"))]) + "\n"
        )
        make_venv(self.home / "airmoe" / "venv")

    def boot(self) -> None:
        """Start it, or start it again after a kill."""
        user = hashlib.sha256(getpass.getuser().encode()).hexdigest()[:10]  # as Ray names its folder of ssh sockets
        sshd = shutil.which("sshd", path=_PATH)
        script = _INNER.format(
            folder=self.folder,
            name=self.name,
            address=self.address,
            sshd=sshd,
            user=user,
            keys=self.keys,
            more=self.more,
        )
        with (self.folder / "sshd.log").open("a") as log:
            outer = subprocess.Popen(
                # With the tests' own process, should it be killed, the hosts end too. Ahead of others (nice): Ray gives
                # a node 30 s to start, whatever else the machine does.
                ["setpriv", "--pdeathsig", "KILL", "nice", "-n", "-5", *_UNSHARE, "--kill-child", "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": _PATH, "HOME": str(self.home)},
            )
        self.outer = outer
        wait_until(lambda: bool(psutil.Process(outer.pid).children()), 10, f"{self.name}'s first process")
        self.pid = psutil.Process(outer.pid).children()[0].pid
        # the same card after every boot: neighbours remember whose address it was
        card = ("peer", "name", "eth0", "address", f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}")
        _run("ip", "link", "add", self.link, "type", "veth", *card, "netns", str(self.pid))
        _run("ip", "link", "set", self.link, "master", self.bridge, "up")
        wait_until(self._listens, 30, f"{self.name}'s sshd")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, 22), timeout=0.3):
            return True
        return False

    def kill(self) -> None:
        """Pull the plug."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.outer.wait(30)
            self.pid = None
            _forget(self.link)

    def ssh(self, command: str, *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command as `ray up` does: over ssh."""
        options = [part for option in _SSH_OPTIONS for part in ("-o", option)]
        return subprocess.run(
            ["ssh", "-q", "-i", str(self.key), *options, f"{self.user}@{self.address}", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def processes(self) -> list[psutil.Process]:
        """All that run on it but its sshd."""
        assert self.pid is not None
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.name() != "sshd":
                    found.append(process)
        return found


class Hosts:
    """The machines, the wire between them, and the key that opens them."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        mark = secrets.token_hex(3)
        self.bridge, self.net = f"am{mark}", _free_net()
        self.key = folder / "key"
        self.folder = folder
        self.all = [Host(n, folder / f"host{n}", self.bridge, self.net, self.key) for n in range(count)]

    @property
    def head(self) -> Host:
        return self.all[0]

    @property
    def workers(self) -> list[Host]:
        return self.all[1:]

    def wire(self) -> None:
        """The key, and the wire that machines are put on."""
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.net}.254/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")

    def boot(self) -> None:
        """Wire and machines."""
        self.wire()
        for host in self.all:
            host.prepare()
            host.boot()

    def close(self) -> None:
        """No process and no link stays."""
        for host in self.all:
            host.kill()
        _forget(self.bridge)


@contextmanager
def three_hosts(folder: Path) -> Iterator[Hosts]:
    """Hosts for the duration of a block."""
    hosts = Hosts(folder)
    try:
        hosts.boot()
        yield hosts
    finally:
        hosts.close()


def make_venv(folder: Path) -> None:
    """An environment with our requirements and without our project: hosts reach no package index.

    `pip install` of the cluster file then finds what it asks for and installs the project alone.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, module in {"pip": "pip._internal.cli.main", "ray": "ray.scripts.scripts"}.items():
        script = folder / "bin" / name
        script.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)


def _free_net() -> str:
    taken = subprocess.run(
        ["ip", "-4", "route"], capture_output=True, text=True, check=True, env={"PATH": _PATH}
    ).stdout
    nets = (f"10.{77 + secrets.randbelow(100)}.{secrets.randbelow(256)}" for _ in range(100))
    return next(net for net in nets if f"{net}." not in taken)


def _forget(link: str) -> None:
    subprocess.run(["ip", "link", "del", link], check=False, capture_output=True, env={"PATH": _PATH})


def _run(*command: object) -> None:
    subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, env={**os.environ, "PATH": _PATH}
    )

"""Start and stop, as people do it: signals at any moment leave nothing behind, and what cannot be joined is said."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.connection import cluster
from actors.errors import ClusterError

TOKEN = "a" * 32
SCRIPT = """
import sys, time
from pathlib import Path
import ray
from actors.cluster.connection import cluster
folder, use, address = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or [None])[0]
with cluster(address, cpus=None if address else 2):
    print(ray.get_runtime_context().gcs_address, flush=True)
    if folder.exists():
        from actors.serving.system import System
        from airmoe_ray.storage.checkpoint import load_checkpoint
        hosts = System(folder, load_checkpoint(folder)[0]).start()
        print("running", len(hosts), flush=True)
    while True:
        time.sleep(0.2)
        named = ray.util.list_named_actors(all_namespaces=True)
        use.write_text(f"{ray.available_resources().get('CPU', 0):.2f} CPUs free, named actors {named}")
"""


class Process:
    """The script in a process of its own; whatever it starts carries its mark."""

    def __init__(self, *args: object, **environment: str) -> None:
        self.address, self.segments = "", set(os.listdir("/dev/shm"))
        self.mark = f"AIRMOE_TEST_MARK={uuid.uuid4()}"
        name, value = self.mark.split("=")
        variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, args)],
            env=variables | {name: value, "RAY_AUTH_TOKEN": TOKEN} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline().strip()
        assert found, self.process.communicate()[1][-2000:]
        return found

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)

    def living(self) -> list[int]:
        """Processes that carry the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has gone, or is a zombie
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def survivors(self) -> list[str]:
        """Their command lines."""
        found = []
        for pid in self.living():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200])
        return found


@contextmanager
def started(*args: object, **environment: str) -> Iterator[Process]:
    process = Process(*args, **environment)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()
        for pid in process.living():  # where the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def gone(process: Process) -> bool:
    """Whether within ten seconds no process of it lives, and no new segment of shared memory is left."""
    until = time.monotonic() + 10
    while process.survivors() or set(os.listdir("/dev/shm")) - process.segments:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def settled(use: Path) -> str:
    """What the script last wrote about its cluster."""
    written = use.stat().st_mtime_ns if use.exists() else 0
    while not use.exists() or use.stat().st_mtime_ns == written or not use.read_text():
        time.sleep(0.05)
    return use.read_text()


@pytest.fixture(scope="module")
def checkpoint(make_system: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_system(tmp_path_factory.mktemp("run"), experts={"count": 1}, routing={"top_k": 1}).checkpoint
    return folder


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[tuple[Process, Process]]:
    """Two systems, each on a cluster of its own, started at the same time."""
    folder = checkpoint.parent
    with started(checkpoint, folder / "one") as one, started(checkpoint, folder / "other") as other:
        for process in (one, other):
            process.address = process.line()
        yield one, other


def test_two_systems_start_beside_each_other_on_one_machine(two: tuple[Process, Process]) -> None:
    assert two[0].address != two[1].address
    assert [process.line() for process in two] == ["running 1", "running 1"]


def test_a_running_cluster_is_joined_and_left_as_it_was(
    two: tuple[Process, Process], checkpoint: Path, tmp_path: Path
) -> None:
    use, address = checkpoint.parent / "one", two[0].address
    before = settled(use)
    with started(checkpoint, tmp_path / "guest", address) as guest:
        assert [guest.line(), guest.line()] == [address, "running 1"]
        assert settled(use) != before
        guest.end(signal.SIGTERM)
    until = time.monotonic() + 20
    while settled(use) != before:
        assert time.monotonic() < until, "actors of the guest are still there"
    assert before.endswith("named actors []")


def test_a_wrong_token_is_refused_at_once_and_said(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 32)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="the cluster refuses our token; put the cluster's own into RAY_AUTH_TOKEN"):
        cluster(two[0].address).__enter__()
    assert time.monotonic() - begun < 5


def test_systems_that_run_end_on_sigint_and_sigterm_without_a_trace(two: tuple[Process, Process]) -> None:
    for process, number in zip(two, (signal.SIGINT, signal.SIGTERM), strict=True):
        begun = time.monotonic()
        process.end(number)
        print(f"ended after {time.monotonic() - begun:.1f} s")
        assert gone(process), process.survivors()


@pytest.mark.parametrize(
    ("part", "number"),
    [("gcs", signal.SIGINT), ("gcs", signal.SIGTERM), ("raylet", signal.SIGTERM), ("Expert", signal.SIGINT)],
)
def test_a_signal_while_parts_come_up_leaves_nothing_behind(
    part: str, number: int, checkpoint: Path, tmp_path: Path
) -> None:
    folder = checkpoint if part == "Expert" else tmp_path / "none"
    with started(folder, tmp_path / "use") as process:
        until = time.monotonic() + 60
        while not any(part in command for command in process.survivors()):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.end(number)
        assert gone(process), process.survivors()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://10.0.0.1:10001", "client mode is too slow for tensors"),
        ("nonsense", "expected auto or host:port, such as"),
        ("10.0.0.1:", "expected auto or host:port, such as"),
        ("nowhere.invalid:6379", "nothing answers there"),
        ("127.0.0.1:1", r"nothing answers there \(Connection refused\)"),
        ("127.0.0.1:99999", "expected auto or host:port, such as"),
    ],
)
def test_an_address_that_cannot_be_joined_is_one_clear_line(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as failed, cluster(address):
        pass
    assert str(failed.value).startswith(f"--address {address}: ")
    assert "\n" not in str(failed.value)


def test_a_port_where_something_else_listens_is_one_clear_line_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address, begun = f"127.0.0.1:{other.getsockname()[1]}", time.monotonic()
        with pytest.raises(ClusterError, match="no Ray cluster to join"), cluster(address):
            pass
    assert time.monotonic() - begun < 20

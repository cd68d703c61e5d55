"""`airmoe doctor --cluster` on real hosts, before anything is installed there: what is wrong, and how to mend it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.cli.doctor.cluster import check_cluster
from api.cli.doctor.results import CheckResult
from tests.cluster.conftest import Operator
from tests.cluster.hosts import Hosts, wait_until

Doctor = Callable[..., dict[str, CheckResult]]


@pytest.fixture
def doctor(operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Results by check, of the operator's file with some values replaced."""
    monkeypatch.chdir(operator.folder)
    for name in ("RAY_TMPDIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(operator.folder / "home"))

    def doctor(config: str | None = None, *overrides: str, **replaced: Any) -> dict[str, CheckResult]:
        file = operator.write_file(tmp_path / "cluster.yaml", **replaced)
        return {result.check: result for result in check_cluster(file, config, overrides)}

    return doctor


def failures(results: dict[str, CheckResult]) -> dict[str, CheckResult]:
    found = {name: result for name, result in results.items() if not result.ok}
    for name, result in found.items():
        print(f"{name}: {result.message}")
    return found


@contextmanager
def changed(path: Path, text: str, mode: int = 0o600) -> Iterator[None]:
    """A file on a host (or here) that is another one for a while."""
    old = path.read_text() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    try:
        yield
    finally:
        path.unlink() if old is None else path.write_text(old)


def test_a_good_file_and_good_hosts_are_told_so(operator: Operator) -> None:
    done = operator.airmoe("doctor", "--cluster", operator.file, "--json")
    results = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {f"{host.address} ssh" for host in operator.hosts.all} < {result["check"] for result in results}
    assert all(result["ok"] for result in results)


def test_a_wrong_key_is_told_with_the_command_and_its_output(doctor: Doctor, hosts: Hosts, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copy(hosts.head.folder / "hostkey", stranger)
    found = failures(doctor(auth__ssh_private_key=str(stranger)))
    assert set(found) == {f"{host.address} ssh" for host in hosts.all}
    refusal = found[f"{hosts.head.address} ssh"]
    assert f"refuses {stranger} for user root" in refusal.message
    assert "BatchMode=yes" in (refusal.command or "")
    assert "Permission denied" in (refusal.output or "")


def test_a_host_that_is_down_is_named(doctor: Doctor, hosts: Hosts) -> None:
    nobody = f"{hosts.net}.99"
    found = failures(doctor(provider__worker_ips=[hosts.workers[0].address, nobody]))
    assert list(found) == [f"{nobody} ssh"]
    assert f"nothing answers at {nobody}" in found[f"{nobody} ssh"].message


def test_another_token_on_a_host_is_told(doctor: Doctor, hosts: Hosts) -> None:
    host = hosts.workers[0]
    with changed(host.home / ".ray/auth_token", "another token, as long as it should be"):
        found = failures(doctor())
    assert list(found) == [f"{host.address} token"]
    assert "another token than" in found[f"{host.address} token"].message


def test_a_token_that_others_may_read_is_told_here_and_there(doctor: Doctor, operator: Operator, hosts: Hosts) -> None:
    token = operator.folder / "home/.ray/auth_token"
    token.chmod(0o644)
    with changed(hosts.head.home / ".ray/auth_token", token.read_text(), 0o644):
        found = failures(doctor())
    token.chmod(0o600)
    assert set(found) == {"token", f"{hosts.head.address} token"}
    assert "chmod 600" in found["token"].message


def test_a_run_that_is_nowhere_is_told(doctor: Doctor, operator: Operator, hosts: Hosts) -> None:
    here = operator.folder / "runs/quickstart/checkpoint"
    away = here.rename(here.with_name("away"))
    found = failures(doctor())
    away.rename(here)
    assert set(found) == {"sent files", "run"}
    assert "runs/quickstart/checkpoint" in found["run"].message


def test_a_run_that_the_head_should_have_already_is_looked_for_there(doctor: Doctor, hosts: Hosts) -> None:
    found = failures(doctor("quickstart", file_mounts={"~/.ray/auth_token": "~/.ray/auth_token"}))
    assert list(found) == [f"{hosts.head.address} folders"]
    assert "~/airmoe/run/checkpoint: no such folder there" in found[f"{hosts.head.address} folders"].message


def test_another_ray_on_the_path_is_told(doctor: Doctor, hosts: Hosts) -> None:
    host = hosts.workers[1]
    with (
        changed(host.home / "old/ray", "#!/bin/sh\necho ray, version 2.9.0\n", 0o755),
        changed(host.home / ".bashrc", f"export PATH={host.home}/old:$PATH\n"),
    ):
        found = failures(doctor())
    assert list(found) == [f"{host.address} versions"]
    assert "(ray, version 2.9.0)" in found[f"{host.address} versions"].message


def test_a_taken_port_is_told(doctor: Doctor, hosts: Hosts) -> None:
    listener = "import socket, time; s = socket.create_server(('0.0.0.0', 6379)); time.sleep(600)"
    hosts.head.ssh(f'setsid python3 -c "{listener}" >/dev/null 2>&1 < /dev/null &')
    wait_until(lambda: any("create_server" in " ".join(p.cmdline()) for p in hosts.head.processes()), 30, "a listener")
    found = failures(doctor())
    for process in hosts.head.processes():
        process.kill()
    assert list(found) == [f"{hosts.head.address} ports"]
    assert "port 6379 is taken by another program" in found[f"{hosts.head.address} ports"].message


def test_more_gpus_than_the_hosts_have_are_told_in_numbers(doctor: Doctor) -> None:
    found = failures(doctor(None, "cluster.gpus_per_expert=1"))
    assert list(found) == ["placement"]
    assert "6 experts x 1 GPU need 6 GPUs, the cluster has 0" in found["placement"].message


def test_a_dataset_that_hosts_do_not_see_is_told(doctor: Doctor, hosts: Hosts) -> None:
    found = failures(doctor("quickstart", "data.root=/nowhere/camvid"))
    assert set(found) == {f"{host.address} folders" for host in hosts.all}

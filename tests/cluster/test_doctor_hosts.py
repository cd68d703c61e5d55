"""What doctor sees on real hosts beyond the login: versions to the patch level, folders, storage from every one."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.cli.doctor.cluster import check_cluster
from api.cli.doctor.results import CheckResult
from tests.cluster.conftest import Operator
from tests.cluster.hosts import Hosts
from tests.object_store import object_store

Doctor = Callable[..., dict[str, CheckResult]]
OTHER_PYTHON = Path("/usr/bin/python3")


@pytest.fixture
def doctor(operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Failed checks by name, of the operator's file with storage somewhere."""
    monkeypatch.chdir(operator.folder)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("HOME", str(operator.folder / "home"))

    def doctor(storage: str | None = None, **replaced: Any) -> dict[str, CheckResult]:
        file = operator.write_file(tmp_path / "cluster.yaml", **replaced)
        results = check_cluster(file, None, (), storage=storage)
        for result in results:
            print(f"{'ok  ' if result.ok else 'fail'} {result.check}: {result.message}")
        return {result.check: result for result in results if not result.ok}

    return doctor


def test_hosts_of_one_python_and_no_card_are_fine(doctor: Doctor) -> None:
    assert doctor() == {}


def test_a_host_whose_python_differs_in_the_patch_level_is_named(doctor: Doctor, hosts: Hosts) -> None:
    told = subprocess.run([OTHER_PYTHON, "--version"], capture_output=True, text=True, check=False).stdout.split()
    ours = ".".join(map(str, sys.version_info[:3]))
    if not told or told[1] == ours or told[1].rpartition(".")[0] != ours.rpartition(".")[0]:
        pytest.skip(f"needs a {ours.rpartition('.')[0]} of another patch level as {OTHER_PYTHON}")
    host = hosts.workers[0]
    venv = host.home / "airmoe/venv"
    kept = venv.rename(host.home / "airmoe/kept")
    try:
        subprocess.run([OTHER_PYTHON, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = (venv / "lib").glob("python3*/site-packages")
        (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
        found = doctor()
    finally:
        shutil.rmtree(venv)
        kept.rename(venv)
    assert list(found) == ["versions"]
    others = ", ".join(each.address for each in (hosts.head, hosts.workers[1]))
    assert f"{told[1]} on {host.address}" in found["versions"].message
    assert f"{ours} on {others}" in found["versions"].message


# a folder of many hosts: these share what is on this machine's disk, but not what is mounted into each


def test_a_folder_that_all_hosts_see_is_fine_and_is_left_as_it_was(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    assert doctor(str(tmp_path / "shared")) == {}
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_folder_that_is_another_one_on_a_host_is_told(doctor: Doctor, hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    stranger = hosts.workers[1]
    stranger.ssh(f"mount -t tmpfs tmpfs {folder}")
    found = doctor(str(folder))
    stranger.ssh(f"umount {folder}")
    assert list(found) == ["shared folder"]
    assert f"{stranger.address} does not see what {hosts.head.address} writes there" in found["shared folder"].message


def test_a_folder_that_a_host_cannot_write_to_is_told(doctor: Doctor, hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    host = hosts.workers[0]
    host.ssh(f"mount -t tmpfs -o ro tmpfs {folder}")
    found = doctor(str(folder))
    host.ssh(f"umount {folder}")
    assert list(found) == [f"{host.address} folders"]
    assert f"{folder}: not writable for root: it belongs to root:root" in found[f"{host.address} folders"].message


def test_a_folder_that_is_nowhere_is_told_of_every_host(doctor: Doctor, hosts: Hosts) -> None:
    found = doctor("/nowhere/runs")
    assert set(found) == {f"{host.address} folders" for host in hosts.all}
    assert "/nowhere/runs: no such folder there (--storage" in found[f"{hosts.head.address} folders"].message


# a bucket, on this machine's side of the wire


@pytest.fixture
def bucket(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket that is there for whoever has a key."""
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with object_store(f"{hosts.net}.254") as store:
        yield store.url("cityscapes")


def test_a_bucket_is_written_to_from_every_host_and_who_cannot_is_named(
    doctor: Doctor, hosts: Hosts, bucket: str
) -> None:
    for host in (hosts.head, hosts.workers[0]):
        (host.home / ".aws").mkdir()
        (host.home / ".aws/credentials").write_text("[default]\naws_access_key_id = k\naws_secret_access_key = s\n")
    stranger = hosts.workers[1]
    wall = f"prohibit ipproto tcp dport {bucket.rpartition(':')[2].partition('&')[0]}"
    stranger.ssh(f"ip rule add {wall}")
    try:
        found = doctor(bucket)
    finally:
        stranger.ssh(f"ip rule del {wall}")
        for host in (hosts.head, hosts.workers[0]):
            shutil.rmtree(host.home / ".aws")
    assert list(found) == [f"{stranger.address} storage"]
    assert "s3://runs/cityscapes: cannot be reached" in found[f"{stranger.address} storage"].message

"""A server that cannot start says why in one line, and leaves nothing behind."""

import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from api.cli import main
from api.http.server import check_bind
from tests.api.support import airmoe, free_port, wait_for

Refused = Callable[..., str]


def the_complaint(run: Path, code: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("starting ")]
    assert code == 2, stderr
    assert len(lines) == 1, stderr
    assert lines[0].startswith("airmoe: ")
    assert not list(run.glob("state/server-*.json"))
    return lines[0]


def refused_for_real(run: Path, *options: object) -> str:
    """The one line of a process that must not come to serve, and of which nothing may stay."""
    mark = uuid.uuid4().hex
    result = airmoe("serve", "--run", run, "--port", free_port(), *options, AIRMOE_TEST_MARK=mark)
    wait_for(lambda: not descendants(mark), timeout_s=10)
    assert not descendants(mark)
    return the_complaint(run, result.returncode, result.stderr)


def descendants(mark: str) -> list[psutil.Process]:
    """Processes that inherited a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AIRMOE_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The same within this process, where ray and torch are imported already."""

    def refused(run: Path, *options: object) -> str:
        port = () if "--port" in options else ("--port", free_port())
        monkeypatch.setattr(sys, "argv", ["airmoe", "serve", "--run", str(run), *map(str, (*port, *options))])
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit) as ended:
            main.run()
        return the_complaint(run, int(str(ended.value.code)), capsys.readouterr().err)

    return refused


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_an_open_address_needs_keys(run_folder):
    line = refused_for_real(run_folder, "--host", "0.0.0.0")
    assert "no key is set" in line
    assert "AIRMOE_API_KEY" in line
    assert "--set" not in line  # where everybody on the machine could read it


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "example.org", "127.0.0.1.example.org"])
def test_whatever_is_not_loopback_needs_keys(host):
    with pytest.raises(UserError, match="no key is set"):
        check_bind(Config(), host, free_port())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_loopback_needs_none(host):
    check_bind(Config(), host, free_port())


def test_an_open_address_with_keys_is_fine():
    check_bind(Config.model_validate({"serve": {"api_keys": ["long and random"]}}), "0.0.0.0", free_port())


def test_a_busy_port_is_named(refused, run_folder, busy_port):
    assert f"127.0.0.1:{busy_port} cannot be used (Address already in use)" in refused(run_folder, "--port", busy_port)


def test_a_missing_run_is_named(refused, tmp_path):
    assert str(tmp_path / "nothing") in refused(tmp_path / "nothing")


def test_a_missing_file_of_an_expert_is_named(refused, run_folder, tmp_path):
    shutil.copytree(run_folder / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "experts" / "expert_02.safetensors").unlink()
    assert "expert_02.safetensors: missing" in refused(tmp_path)


def test_a_damaged_file_of_an_expert_is_named(refused, run_folder, tmp_path):
    shutil.copytree(run_folder / "checkpoint", tmp_path / "checkpoint")
    damaged = tmp_path / "checkpoint" / "experts" / "expert_02.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    assert "expert_02.safetensors: cannot be read" in refused(tmp_path)


def test_more_experts_than_the_checkpoint_holds_are_refused(refused, run_folder):
    assert "holds 4 experts, the configuration asks for 5" in refused(run_folder, "--set", "experts.count=5")


def test_an_unknown_setting_is_refused_with_its_neighbour(refused, run_folder):
    assert "serve.queue" in refused(run_folder, "--set", "serve.queu=5")


def test_an_address_where_nothing_answers_is_named(refused, run_folder):
    address = f"127.0.0.1:{free_port()}"
    assert f"--address {address}: nothing answers there" in refused(run_folder, "--address", address)


def test_more_gpus_than_there_are_is_told_in_numbers(run_folder):
    line = refused_for_real(run_folder, "--set", "cluster.gpus_per_expert=1")
    assert "4 experts x 1 GPU need 4 GPUs, the cluster has 0" in line


def test_help_says_what_serve_does():
    result = airmoe("serve", "--help")
    assert result.returncode == 0
    assert "--address" in result.stdout


def test_a_client_without_a_server_is_told_so():
    result = airmoe("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "no server answers" in result.stderr

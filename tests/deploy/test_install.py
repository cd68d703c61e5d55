"""`make run` installs what running needs; what tests and checks need comes with `make test` and `make check`."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_architecture import ALLOWED, ROOT, imported

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# told to install where somebody asks for what they do; flwr has an environment of its own, which the bench makes
GUARDED = {"boto3", "botocore", "flwr", "matplotlib", "tensorboard", "transformers"}


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """What make looks at in a fresh clone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def installs(folder: Path, target: str) -> list[str]:
    """What a target would install of the project: itself, or with an extra."""
    return re.findall(r"pip install .*--editable '?(\.(?:\[\w+\])?)", plan(folder, target))


def plan(folder: Path, *arguments: str) -> str:
    """What make would run."""
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["run", "train", "street", "bench", "chaos"])
def test_running_installs_no_tools(fresh, target):
    assert installs(fresh, target) == ["."]


@pytest.mark.parametrize(
    "target", ["test", "test-slow", "test-cluster", "test-aws-file", "test-image", "check", "setup", "wheel"]
)
def test_working_on_it_installs_the_tools_after_the_rest(fresh, target):
    assert installs(fresh, target) == [".", ".[dev]"]


def test_tools_are_added_to_what_running_has_installed(fresh):
    (fresh / ".venv").mkdir()
    (fresh / ".venv" / ".installed").touch()
    assert installs(fresh, "run") == []
    assert installs(fresh, "test") == [".[dev]"]


@pytest.mark.parametrize(("arguments", "command"), [
    (["run"], "airmoe serve --port 8000"),
    (["run", "PORT=8080", "ARGS=--set serve.queue=9"], "airmoe serve --port 8080 --set serve.queue=9"),
    (["run", "RUN=runs/mine"], "airmoe serve --run runs/mine --port 8000"),
    (["run", "CONFIG=camvid-offline"], "airmoe serve --run runs/camvid-offline --port 8000"),
    (["train"], "airmoe train --config quickstart --run runs/quickstart"),
    (["train", "CONFIG=configs/street.yaml", "ARGS=-s a=b"],
     "airmoe train --config configs/street.yaml --run runs/street -s a=b"),
    (["bench"], "airmoe bench --run runs/quickstart"),
])  # fmt: skip
def test_each_target_runs_the_one_command_it_stands_for(fresh, arguments, command):
    lines = [re.sub(r"\s+", " ", line) for line in plan(fresh, *arguments).splitlines() if "airmoe " in line]
    assert [line for line in lines if command in line], lines
    assert not [line for line in lines if "airmoe train" in line] or "train" in arguments  # running never trains


def closure(wanted: list[str]) -> set[str]:
    """Distributions that come with the given requirements, by their normalised names."""
    found: set[tuple[str, str]] = set()
    todo = _that_apply(wanted, "")
    while todo:
        requirement = todo.pop()
        for extra in ("", *requirement.extras):
            if (key := (_normal(requirement.name), extra)) not in found:
                found.add(key)
                todo += _that_apply(requires(requirement.name) or [], extra)
    return {name for name, _ in found}


def _that_apply(requirements: list[str], extra: str) -> list[Requirement]:
    parsed = map(Requirement, requirements)
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": extra})]


def test_what_the_layers_import_comes_with_the_light_installation():
    come = closure(PROJECT["dependencies"])
    files = [path for package in ALLOWED for path in (ROOT / package).rglob("*.py")]
    names = {name.partition(".")[0] for path in files for name in imported(path)}
    foreign = names - ALLOWED.keys() - sys.stdlib_module_names - GUARDED - {"configs"}
    given = packages_distributions()
    missing = {name for name in foreign if not come & {_normal(one) for one in given.get(name, [])}}
    assert "torch" in foreign
    assert not missing


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

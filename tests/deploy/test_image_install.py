"""The Dockerfile's own steps in a clean environment: whether what they install works shows without docker, too."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def steps(stage: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a stage, continued lines joined, those of the stages it starts from first."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for line in text.splitlines():
        if opened := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            stages[opened[2]] = (opened[1], [])
        elif found := re.fullmatch(r"([A-Z]+) (.+)", line):
            stages[list(stages)[-1]][1].append((found[1], found[2]))
    parent, own = stages[stage]
    return (steps(parent) if parent in stages else []) + own


class Image:
    """A folder that stands for the file system of an image, with a Python of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)

    def inside(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(src|dist)\b", rf"{self.folder}/\1", text)

    def copy(self, arguments: str) -> None:
        *sources, target = arguments.split()
        for source in sources:
            place = Path(self.inside(target)) / (source if target.endswith("/") else "")
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)

    def run(self, command: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            ["sh", "-c", self.inside(command)],
            cwd=self.folder,
            env=kept | {"PATH": f"{self.folder}/venv/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    image = Image(tmp_path_factory.mktemp("image"))
    for instruction, rest in steps("wheel") + steps("cpu"):
        if instruction == "COPY" and not rest.startswith("--from=wheel"):  # one folder stands for both stages
            image.copy(rest)
        elif instruction == "RUN" and rest.startswith("pip "):
            image.run(rest)
    yield image
    shutil.rmtree(image.folder)  # a gigabyte


def test_the_image_has_the_command_and_the_shipped_configurations(image: Image) -> None:
    assert "serve" in image.run("airmoe --help")
    assert "top_k" in image.run("airmoe config --config quickstart")


def test_the_image_has_the_versions_that_the_tests_run_with(image: Image) -> None:
    wanted = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    script = "from importlib.metadata import version; print(*(version(n) for n in ('torch', 'torchvision', 'ray')))"
    torch, torchvision, ray = image.run(f'python -c "{script}"').split()
    assert torch.partition("+")[0] == wanted["torch"]
    assert torchvision.partition("+")[0] == wanted["torchvision"]
    assert ray in (ROOT / "configs/cluster/kuberay.yaml").read_text()


def test_both_targets_install_the_same() -> None:
    pip = [[rest for instruction, rest in steps(target) if "pip " in rest] for target in ("cpu", "cuda")]
    assert pip[0] == pip[1]
    assert len(pip[0]) == 2

"""The shape of the project: who may import whom, and what a built wheel holds."""

import ast
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {"airmoe_ray": set(), "actors": {"airmoe_ray"}, "api": {"airmoe_ray", "actors"}}
OUTSIDE = {"airmoe_ray": {"ray", "fastapi", "uvicorn", "starlette", "typer"}, "actors": {"fastapi", "uvicorn", "typer"}}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_each_layer_imports_only_leftwards(package):
    forbidden = (ALLOWED.keys() - ALLOWED[package] - {package}) | OUTSIDE.get(package, set())
    files = list((ROOT / package).rglob("*.py"))
    wrong = {str(path.relative_to(ROOT)): imported(path) & forbidden for path in files}
    assert files
    assert not {path: names for path, names in wrong.items() if names}


def test_an_expert_needs_neither_timm_nor_torchvision():
    code = "import sys, airmoe_ray.moe, airmoe_ray.clients; print({'timm', 'torchvision'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "set()"


def test_the_wheel_works_outside_the_checkout(tmp_path):
    source = tmp_path / "source"  # a copy: setuptools leaves its build folder behind, and would pick up an old one
    source.mkdir()
    for name in (*ALLOWED, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"configs/quickstart.yaml", "airmoe_ray/assets/embedded_vit.safetensors"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "runs/"))]

    # a venv that sees this one's dependencies but not the editable checkout
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    target = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(target)
    (target / "deps.pth").write_text(_site_packages_without_checkout(tmp_path))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = (
        "import airmoe_ray; from airmoe_ray.config_file import load_config;"
        "from airmoe_ray.backbone import load_backbone;"
        "config = load_config('quickstart'); print(airmoe_ray.__file__, load_backbone(config.backbone).dim)"
    )
    python = tmp_path / "venv" / "bin" / "python"
    result = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)  # noqa: PLW1510
    assert result.returncode == 0, result.stderr
    assert str(target) in result.stdout


def _site_packages_without_checkout(tmp_path: Path) -> str:
    """A folder of links to every installed package but this project's own editable hook."""
    import torch

    links = tmp_path / "links"
    links.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "airmoe" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    return str(links)

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
from packaging.metadata import Metadata

ROOT = Path(__file__).parent.parent
ALLOWED = {"airmoe_ray": set(), "actors": {"airmoe_ray"}, "api": {"airmoe_ray", "actors"}}
OUTSIDE = {
    "airmoe_ray": {"ray", "fastapi", "uvicorn", "starlette", "typer", "httpx"},
    "actors": {"fastapi", "uvicorn", "typer", "httpx"},
}
EXCEPTIONS = {"airmoe_ray/client.py": {"httpx"}}  # the one web thing in the core


# rooms of each layer in the order of the data, and which earlier ones each may import; modules beside the rooms
# (config, errors) are below all of them
ROOMS = {
    "airmoe_ray": {
        "runtime": set(),
        "data": {"runtime"},
        "features": {"runtime", "data"},
        "radio": {"runtime"},
        "model": {"runtime", "radio"},
        "storage": {"runtime", "data", "radio", "model"},
        "inference": {"runtime", "data", "features", "radio", "model", "storage"},
        "training": {"runtime", "data", "features", "radio", "model", "storage", "inference"},
        "baselines": {"runtime", "data", "features", "radio", "model", "storage", "inference", "training"},
        "experiments": {
            "runtime",
            "data",
            "features",
            "radio",
            "model",
            "storage",
            "inference",
            "training",
            "baselines",
        },
    },
    "actors": {
        "cluster": set(),
        "rounds": {"cluster"},
        "processes": {"cluster", "rounds"},
        "serving": {"cluster", "rounds", "processes"},
        "training": {"cluster", "rounds", "processes"},
        "experiments": {"cluster", "rounds", "processes", "training"},
    },
    "api": {"http": set(), "bench": {"http"}, "cli": {"http", "bench"}},
}
MOST_MODULES = 12  # in a folder


def imported(path: Path) -> set[str]:
    """Modules that a file imports, dotted."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_each_layer_imports_only_leftwards(package):
    forbidden = (ALLOWED.keys() - ALLOWED[package] - {package}) | OUTSIDE.get(package, set())
    files = list((ROOT / package).rglob("*.py"))
    wrong = {str(path.relative_to(ROOT)): {name.split(".")[0] for name in imported(path)} & forbidden for path in files}
    assert files
    assert {path: names for path, names in wrong.items() if names} == {
        path: names for path, names in EXCEPTIONS.items() if path.startswith(f"{package}/")
    }


@pytest.mark.parametrize("layer", ROOMS)
def test_each_room_imports_only_those_before_it(layer):
    rooms = ROOMS[layer]
    assert rooms.keys() == {path.parent.name for path in (ROOT / layer).glob("*/__init__.py")}
    for path in (ROOT / layer).rglob("*.py"):
        if path == ROOT / layer / "__init__.py":  # lends names to people, and imports their modules when asked for
            continue
        inner = path.relative_to(ROOT / layer).parts
        here = inner[0] if len(inner) > 1 else None  # None: beside the rooms
        used = {name.split(".")[1] for name in imported(path) if name.startswith(f"{layer}.")} & rooms.keys()
        assert used <= (rooms[here] | {here} if here else set()), path


@pytest.mark.parametrize("layer", ROOMS)
def test_no_folder_is_crowded(layer):
    folders = {path.parent for path in (ROOT / layer).rglob("*.py")}
    sizes = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert max(sizes.values()) <= MOST_MODULES, sizes


def test_an_expert_needs_neither_timm_nor_torchvision():
    code = (
        "import sys, airmoe_ray.model.moe, airmoe_ray.model.local_clients;"
        "print({'timm', 'torchvision'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import airmoe_ray", {"numpy", "torch", "httpx", "PIL", "pydantic"}),
        ("from airmoe_ray import Client, AsyncClient, ServerError", {"torch", "httpx", "PIL", "pydantic"}),
    ],
)
def test_what_a_program_imports_first_is_light(code, absent):
    code += f"; import sys; print({absent!r} & set(sys.modules), set(sys.modules) & {{'airmoe_ray.client'}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split()[0] == "set()"
    assert ("airmoe_ray.client" in result.stdout) == ("Client" in code)


def test_the_wheel_works_outside_the_checkout(tmp_path):
    source = tmp_path / "source"  # a copy: setuptools leaves its build folder behind, and would pick up an old one
    source.mkdir()
    for name in (*ALLOWED, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    standin = source / "airmoe_ray" / "shipped" / "standin"  # of a shipped model
    files = ("model.json", "config.yaml", "CARD.md", "cloud.safetensors", "experts/expert_00.safetensors")
    for name in files:
        (standin / name).parent.mkdir(parents=True, exist_ok=True)
        (standin / name).touch()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"configs/quickstart.yaml", "airmoe_ray/features/assets/embedded_vit.safetensors"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "runs/"))]
    assert {f"airmoe_ray/shipped/standin/{name}" for name in files} <= set(names)
    (described,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    about = Metadata.from_email(zipfile.ZipFile(wheel).read(described), validate=True)
    assert about.license_expression == "Apache-2.0 AND LicenseRef-AirMoE-Weights"
    assert "LicenseRef-AirMoE-Weights" in (ROOT / "airmoe_ray" / "shipped" / "TERMS.md").read_text()
    assert about.license_files == ["LICENSE", "airmoe_ray/shipped/TERMS.md"]

    # a venv that sees this one's dependencies but not the editable checkout
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    target = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(target)
    (target / "deps.pth").write_text(_site_packages_without_checkout(tmp_path))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = (
        "import airmoe_ray; from airmoe_ray.config_file import load_config;"
        "from airmoe_ray.features.backbone import load_backbone;"
        "from airmoe_ray.storage.shipped import find_model;"
        "config = load_config('quickstart'); print(airmoe_ray.__file__, load_backbone(config.backbone).dim);"
        "print(find_model('standin'))"
    )
    python = tmp_path / "venv" / "bin" / "python"
    result = subprocess.run([python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)  # noqa: PLW1510
    assert result.returncode == 0, result.stderr
    assert str(target) in result.stdout
    assert f"{target}/airmoe_ray/shipped/standin" in result.stdout


def _site_packages_without_checkout(tmp_path: Path) -> str:
    """A folder of links to every installed package but this project's own editable hook."""
    import torch

    links = tmp_path / "links"
    links.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "airmoe" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    return str(links)

"""The project's image, built and run by podman: it needs root, and neither a registry nor a docker daemon.

The base image is made of Debian's packages (debootstrap), as nobody can count on reaching a registry; pip's settings
are mounted for the build alone. Podman's own settings come from a folder of ours: the machine's stay as they are.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/airmoe-base:bookworm", "localhost/airmoe-ray:test-cpu"
PARTS = ("podman", "runc", "debootstrap")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_PYTHON = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
STORAGE = """[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""
# Limits that may be raised nowhere need no raising. runc runs with every layout of control groups, others do not.
ENGINE = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=8192:8192"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def why_not() -> str | None:
    """What is missing for containers to run here; None if nothing is."""
    if os.geteuid() != 0:
        return "running containers needs root"
    if missing := [part for part in PARTS if shutil.which(part, path=_PATH) is None]:
        return f"running containers needs {', '.join(missing)} (make test-deps)"
    tried = podman("info", check=False)
    return None if tried.returncode == 0 else f"podman does not work here ({tried.stderr.strip()[-300:]})"


def podman(*arguments: object, check: bool = True, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
    """`podman …`, with our settings."""
    done = subprocess.run(
        ["podman", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=_environment(),
    )
    assert not check or done.returncode == 0, f"podman {arguments}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def begin(*arguments: object) -> "subprocess.Popen[str]":
    """`podman …`, with our settings, not waited for; what it says comes in one pipe."""
    command = ["podman", *map(str, arguments)]
    return subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH, **settings(_settings_folder())}


def settings(folder: Path, storage: str = STORAGE) -> dict[str, str]:
    """Variables that make podman use settings which are written into the folder."""
    (folder / "storage.conf").write_text(storage)
    (folder / "containers.conf").write_text(ENGINE)
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
    }


@functools.cache
def _settings_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "airmoe-podman"
    folder.mkdir(exist_ok=True)
    return folder


def make_base() -> None:
    """Debian with its Python under the name BASE, unless it is there."""
    if podman("image", "exists", BASE, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as root:
        environment = {**os.environ, "PATH": _PATH}
        mirror = _mirror()
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_PYTHON}", "bookworm", root, mirror],
            check=True, capture_output=True, env=environment,
        )  # fmt: skip
        for mark in Path(root).glob("usr/lib/python3*/EXTERNALLY-MANAGED"):  # this Python is the image's own
            mark.unlink()
        shutil.copytree("/etc/apt", f"{root}/etc/apt", dirs_exist_ok=True, symlinks=True)
        archive = f"{root}.tar"
        try:
            subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
            podman("import", archive, BASE)
        finally:
            Path(archive).unlink(missing_ok=True)


def _mirror() -> str:
    """Where this machine gets its packages from."""
    sources = [path for path in Path("/etc/apt").rglob("*") if path.suffix in (".list", ".sources")]
    text = "\n".join(path.read_text() for path in sources)
    found = re.search(r"^(?:deb|URIs:)\s.*?((?:https?|file):/\S+)", text, re.M)
    assert found, "no apt source found"
    return found[1]


def build(target: str = "cpu", name: str = IMAGE) -> None:
    """The Dockerfile's target; layers that did not change are taken from the last time."""
    make_base()
    podman("build", "--network=host", "--layers", *_pip_settings(), f"--build-arg=BASE={BASE}", f"--target={target}",
           f"--tag={name}", "--quiet", ROOT)  # fmt: skip


def _pip_settings() -> list[str]:
    """This machine's package index as mounts of the build: nothing of it goes into the image."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = dict(re.findall(r"^\S+\.([\w-]+)='(.*)'$", said.stdout, re.M))
    file = _settings_folder() / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in options.items()))
    named = {Path(path) for value in options.values() for path in re.findall(r"(?:^|\s|file://)(/\S+)", value)}
    folders = {path if path.name != "simple" and path.is_dir() else path.parent for path in named}  # an index's files
    return [f"--volume={file}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(folders))]


if __name__ == "__main__":  # python tests/deploy/containers.py: builds it, for whoever wants to look inside
    build()
    print(IMAGE)

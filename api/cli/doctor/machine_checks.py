"""Checks of one machine: what `ray up` needs there. Each returns what it found, or raises what is wrong."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence

from airmoe_ray.errors import UserError
from api.cli.doctor.cluster_file import TOKEN, ClusterFile
from api.cli.doctor.ssh import Machine

_RAY_PORT = 6379
_STORE_KB = 1_000_000  # what the shipped files give Ray's object store
_DISK_KB = 8_000_000  # an environment with torch
_CLOCK_S = 60
# by CUDA's major version: the oldest driver for Linux that runs programs built for any of its minor versions
_OLDEST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}


def hardware(machine: Machine) -> str:
    """Tools, memory, disk and clock."""
    if machine.missing:
        raise UserError(f"{', '.join(machine.missing)} not found; install {' '.join(machine.missing)} there")
    if 0 < machine.number("shm_kb") < _STORE_KB:
        raise UserError(
            f"{machine.number('shm_kb') / 1e6:.1f} GB of shared memory, Ray's object store gets 1; enlarge /dev/shm "
            "there, or lower --object-store-memory"
        )
    if machine.number("disk_kb") < _DISK_KB and "ray" not in machine.facts:
        raise UserError(
            f"{machine.number('disk_kb') / 1e6:.1f} GB free at home, the installation takes 8; make room there"
        )
    if abs(machine.clock_off_s) > _CLOCK_S:
        raise UserError(f"its clock is {machine.clock_off_s:+.0f} s off ours; start a time service there")
    cpus, gpus, disk_gb = machine.number("cpus"), machine.number("gpus"), machine.number("disk_kb") / 1e6
    return f"{cpus:g} CPUs, {gpus:g} GPUs, {disk_gb:.0f} GB free"


def versions(machine: Machine, bin: str | None) -> str:
    """Python, Ray and torch: the same versions as here."""
    ray_here, torch_here = importlib.metadata.version("ray"), importlib.metadata.version("torch")
    if (stray := machine.facts.get("path_ray_version")) and stray.split()[-1] != ray_here:
        raise UserError(
            f"`ray` on the PATH there is {machine.facts['path_ray']} ({stray}), ours is {ray_here}, and `ray down` "
            f"calls what is on the PATH; put {bin or 'the right one'} first in ~/.bashrc"
        )
    if "ray" not in machine.facts:
        oldest = machine.facts.get("system_python", "")
        if [int(part) for part in oldest.split(".") if part.isdigit()] < [3, 11]:
            raise UserError(f"python3 is {oldest or 'missing'}, 3.11 or newer is needed; install it there")
        return f"Python {oldest}; Ray and torch not installed yet, `ray up` does that"
    ours = {"ray": ray_here, "torch": torch_here}
    for name, here in ours.items():
        there = machine.facts.get(name, "missing")
        if there.partition("+")[0] != here.partition("+")[0]:
            raise UserError(
                f"{name} {there} there, {here} here; `make wheel` and `ray up` again, or install {name}=={here}"
            )
    python, ours_too = machine.facts["python"], ".".join(map(str, sys.version_info[:3]))
    if python.split(".")[:2] != ours_too.split(".")[:2]:
        raise UserError(f"Python {python} there, {ours_too} here; Ray wants the same everywhere")
    # of the same minor version, nodes must agree with each other and this machine need not: it is no node
    remark = "" if python == ours_too else f" ({ours_too} here, which could not join as a node)"
    return f"Python {python}{remark}, Ray {machine.facts['ray']}, torch {machine.facts['torch']}"


def agree(machines: Sequence[Machine]) -> str:
    """Ray and Python of all machines, to the patch level: a node that differs is not let in."""
    found = {}
    for name, fallback in (("Python", "system_python"), ("Ray", None)):
        by_version: dict[str, list[str]] = {}
        for machine in machines:
            version = machine.facts.get(name.lower()) or (machine.facts.get(fallback) if fallback else None)
            if version:
                by_version.setdefault(version, []).append(machine.address)
        if len(by_version) > 1:
            each = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in sorted(by_version.items()))
            raise UserError(
                f"{name} {each}: Ray lets a node join only if it is the same to the patch level; install one version "
                "on all of them"
            )
        found[name] = next(iter(by_version), None)
    return ", ".join(f"{name} {version}" for name, version in found.items() if version) + " on all hosts"


def driver(machine: Machine) -> str:
    """NVIDIA's driver: there where a card is, and new enough for the CUDA that torch was built with."""
    version, cuda = machine.facts.get("driver", ""), machine.facts.get("cuda", "")
    if not version:
        if machine.number("cards"):
            raise UserError(
                f"{machine.number('cards'):g} NVIDIA cards and no nvidia-smi: the driver is missing, Ray would count 0 "
                "GPUs; install it there"
            )
        return "no NVIDIA card"
    oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0])
    if machine.number("gpus") and "torch" in machine.facts and not cuda:
        raise UserError(
            f"driver {version}, but torch {machine.facts['torch']} there is a CPU build; install the CUDA build"
        )
    if oldest and _numbers(version) < _numbers(oldest):
        raise UserError(
            f"driver {version} is too old for torch's CUDA {cuda}, which needs {oldest} or newer; update it there"
        )
    return f"driver {version}" + (f", CUDA {cuda}" if cuda else "")


def pulls(machine: Machine) -> str:
    """Images that containers are made of."""
    for image, reason in machine.images.items():
        if reason:
            raise UserError(f"{image} cannot be pulled there: {reason}; push it, or `docker login` there")
    return ", ".join(machine.images)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def same_token(machine: Machine, file: ClusterFile) -> str:
    """Ray's token: the same as the one that is sent. Only digests are compared."""
    there = machine.facts.get("token")
    if there is None:
        return "none yet, `ray up` brings it"
    digest, _, mode = there.partition(" ")
    path = file.mounts.get(TOKEN)
    if (
        path is not None
        and path.exists()
        and hashlib.sha256("".join(path.read_text().split()).encode()).hexdigest() != digest
    ):
        raise UserError(
            f"another token than {path}: the host could not join; `ray up` brings ours, or copy it to {TOKEN}"
        )
    if int(mode or "600", 8) & 0o077:
        raise UserError(f"{TOKEN}: others may read it there (mode {mode}); chmod 600 {TOKEN}")
    return "the same as ours"


def network(machine: Machine, peers: list[str]) -> str:
    """The way to the machines it must reach: from the head to all, from others to the head."""
    if machine.unreachable:
        raise UserError(
            f"cannot reach {', '.join(machine.unreachable)} (port 22); hosts must reach each other on all ports: open "
            "the firewall"
        )
    return f"reaches {', '.join(peers)}" if peers else "alone"


def ports(machine: Machine, file: ClusterFile) -> str:
    """The ports of Ray and of the front end, on the head."""
    taken = [port for port in (_RAY_PORT, file.served.port) if port in machine.listens]
    owners = {_RAY_PORT: "gcs_server", file.served.port: "serve"}
    for port in taken:
        if owners[port] not in machine.running:
            raise UserError(
                f"port {port} is taken by another program there; end it (`ss -ltnp` names it), or change the file"
            )
    if taken:
        return f"{' and '.join(map(str, taken))} held by a running cluster of ours, which `ray up` starts again"
    return f"{_RAY_PORT} and {file.served.port} are free"

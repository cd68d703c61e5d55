"""What a host must be like for `ray up` to work: each check takes what the host told, and says what is wrong."""

import hashlib
import importlib.metadata
import os
import sys

from airmoe_ray.errors import UserError
from api.cli.cluster_file import TOKEN, ClusterFile
from api.cli.cluster_host import Look

_RAY_PORT = 6379
_STORE_KB = 1_000_000  # what the shipped files give Ray's object store
_DISK_KB = 8_000_000  # an environment with torch
_CLOCK_S = 60


def machine(told: Look) -> str:
    """Tools, memory, disk and clock."""
    if told.missing:
        raise UserError(f"{', '.join(told.missing)} not found; install {' '.join(told.missing)} there")
    if 0 < told.number("shm_kb") < _STORE_KB:
        raise UserError(
            f"{told.number('shm_kb') / 1e6:.1f} GB of shared memory, Ray's object store gets 1; enlarge /dev/shm "
            "there, or lower --object-store-memory"
        )
    if told.number("disk_kb") < _DISK_KB and "ray" not in told.facts:
        raise UserError(
            f"{told.number('disk_kb') / 1e6:.1f} GB free at home, the installation takes 8; make room there"
        )
    if abs(told.clock_off_s) > _CLOCK_S:
        raise UserError(f"its clock is {told.clock_off_s:+.0f} s off ours; start a time service there")
    return f"{told.number('cpus'):g} CPUs, {told.number('gpus'):g} GPUs, {told.number('disk_kb') / 1e6:.0f} GB free"


def versions(told: Look, bin: str | None) -> str:
    """Python, Ray and torch, against ours."""
    ray_here, torch_here = importlib.metadata.version("ray"), importlib.metadata.version("torch")
    if (stray := told.facts.get("path_ray_version")) and stray.split()[-1] != ray_here:
        raise UserError(
            f"`ray` on the PATH there is {told.facts['path_ray']} ({stray}), ours is {ray_here}, and `ray down` calls "
            f"what is on the PATH; put {bin or 'the right one'} first in ~/.bashrc"
        )
    if "ray" not in told.facts:
        oldest = told.facts.get("system_python", "")
        if [int(part) for part in oldest.split(".") if part.isdigit()] < [3, 11]:
            raise UserError(f"python3 is {oldest or 'missing'}, 3.11 or newer is needed; install it there")
        return f"Python {oldest}; Ray and torch not installed yet, `ray up` does that"
    ours = {"ray": ray_here, "torch": torch_here}
    for name, here in ours.items():
        there = told.facts.get(name, "missing")
        if there.partition("+")[0] != here.partition("+")[0]:
            raise UserError(
                f"{name} {there} there, {here} here; `make wheel` and `ray up` again, or install {name}=={here}"
            )
    python = told.facts["python"]
    if python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        raise UserError(
            f"Python {python} there, {sys.version_info[0]}.{sys.version_info[1]} here; Ray wants the same everywhere"
        )
    return f"Python {python}, Ray {told.facts['ray']}, torch {told.facts['torch']}"


def same_token(told: Look, file: ClusterFile) -> str:
    """The token there, against the one that is sent; only digests travel."""
    there = told.facts.get("token")
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


def network(told: Look, peers: list[str]) -> str:
    """Head to workers and back."""
    if told.unreachable:
        raise UserError(
            f"cannot reach {', '.join(told.unreachable)} (port 22); hosts must reach each other on all ports: open "
            "the firewall"
        )
    return f"reaches {', '.join(peers)}" if peers else "alone"


def ports(told: Look, file: ClusterFile) -> str:
    """Of Ray and of the front end, on the head."""
    taken = [port for port in (_RAY_PORT, file.served.port) if port in told.listens]
    owners = {_RAY_PORT: "gcs_server", file.served.port: "serve"}
    for port in taken:
        if owners[port] not in told.running:
            raise UserError(
                f"port {port} is taken by another program there; end it (`ss -ltnp` names it), or change the file"
            )
    if taken:
        return f"{' and '.join(map(str, taken))} held by a running cluster of ours, which `ray up` starts again"
    return f"{_RAY_PORT} and {file.served.port} are free"


def folders(told: Look, wanted: dict[str, str]) -> str:
    """Folder -> why it is needed."""
    for folder, why in wanted.items():
        if folder not in told.folders and os.path.expanduser(folder) not in told.folders:
            raise UserError(f"{folder}: no such folder there ({why})")
    return ", ".join(wanted)

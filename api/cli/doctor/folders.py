"""Folders that machines must have: there, writable, and the same one wherever it is said to be shared."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import is_url
from api.cli.doctor.cluster_file import ClusterFile
from api.cli.doctor.ssh import Login, Machine, run

_OURS = "~/airmoe"  # of the shipped files: pid, log and state of the front end, and the environment


@dataclass(frozen=True)
class Need:
    """A folder, and what must be true of it."""

    folder: str
    why: str
    write: bool = False
    shared: bool = False  # all machines must see the same one; looked at where it can be written to
    optional: bool = False  # `ray up` makes it where it is missing


def needed(
    file: ClusterFile, settings: Config | None, *, is_head: bool, with_dataset: bool, storage: str | None
) -> list[Need]:
    """Folders that a machine needs and `ray up` does not bring."""
    found = [Need(_OURS, "`ray up` writes there", write=True, optional=True)]
    checkpoint = f"{file.served.run}/checkpoint"
    if is_head and checkpoint not in file.mounts and not is_url(file.served.run):
        found.append(Need(checkpoint, "the front end serves it; mount it with file_mounts, or copy it to the head"))
    if storage and not is_url(storage):
        found.append(Need(storage, "--storage; mount it on every host", write=True, shared=True))
    if settings is None:
        return found
    if (journals := settings.cluster.storage) and not is_url(journals):
        found.append(Need(journals, "cluster.storage; mount it on every host", write=True, shared=True))
    if with_dataset and (root := settings.data.root):
        found.append(Need(str(root), "data.root; mount it on every host"))
    return found


def check(machine: Machine, needs: Sequence[Need]) -> str:
    """Each is there, and the user who logs in can write where that is needed."""
    for need in needs:
        seen = machine.folders.get(need.folder)
        if seen is None:
            if need.optional:
                continue
            raise UserError(f"{need.folder}: no such folder there ({need.why})")
        if need.write and not seen.writable:
            raise UserError(
                f"{need.folder}: not writable for {machine.facts.get('user', 'us')}: it belongs to {seen.owner} (mode "
                f"{seen.mode}), or is mounted read-only; give it to the user there ({need.why.partition(';')[0]})"
            )
    return ", ".join(need.folder for need in needs)


def same(login: Login, hosts: Sequence[str], need: Need) -> str:
    """What is said to be shared is one folder: what the first host writes there, the others see."""
    first, *others = hosts
    mark = f"{need.folder}/.airmoe-{secrets.token_hex(8)}"
    run(login, first, f"touch {mark}")
    try:
        blind = [host for host in others if "seen" not in run(login, host, f"test -e {mark} && echo seen; true")]
    finally:
        run(login, first, f"rm -f {mark}")
    if blind:
        raise UserError(
            f"{need.folder}: {', '.join(blind)} does not see what {first} writes there; mount one and the same on "
            f"every host ({need.why.partition(';')[0]})"
        )
    return f"{need.folder} is one folder for all"

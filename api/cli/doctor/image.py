"""Looks into the images that a cluster file names, as far as this machine has them: their user, and what is inside."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from airmoe_ray.errors import UserError
from api.cli.doctor.results import CommandError

_ENGINES = ("docker", "podman")
_ANSWER_S = 60

# prints lines of a name and a value; a ~ is expanded there
_SCRIPT = r"""
echo uid $(id -u)
for folder in {folders}; do if [ ! -d $folder ]; then echo missing "$folder"; elif [ ! -w $folder ]; then
  echo locked $folder $(stat -c %U:%G $folder); fi; done
python3 - <<'PYTHON'
import importlib.metadata as metadata, sys
print("python", ".".join(map(str, sys.version_info[:3])))
for name in ("ray", "airmoe-ray", "boto3"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
PYTHON
"""


@dataclass(frozen=True)
class Image:
    """What was found in an image."""

    name: str
    home: str | None  # as its environment states it: that is where Ray mounts
    facts: dict[str, str]
    missing: tuple[str, ...] = ()  # folders of the mounts
    locked: tuple[str, ...] = ()  # those that its user cannot write to, with their owner


def engine() -> str | None:
    """The program that runs containers here, if there is one."""
    return next((name for name in _ENGINES if shutil.which(name)), None)


def pullable(images: Sequence[str]) -> str:
    """Ask each image's registry for it; whatever is here already counts too."""
    program = engine()
    if program is None:
        return "neither docker nor podman here: whether nodes can pull them cannot be checked"
    for image in images:
        if not _is_here(program, image):
            meaning = f"{image} is neither here nor at its registry for us; push it, or `{program} login`"
            _call([program, "manifest", "inspect", image], meaning)
    return f"{', '.join(images)}: here, or at the registry"


def look_into(image: str, folders: Sequence[str]) -> Image | None:
    """Start the image once, without network, and read what a small script prints; None where it is not here."""
    program = engine()
    if program is None or not _is_here(program, image):
        return None
    stated = _call([program, "image", "inspect", "--format", "{{json .Config.Env}}", image], "cannot be inspected")
    environment = dict(entry.split("=", 1) for entry in json.loads(stated) or [])
    script = _SCRIPT.format(folders=" ".join(folders))
    command = [program, "run", "--rm", "--network=none", "--entrypoint=bash", image, "-c", script]
    lines = [line.split(" ", 1) for line in _call(command, f"{image} does not start").splitlines() if " " in line]
    return Image(
        image,
        environment.get("HOME"),
        {name: value for name, value in lines if name not in {"missing", "locked"}},
        tuple(value for name, value in lines if name == "missing"),
        tuple(value for name, value in lines if name == "locked"),
    )


def check(image: Image, *, is_aws_head: bool) -> str:
    """What Ray's container runner and its autoscaler need of an image."""
    uid, ours = image.facts.get("uid", "?"), metadata.version("ray")
    if image.home is None and uid != "0":
        raise UserError(
            f"{image.name}: no ENV HOME: Ray would mount token, key and checkpoint into /root, which is "
            f"closed to uid {uid}; build it from our Dockerfile"
        )
    troubled = [*(f"{folder} (missing)" for folder in image.missing), *image.locked]
    if troubled and uid != "0":
        raise UserError(
            f"{image.name}: {troubled[0]}: uid {uid} cannot write there, and docker makes missing folders of mounts as "
            "root; make it in the Dockerfile, with chown"
        )
    if image.facts.get("ray") != ours:
        raise UserError(f"{image.name}: Ray {image.facts.get('ray', 'missing')}, here {ours}; build it again")
    if is_aws_head and "boto3" not in image.facts:
        raise UserError(f"{image.name}: no boto3, which the autoscaler on the head imports: no worker would start")
    return f"{image.name}: uid {uid}, Python {image.facts['python']}, Ray {ours}"


def agree(images: Sequence[Image]) -> str:
    """All of one Python, to the patch level."""
    found = {image.facts.get("python", "none"): image.name for image in images}
    if len(found) > 1:
        each = "; ".join(f"{version} in {name}" for version, name in sorted(found.items()))
        raise UserError(
            f"Python {each}: Ray lets a node join only if it is the same to the patch level; build both again"
        )
    return f"Python {next(iter(found))} in all"


def _is_here(program: str, image: str) -> bool:
    command = [program, "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False, timeout=_ANSWER_S).returncode == 0


def _call(command: list[str], meaning: str) -> str:
    shown = " ".join(part if len(part) < 200 else "…" for part in command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{meaning} (no answer within {_ANSWER_S} s)", shown, "") from None
    if done.returncode != 0:
        raise CommandError(meaning, shown, done.stderr or done.stdout)
    return done.stdout

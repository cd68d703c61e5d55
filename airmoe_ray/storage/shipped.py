"""Where a model is, by what people call it: a run or checkpoint (a folder or a URL), a shipped name, or a hub id.

Shipped models are folders in `airmoe_ray/shipped`, each a checkpoint with a card (`CARD.md`); `export.py` makes them.
"""

import difflib
import hashlib
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from airmoe_ray.errors import CheckpointError
from airmoe_ray.storage.bucket import is_url
from airmoe_ray.storage.folder_swap import recover
from airmoe_ray.storage.hub import fetch_from_hub, is_hub_id

DEFAULT = "street"  # what `airmoe serve` serves where nobody names another
STATE = Path(".airmoe") / "state"  # below the working folder: what ships is read-only
LAST, BEST = "checkpoint", "checkpoint-best"


@dataclass(frozen=True)
class ModelPlace:
    """A model on disk."""

    checkpoint: Path
    state: Path  # where a server of it keeps its own files; need not exist yet


def shipped_folder() -> Path:
    """The package's own models."""
    return Path(str(resources.files("airmoe_ray"))) / "shipped"


def shipped_names() -> list[str]:
    """Names of the models that came with this installation."""
    return sorted(path.parent.name for path in shipped_folder().glob("*/model.json"))


def find_model(name: str | os.PathLike[str], *, best: bool | None = False) -> ModelPlace:
    """The model of a run or checkpoint (a folder or a URL), of a shipped name, or of a hub id (`org/name`).

    A folder that exists comes first.
    `best`: of a run, the checkpoint that scored best on the validation images instead of the last one; None takes it
    where there is one.
    """
    if is_url(name):
        from airmoe_ray.storage.remote_run import fetch_model

        return ModelPlace(fetch_model(str(name), best=best), state_folder(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(folder, best=best)
    if str(name) in shipped_names():
        if best:
            raise CheckpointError(f"{name}: a shipped model has one checkpoint; leave --checkpoint out")
        return ModelPlace(shipped_folder() / str(name), state_folder(name))
    if _may_be_on_the_hub(str(name)):
        if best:
            raise CheckpointError(f"{name}: a model of the hub has one checkpoint; leave --checkpoint out")
        return ModelPlace(fetch_from_hub(str(name)), state_folder(name))
    raise CheckpointError(f"{name}: neither a run folder nor a shipped model; {_instead(str(name))}")


def state_folder(name: str | os.PathLike[str]) -> Path:
    """Where a server of this model keeps its own files: beside the checkpoint, or here for one that ships."""
    if is_url(name):
        return STATE / hashlib.sha256(str(name).encode()).hexdigest()[:16]
    folder = Path(name).expanduser()
    if (folder / "model.json").is_file():
        return folder.resolve().parent / "state"
    if folder.is_dir():
        return folder / "state"
    if str(name) in shipped_names() or _may_be_on_the_hub(str(name)):
        return STATE / str(name).replace("/", "--")
    return folder / "state"


def _may_be_on_the_hub(name: str) -> bool:
    """Whether a name has the form of a hub id and is no path here: a run that is missing is not sought elsewhere."""
    first = name.partition("/")[0]
    return is_hub_id(name) and first != "runs" and not Path(first).is_dir()


def _in_folder(folder: Path, *, best: bool | None) -> ModelPlace:
    if (folder / "model.json").is_file():  # the checkpoint itself
        return ModelPlace(folder, state_folder(folder))
    for part in (LAST, BEST):
        recover(folder / part)
    if not any((folder / part).is_dir() for part in (LAST, BEST)):
        hidden = f"; rename it to reach the shipped {folder.name}" if folder.name in shipped_names() else ""
        raise CheckpointError(
            f"{folder}: no checkpoint here; train first, or give the run folder that holds one{hidden}"
        )
    if best is None:
        best = (folder / BEST).is_dir()
    if best and not (folder / BEST).is_dir():
        raise CheckpointError(
            f"{folder}: has no best checkpoint, as it was trained without validation; use --checkpoint last"
        )
    return ModelPlace(folder / (BEST if best else LAST), state_folder(folder))


def _instead(name: str) -> str:
    names = shipped_names()
    if not names:
        return "this installation ships none: train one (`airmoe train --config quickstart`) and give its folder"
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"shipped are {', '.join(names)}; `airmoe train` makes a run"

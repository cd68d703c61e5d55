"""The small copy of a model that is given to others: float16, nothing of trainer or machine, a card for people."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from airmoe_ray.config import ClusterConfig, Config, DataConfig, ServeConfig, TrainConfig
from airmoe_ray.config_file import parse_config, to_yaml
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.storage.card_text import Scores, card_text
from airmoe_ray.storage.checkpoint import (
    FORMAT,
    ModelCard,
    expert_file,
    load_checkpoint,
    parse_tensors,
    read_file,
    serialise,
)
from airmoe_ray.storage.folder_swap import recover, swap, sync_folder, write_file
from airmoe_ray.storage.shipped import shipped_folder

_OF_THE_MACHINE = (
    "device",
    "threads",
    "precision",
    "engine",
    "tensorboard",
    "group_timeout_s",
    "client_deadline_s",
    "max_failures",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def export_model(
    checkpoint: Path,
    out: Path,
    *,
    name: str | None = None,
    terms: str | None = None,
    scores: Sequence[Scores] = (),
    command: str | None = None,
) -> ModelCard:
    """Write the small copy of a checkpoint to `out`, whole or not at all; an older copy there is replaced.

    `name` and `terms` take the place of the checkpoint's own. `scores` and the `command` that made the model go into
    its CARD.md.
    """
    config, card = load_checkpoint(checkpoint)
    name = name or card.name or out.name
    if not _NAME.fullmatch(name):
        raise UserError(f"--name {name}: expected letters, digits, '.', '_' and '-', such as street")
    _check_place(out, checkpoint)
    card = replace(card, name=name, terms=card.terms if terms is None else terms, format=FORMAT)
    files = dict(_small_files(checkpoint, config.experts.count))
    shipped = out.resolve() == (shipped_folder() / name).resolve()
    size = sum(map(len, files.values()))
    text = card_text(card, config, scores=scores, command=command, size=size, shipped=shipped)
    contents = {
        "config.yaml": to_yaml(portable(config)).encode(),
        "model.json": json.dumps(asdict(card), indent=1).encode(),
        "CARD.md": text.encode(),
        **files,
    }
    _put(out, contents)
    return card


def portable(config: Config) -> Config:
    """The configuration without what belongs to one machine or one operator: paths, devices, keys, placement."""
    tree = config.model_dump(mode="json")
    data, train = tree["data"], tree["train"]
    data["root"] = None
    data["cache_dir"] = DataConfig().cache_dir
    for part in data.get("parts", ()):
        if part["root"] is not None and os.path.isabs(os.path.expanduser(part["root"])):
            part["root"] = None
    train |= {key: TrainConfig().model_dump(mode="json")[key] for key in _OF_THE_MACHINE}
    tree["backbone"]["weights"] = None
    tree["serve"] = ServeConfig(resize=config.serve.resize).model_dump(mode="json")
    tree["cluster"] = ClusterConfig().model_dump(mode="json")
    return parse_config(tree)


def halved(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Floating tensors as float16, others as they are; values that float16 cannot hold are refused."""
    small = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    for name, value in small.items():
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{source}: {name} has values that float16 cannot hold; the model cannot be exported")
    return small


def _small_files(checkpoint: Path, experts: int) -> Iterator[tuple[str, bytes]]:
    for path in (checkpoint / "cloud.safetensors", *(expert_file(checkpoint, j) for j in range(experts))):
        tensors = halved(parse_tensors(read_file(path), str(path)), str(path))
        yield str(path.relative_to(checkpoint)), serialise(tensors)


def _check_place(out: Path, checkpoint: Path) -> None:
    recover(out)
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out}: is a file; give a folder")
    own = out.resolve() == checkpoint.resolve() or (out / "trainer").exists()
    if own or (any(out.iterdir()) and not (out / "model.json").is_file()):
        raise UserError(f"--out {out}: holds something else than an exported model; give a new or empty folder")


def _put(out: Path, contents: dict[str, Any]) -> None:
    fresh = out.with_name(out.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        (fresh / "experts").mkdir(parents=True)
        for name, content in contents.items():
            write_file(fresh / name, content)
        for place in (fresh / "experts", fresh):
            sync_folder(place)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise CheckpointError(
            f"{out}: cannot write the model ({error.strerror}); make room or choose another"
        ) from None
    swap(fresh, out)

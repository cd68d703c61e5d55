"""The folder of a run: refuse to overwrite, resume only what fits, keep the log free of holes and repeats.

`checkpoint/` is the last epoch, `checkpoint-best/` the one with the best validation score.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.storage.checkpoint import (
    ModelCard,
    load_checkpoint,
    load_trainer_state,
    load_weights,
    save_checkpoint,
)
from airmoe_ray.storage.folder_swap import recover
from airmoe_ray.storage.shipped import BEST, LAST
from airmoe_ray.training.trainer import Learning

_FIXED = (
    "classes",
    "feature_dim",
    "dilations",
    "backbone_fingerprint",
    "fine_dims",
)  # a resumed run cannot change these


class Best(NamedTuple):
    """The epoch with the best mIoU on the configured channel so far."""

    epoch: int
    miou: float


def begin_folder(folder: Path, config: Config, *, resume: bool) -> None:
    """Make the folder and find out, before the work starts, whether results can be written at all."""
    recover(folder / LAST)
    if not resume and (folder / LAST).exists():
        raise UserError(f"{folder}: already holds a trained run; add --resume to continue it, or choose another --run")
    if resume and not (folder / LAST).exists():
        raise UserError(f"{folder}: no checkpoint to resume from; leave --resume away to start from the beginning")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text(to_yaml(config))
        probe.unlink()
        if not resume:  # left by a run that was stopped before its first checkpoint
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)
            shutil.rmtree(folder / BEST, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot write here ({error.strerror}); make room or choose another --run") from None


def restore(folder: Path, trainer: Learning, card: ModelCard) -> int:
    """Weights and optimizer from the run's checkpoint, nothing is written; returns the epochs already trained."""
    stored, stored_card = load_checkpoint(folder / LAST)
    config = trainer.config
    differs = [name for name in _FIXED if getattr(stored_card, name) != getattr(card, name)]
    if differs:
        raise CheckpointError(f"{folder}: was trained with other {', '.join(differs)}; resume it with its own settings")
    for key in ("dim", "prototypes"):
        if getattr(stored.frl, key) != getattr(config.frl, key):
            raise CheckpointError(f"{folder}: was trained with another frl.{key}; resume it with its own settings")
    load_weights(folder / LAST, trainer.model)
    state = load_trainer_state(folder / LAST)
    if state.epoch > config.train.epochs:
        raise UserError(
            f"{folder}: {state.epoch} epochs are trained already; train.epochs = {config.train.epochs} is less"
        )
    trainer.restore(state)
    return state.epoch


def reopen(folder: Path, *, epoch: int) -> Best | None:
    """Forget what came after the checkpoint of `epoch`, from which the run goes on; the best epoch until then."""
    (folder / "summary.json").unlink(missing_ok=True)  # there again when the run is finished
    _drop_rows_after(folder / "metrics.jsonl", epoch)
    return best_so_far(folder)


def save_epoch(folder: Path, trainer: Learning, card: ModelCard, *, epoch: int, best: bool, last: bool) -> None:
    """Checkpoints after `epoch`; the best one first, so that it is never older than the last one says."""
    if not (best or last):
        return
    state = trainer.state(epoch=epoch)
    if best:
        bare = replace(state, optimizer={})  # not to be resumed from
        save_checkpoint(folder / BEST, trainer.model, card, bare)
    if last:
        save_checkpoint(folder / LAST, trainer.model, card, state)


def best_so_far(folder: Path) -> Best | None:
    """What `checkpoint-best/` holds, by the log; one of epochs that a resumed run takes again does not count."""
    recover(folder / BEST)
    if not (folder / BEST).is_dir():
        return None
    epoch = load_trainer_state(folder / BEST).epoch
    return next((Best(epoch, row["miou"]) for row in _rows(folder / "metrics.jsonl") if row["epoch"] == epoch), None)


def append_row(folder: Path, row: dict[str, Any]) -> None:
    """One line of `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")


def summarise(last: dict[str, Any], best: Best | None, *, seconds: float) -> dict[str, Any]:
    """A finished run in short, by its last row."""
    summary = {"epochs": last["epoch"], "seconds": round(seconds, 1), "last": last}
    return summary if best is None else summary | {"best": best._asdict()}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """`summary.json`, whole or not at all."""
    _write_whole(folder / "summary.json", json.dumps(summary, indent=1))


def stored_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a run whose epochs are all trained; from its log, where a kill came before it was written."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return summary
    except FileNotFoundError:
        rows = _rows(folder / "metrics.jsonl")
        if not rows:
            raise CheckpointError(f"{folder}: the log, metrics.jsonl, is gone; the model can be used") from None
        seconds = sum(row["seconds"] + row.get("validation_seconds", 0.0) for row in rows)
        return summarise(rows[-1], best_so_far(folder), seconds=seconds)


def _drop_rows_after(log: Path, epoch: int) -> None:
    """Keep whole rows up to `epoch`; a kill may have left later ones, or half a line."""
    if not log.exists():
        return
    _write_whole(log, "".join(json.dumps(row) + "\n" for row in _rows(log) if row["epoch"] <= epoch))


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _rows(log: Path) -> list[dict[str, Any]]:
    """Whole rows of a log."""
    rows = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            row = json.loads(line)
            int(row["epoch"])
        except (ValueError, KeyError, TypeError):
            continue
        rows.append(row)
    return rows

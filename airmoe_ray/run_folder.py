"""The folder of a run: refuse to overwrite, resume only what fits, keep the log free of holes and repeats."""

import json
import os
from pathlib import Path
from typing import Any

from airmoe_ray.checkpoint import ModelCard, load_checkpoint, load_trainer_state, load_weights, recover
from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.training import Trainer

_FIXED = ("classes", "feature_dim", "dilations", "backbone_fingerprint")  # a resumed run cannot change these


def begin_folder(folder: Path, config: Config, *, resume: bool) -> None:
    """Make the folder and find out, before the work starts, whether results can be written at all."""
    recover(folder / "checkpoint")
    if not resume and (folder / "checkpoint").exists():
        raise UserError(f"{folder}: already holds a trained run; add --resume to continue it, or choose another --run")
    if resume and not (folder / "checkpoint").exists():
        raise UserError(f"{folder}: no checkpoint to resume from; leave --resume away to start from the beginning")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text(to_yaml(config))
        probe.unlink()
        if not resume:  # left by a run that was stopped before its first checkpoint
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot write here ({error.strerror}); make room or choose another --run") from None


def restore(folder: Path, trainer: Trainer, card: ModelCard) -> int:
    """Weights and optimizer from the run's checkpoint; returns the epochs already trained."""
    stored, stored_card = load_checkpoint(folder / "checkpoint")
    config = trainer.config
    differs = [name for name in _FIXED if getattr(stored_card, name) != getattr(card, name)]
    if differs:
        raise CheckpointError(f"{folder}: was trained with other {', '.join(differs)}; resume it with its own settings")
    for key in ("dim", "prototypes"):
        if getattr(stored.frl, key) != getattr(config.frl, key):
            raise CheckpointError(f"{folder}: was trained with another frl.{key}; resume it with its own settings")
    load_weights(folder / "checkpoint", trainer.model)
    state = load_trainer_state(folder / "checkpoint")
    if state.epoch > config.train.epochs:
        raise UserError(
            f"{folder}: {state.epoch} epochs are trained already; train.epochs = {config.train.epochs} is less"
        )
    trainer.restore(state)
    if state.epoch < config.train.epochs:
        (folder / "summary.json").unlink(missing_ok=True)  # there again when the run is finished
        _drop_rows_after(folder / "metrics.jsonl", state.epoch)
    return state.epoch


def append_row(folder: Path, row: dict[str, Any]) -> None:
    """One line of `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")


def stored_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a finished run."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def _drop_rows_after(log: Path, epoch: int) -> None:
    """Keep whole rows up to `epoch`; a kill may have left later ones, or half a line."""
    if not log.exists():
        return
    kept = []
    for line in log.read_text().splitlines():
        try:
            if json.loads(line)["epoch"] <= epoch:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    partial = log.with_suffix(".partial")
    partial.write_text("".join(kept))
    os.replace(partial, log)

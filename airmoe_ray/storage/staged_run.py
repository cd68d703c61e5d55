"""A run of one process whose folder is at a URL: a local folder stands in for it, and is copied after every epoch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from airmoe_ray.storage.remote_run import RemoteRun, staged

Row = dict[str, Any]


def train_staged(
    run: Path | RemoteRun, train: Callable[[Path, Callable[[Row], None]], Row], *, resume: bool
) -> dict[str, Any]:
    """The summary of `train`, which is given a folder and what to call after each epoch."""
    if isinstance(run, Path):
        return train(run, lambda row: None)
    with staged(run) as folder:
        run.open(folder, resume=resume)
        summary = train(folder, lambda row: run.push(folder))
        run.push(folder)
        return summary

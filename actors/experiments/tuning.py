"""Sweeps on Ray Tune: each run is a trial with a core of its own, reports its epochs, and leaves a record."""

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune import Callback, RunConfig, TuneConfig

from actors.cluster.connection import nodes
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.ablate.table import swept_channel
from airmoe_ray.experiments.compare.plan import Cell
from airmoe_ray.experiments.compare.run_cell import run_cell
from airmoe_ray.runtime.progress import Reporter


def tune_cells(
    cells: Sequence[Cell], out: Path, *, draws: int, parallel: int | None, report: Reporter
) -> dict[str, str]:
    """Make all runs, several at a time where the cluster has the cores; what failed, and why.

    Tune's own files are thrown away: what counts are records, and a run that is interrupted has its own checkpoint.
    """
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in the settings mean what they say
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C is the command's
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    shown = _Shown(cells, report)
    gpus = 1 if sum(node.gpus for node in nodes()) >= 1 else 0
    job = tune.with_parameters(_trial, cells=list(cells), out=out.resolve(), draws=draws, started_in=Path.cwd())
    with tempfile.TemporaryDirectory(prefix="airmoe-tune-") as scratch:
        tune.Tuner(
            tune.with_resources(job, {"cpu": 1, "gpu": gpus}),
            param_space={"cell": tune.grid_search(list(range(len(cells))))},
            tune_config=TuneConfig(max_concurrent_trials=parallel, metric=None),
            run_config=RunConfig(name="sweep", storage_path=scratch, verbose=0, callbacks=[shown]),
        ).fit()
    return shown.failed


def _trial(config: dict[str, int], *, cells: list[Cell], out: Path, draws: int, started_in: Path) -> None:
    """One run, in a process of its own with one thread."""
    os.chdir(started_in)
    torch.set_num_threads(1)

    def after_epoch(row: dict[str, Any]) -> None:
        tune.report({"epoch": row["epoch"], "miou": row.get("miou", float("nan")), "told": ""})

    try:
        record = run_cell(cells[config["cell"]], out, draws=draws, after_epoch=after_epoch)
        tune.report({"told": f"mIoU {record.scores[swept_channel(record)]['miou']:.2f}", "failed": False})
    except UserError as error:
        tune.report({"told": str(error), "failed": True})


class _Shown(Callback):
    """Shows trials on the one display that the command has."""

    def __init__(self, cells: Sequence[Cell], report: Reporter) -> None:
        self.cells, self.report = cells, report
        self.bar: Callable[[int, int], None] = report.progress("runs")
        self.done = 0
        self.failed: dict[str, str] = {}

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        """Tune stores a copy to restore from, which nobody asks for here; a terminal cannot be stored."""
        return Callback, ()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """An epoch is over, or the run."""
        cell = self.cells[trial.config["cell"]]
        told = result.get("told")
        if not told:
            self.report.note(
                f"{cell.title}: epoch {result['epoch']}/{cell.config.train.epochs}, mIoU {result['miou']:.1f}"
            )
            return
        if result.get("failed"):
            self.failed[cell.title] = told
        self.report.line(f"{cell.title}: {told}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Count it."""
        self.done += 1
        self.bar(self.done, len(self.cells))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial that died."""
        cell = self.cells[trial.config["cell"]]
        self.failed[cell.title] = "the process ended; see Ray's log"
        self.report.line(f"{cell.title}: failed")
        self.on_trial_complete(iteration, trials, trial)

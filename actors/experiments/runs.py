"""Runs of an experiment on a cluster: each is a task with a core of its own, and one display shows all of them."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from actors.cluster.connection import nodes
from actors.training.progress_relay import Note, RelayCalls
from airmoe_ray.errors import UserError, disk_trouble
from airmoe_ray.experiments.compare.plan import Cell
from airmoe_ray.experiments.compare.records import Record
from airmoe_ray.experiments.compare.run_cell import run_cell
from airmoe_ray.runtime.progress import Reporter

_POLL_S = 0.5


@dataclass(frozen=True)
class _Job:
    """What a task needs to know."""

    cell: Cell
    out: Path
    draws: int
    started_in: Path
    relay: RelayCalls


@dataclass(frozen=True)
class _Outcome:
    """A record, or in a line why there is none."""

    record: Record | None
    mistake: str = ""


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    draws: int,
    parallel: int | None,
    report: Reporter,
    arrived: Callable[[Cell, Record], None] = lambda cell, record: None,
) -> dict[str, str]:
    """Make all runs, several at a time where the cluster has the cores; what failed, and why.

    One that fails does not stop the others. Interrupted, each run goes on from its own checkpoint the next time.
    """
    relay = RelayCalls.start()
    gpus = 1 if sum(node.gpus for node in nodes()) >= 1 else 0
    task = ray.remote(_run).options(num_cpus=1, num_gpus=gpus, max_retries=0)
    waiting, failed = list(cells), dict[str, str]()
    under_way: dict[Any, Cell] = {}
    most = parallel or max(int(sum(node.cpus for node in nodes())), 1)
    bar, done = report.progress("runs"), 0
    report.note("starting")
    while waiting or under_way:
        while waiting and len(under_way) < most:
            job = _Job(waiting[0], out.resolve(), draws, Path.cwd(), relay)
            under_way[task.remote(job)] = waiting.pop(0)
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=_POLL_S)
        _show_notes(relay, report)
        for reference in ready:
            cell = under_way.pop(reference)
            outcome = _outcome(reference)
            if outcome.record is None:
                failed[cell.title] = outcome.mistake
                report.line(f"{cell.title}: failed; {outcome.mistake}")
            else:
                arrived(cell, outcome.record)
            done += 1
            bar(done, len(cells))
    return failed


def _outcome(reference: Any) -> _Outcome:
    try:
        found: _Outcome = ray.get(reference)
        return found
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _Outcome(None, lines[-1][:300] if lines else type(error).__name__)


def _show_notes(relay: RelayCalls, report: Reporter) -> None:
    notes = [arrived.text for arrived in relay.take().get(timeout_s=30) if isinstance(arrived, Note)]
    if notes:
        report.note(notes[-1])


def _run(job: _Job) -> _Outcome:
    """In a process of its own, with one thread: runs side by side must not wait for each other's."""
    os.chdir(job.started_in)
    torch.set_num_threads(1)
    cell, epochs = job.cell, job.cell.config.train.epochs

    def after_epoch(row: dict[str, Any]) -> None:
        score = f", mIoU {row['miou']:.1f}" if "miou" in row else ""
        job.relay.add(Note(f"{cell.title}: epoch {row['epoch']}/{epochs}{score}"))

    try:
        job.relay.add(Note(f"{cell.title}: starting"))
        begun = time.monotonic()
        record = run_cell(cell, job.out, draws=job.draws, after_epoch=after_epoch)
        job.relay.add(Note(f"{cell.title}: done in {time.monotonic() - begun:.0f} s"))
        return _Outcome(record)
    except UserError as error:
        return _Outcome(None, str(error))
    except OSError as error:
        told = disk_trouble(error)
        if told is None:
            raise
        return _Outcome(None, told)

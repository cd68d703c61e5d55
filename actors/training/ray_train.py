"""End-to-end training on Ray Train: the steps of `airmoe_ray.training.run`, by several workers that share each batch.

Ray Train starts the workers, joins them into a process group and starts them again when one dies; they then go on from
the run's own checkpoint. What a worker does is the same code as in one process.
"""

import contextlib
import os
import shutil
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.cluster.connection import node_ip, nodes
from actors.errors import ClusterError
from actors.training.feature_pool import build_features
from actors.training.progress_relay import RelayCalls, RelayingReporter, show
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError, disk_trouble
from airmoe_ray.runtime.device import keep_freed_memory
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.runtime.workers import OneWorker, ProcessGroup, Workers
from airmoe_ray.storage.folder_swap import recover
from airmoe_ray.storage.shipped import LAST
from airmoe_ray.training.run import train_run
from airmoe_ray.training.run_folder import stored_summary

_MAX_FAILURES = 3


@dataclass(frozen=True)
class _Job:
    """What every worker is given."""

    config: Config
    folder: Path
    resume: bool
    relay: RelayCalls
    id: str  # of this training, by which workers recognise its folder
    threads: int
    started_in: Path  # folder in which the command was given: paths in the settings are relative to it


def train_on_ray(
    config: Config, folder: Path, *, workers: int | None = None, resume: bool, report: Reporter
) -> dict[str, Any]:
    """Train on the connected cluster, with one worker per GPU unless `workers` are given; the summary of `train_run`.

    `check_run` has been called before.
    """
    gpus, cpus = (int(sum(found)) for found in zip(*((node.gpus, node.cpus) for node in nodes()), strict=True))
    workers = workers or max(gpus, 1)
    if workers > max(gpus, cpus):
        raise ClusterError(f"--workers {workers}: the cluster has {cpus} CPUs and {gpus} GPUs; ask for fewer")
    build_features(config, folder, report)  # with all cores or GPUs, so that every trainer finds them
    relay = RelayCalls.start()
    job = _Job(
        config=config,
        folder=folder.resolve(),
        resume=resume,
        relay=relay,
        id=uuid.uuid4().hex,
        threads=max(min(cpus, torch.get_num_threads()) // workers, 1),
        started_in=Path.cwd(),
    )
    storage = folder.resolve() / "state" / "ray_train"
    shutil.rmtree(storage, ignore_errors=True)  # Ray would go on with what an earlier run left there
    storage.parent.mkdir(parents=True, exist_ok=True)
    _job_file(folder).write_text(job.id)
    report.stage(f"starting {workers} training worker{'s' if workers > 1 else ''}")
    try:
        _fit(_trainer(job, storage, workers=workers, gpu=gpus >= workers), relay, report)
    except ray.train.TrainingFailedError as error:
        _raise_error(relay)
        raise ClusterError(f"training failed after {_MAX_FAILURES} new starts: {_reason(str(error), config)}") from None
    _raise_error(relay)
    shutil.rmtree(storage, ignore_errors=True)
    _job_file(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        storage.parent.rmdir()  # unless it holds something else
    return stored_summary(folder)


def _trainer(job: _Job, storage: Path, *, workers: int, gpu: bool) -> TorchTrainer:
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in the configuration mean what they say
    timeout_s = round(job.config.train.group_timeout_s)
    return TorchTrainer(
        _work,
        train_loop_config={"job": job},
        # counts are summed on the CPU, gradients where they are
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo", timeout_s=timeout_s),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name=storage.name,
            storage_path=str(storage.parent),
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )


def _fit(trainer: TorchTrainer, relay: RelayCalls, report: Reporter) -> None:
    """Run to the end, showing what arrives at the relay.

    Ray waits in a thread of its own: in the main one it would take Ctrl-C for itself and end as if all were well.
    """
    outcome: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    show(relay, report, while_=thread.is_alive)
    thread.join()
    if outcome:
        raise outcome[0]


def _raise_error(relay: RelayCalls) -> None:
    """Raise the user's mistake that ended the training, if one did."""
    error = relay.error().get()
    if error is not None:
        raise UserError(error)


def _reason(text: str, config: Config) -> str:
    """The last line of Ray's error, or what a timeout in a collective means."""
    if "timed out" in text.lower() or "timeout" in text.lower():
        return (
            f"a worker kept the others waiting for train.group_timeout_s = {config.train.group_timeout_s:g}; look for "
            "what stops it (memory, disk, network), or raise the limit"
        )
    return [line.strip() for line in text.splitlines() if line.strip()][-1][:300]


def _work(given: dict[str, _Job]) -> None:
    """One worker: joins the group, then trains like a single process would."""
    job = given["job"]
    if job.relay.error().get() is not None:
        return  # started again after a mistake that a new start does not mend
    workers: Workers = OneWorker() if ray.train.get_context().get_world_size() == 1 else ProcessGroup()
    if job.started_in.is_dir():
        os.chdir(job.started_in)
    try:
        _train(job, workers)
    except UserError as error:
        message = str(error)
    except OSError as error:
        message = disk_trouble(error) or ""
        if not message:
            raise
    else:
        return
    job.relay.set_error(message).get()
    if workers.size > 1:
        raise RuntimeError(message)  # the others may be waiting for this one: only Ray can end them


def _train(job: _Job, workers: Workers) -> None:
    config, folder = job.config, job.folder
    keep_freed_memory()
    if not config.train.threads:
        torch.set_num_threads(job.threads)
    train_run(
        config,
        folder,
        resume=_begin(job, workers) or job.resume,
        report=RelayingReporter(job.relay),
        checked=True,
        workers=workers,
        # Ray shows every worker all GPUs of its node, and knows which one is whose
        device=ray.train.torch.get_device() if config.train.device in ("auto", "cuda") else None,
        after_epoch=lambda row: ray.train.report({"epoch": row["epoch"], "loss": row["loss"]}),
    )


def _begin(job: _Job, workers: Workers) -> bool:
    """Whether Ray has started these workers again, after a checkpoint that they can go on from."""
    folder, noted = job.folder, _job_file(job.folder)
    found = noted.read_text() if noted.is_file() else ""
    if not found.startswith(job.id):
        raise ClusterError(
            f"{node_ip()} does not see the run folder {folder}; put --run where every node has it, under the same path"
        )
    if workers.rank == 0:
        recover(folder / LAST)
    workers.wait()  # all have looked
    if workers.rank == 0:
        noted.write_text(f"{job.id} begun")
    return found != job.id and (folder / LAST).exists()


def _job_file(folder: Path) -> Path:
    """The file by which workers recognise the run folder that the command named, and whether they began before."""
    return folder / "state" / "job"

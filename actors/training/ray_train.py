"""End-to-end training on Ray Train: the steps of `airmoe_ray.training.run`, by several workers that share each batch.

Ray Train starts the workers, joins them into a process group and starts them again when one dies; they then go on from
the run's own checkpoint, in its folder or at its URL. What a worker does is the same code as in one process.
"""

import math
import os
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

from actors.cluster.autoscaler import most_gpus
from actors.cluster.connection import node_ip, nodes
from actors.cluster.gpus import own_device
from actors.errors import ClusterError
from actors.rounds.calls import Pinned
from actors.training.crew import Crew, Watch, await_room, plan_crew
from actors.training.feature_pool import build_features
from actors.training.progress_relay import RelayCalls, RelayingReporter, show
from actors.training.run_places import RunPlace, place_of
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError, disk_trouble
from airmoe_ray.features.backbone import weights_file
from airmoe_ray.runtime.device import LOGICAL_GPUS, pick_device
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.runtime.workers import OneWorker, ProcessGroup, Workers
from airmoe_ray.storage.remote_run import RemoteRun
from airmoe_ray.training.run import train_run

_START_S = 60.0  # Ray Train's limit for the start of a group of workers


@dataclass(frozen=True)
class _Job:
    """What every worker is given."""

    config: Config
    place: RunPlace
    resume: bool
    relay: RelayCalls
    id: str  # of this training, by which workers recognise its folder
    threads: int
    started_in: Path  # folder in which the command was given: paths in the settings are relative to it
    weights: Pinned | None  # of the backbone, where they are a file: not every node has it


def train_on_ray(
    config: Config, run: Path | RemoteRun, *, workers: int | None = None, resume: bool, report: Reporter
) -> dict[str, Any]:
    """Train on the connected cluster, with one worker per GPU unless `workers` are given; the summary of `train_run`.

    `check_run` has been called before.
    """
    there = nodes()
    crew = plan_crew(config.train.device, workers, there, most_gpus())
    if crew.gpus or crew.gpu or len(there) > 1:
        report.line(crew.told)
    await_room(crew, report, wait_s=config.cluster.autoscale_wait_s)
    file = weights_file(config.backbone)
    weights = None if file is None else Pinned.put(file)
    build_features(config, run if isinstance(run, Path) else None, report, weights=weights)
    place, relay = place_of(run), RelayCalls.start()
    job = _Job(
        config=config,
        place=place,
        resume=resume,
        relay=relay,
        id=uuid.uuid4().hex,
        threads=crew.threads(torch.get_num_threads()),
        started_in=Path.cwd(),
        weights=weights,
    )
    await_room(crew, report, wait_s=config.cluster.autoscale_wait_s)  # features may have taken a while
    report.stage(f"starting {crew.workers} training worker{'s' if crew.workers > 1 else ''}")
    try:
        _fit(_trainer(job, crew), relay, report, Watch(crew, report))
    except ray.train.TrainingFailedError as error:
        _raise_error(relay)
        again = f"after {config.train.max_failures} new starts (train.max_failures)"
        raise ClusterError(f"training failed {again}: {_reason(str(error), config)}") from None
    _raise_error(relay)
    return place.finish()


def _trainer(job: _Job, crew: Crew) -> TorchTrainer:
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in the configuration mean what they say
    timeout_s = round(job.config.train.group_timeout_s)
    storage, files = job.place.prepare(job.id)
    backend = "cpu:gloo,cuda:nccl" if crew.gpu and os.environ.get(LOGICAL_GPUS) != "1" else "gloo"
    return TorchTrainer(
        _work,
        train_loop_config={"job": job},
        # counts are summed on the CPU, gradients where they are
        torch_config=TorchConfig(backend=backend, timeout_s=timeout_s),
        scaling_config=ScalingConfig(num_workers=crew.workers, use_gpu=crew.gpu),
        run_config=RunConfig(
            name="ray_train",
            storage_path=storage,
            storage_filesystem=files,
            failure_config=FailureConfig(  # type: ignore[call-arg]  # of the first version, for mypy
                max_failures=job.config.train.max_failures, controller_failure_limit=_starts(job.config)
            ),
        ),
    )


def _starts(config: Config) -> int:
    """How often Ray Train may find no room for the workers, which it asks for a minute long: by default for ever.

    As often as an autoscaler has time for, at the start and after each loss.
    """
    return math.ceil(config.cluster.autoscale_wait_s / _START_S) * (1 + config.train.max_failures)


def _fit(trainer: TorchTrainer, relay: RelayCalls, report: Reporter, watch: Watch) -> None:
    """Run to the end, showing what arrives at the relay, and that workers wait where they do.

    Ray waits in a thread of its own: in the main one it would take Ctrl-C for itself and end as if all were well.
    """
    outcome: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=fit, daemon=True)

    def goes_on() -> bool:
        watch.look()
        return thread.is_alive()

    thread.start()
    show(relay, report, while_=goes_on)
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
    if "startup timed out" in text:
        return (
            f"its workers found no room for {config.cluster.autoscale_wait_s:g} s (cluster.autoscale_wait_s); the run "
            "goes on with --resume, with fewer --workers or when there is room"
        )
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
    context = ray.train.get_context()
    one = context.get_world_size() == 1
    workers: Workers = OneWorker() if one else ProcessGroup(context.get_local_rank())
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
    several = len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) > 1  # type: ignore[no-untyped-call]
    job.relay.set_error(f"{node_ip()}: {message}" if several else message).get()
    if workers.size > 1:
        raise RuntimeError(message)  # the others may be waiting for this one: only Ray can end them


def _train(job: _Job, workers: Workers) -> None:
    config = job.config
    threads = config.train.threads or job.threads
    named = config.train.device not in ("auto", "cpu", "cuda")  # such as mps, which Ray does not count
    device = pick_device(config.train.device, threads=threads) if named else own_device(threads=threads)
    with job.place.opened(workers, job.id, resume=job.resume) as run:
        train_run(
            config,
            run.folder,
            resume=run.resume,
            report=RelayingReporter(job.relay),
            checked=True,
            workers=workers,
            device=device,
            weights=None if job.weights is None else job.weights.get(),
            after_epoch=run.after_epoch,
        )

"""End-to-end training on Ray Train: the steps of `airmoe_ray.run`, by several workers that share each batch.

Ray Train starts the workers, joins them into a process group and starts them again when one dies; they then go on from
the run's own checkpoint. What a worker does is the same code as in one process.
"""

import contextlib
import os
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.cluster import node_ip, nodes
from actors.errors import ClusterError
from actors.features import build_features
from actors.mailbox import Mailbox, PostingReporter, show
from airmoe_ray.checkpoint import recover
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError, disk_trouble
from airmoe_ray.reporter import Reporter
from airmoe_ray.run import train_run
from airmoe_ray.run_folder import LAST, stored_summary
from airmoe_ray.world import Alone, Group, World

_MAX_FAILURES = 3


def train_on_ray(
    config: Config, folder: Path, *, workers: int | None = None, resume: bool, report: Reporter
) -> dict[str, Any]:
    """Train on the connected cluster, with one worker per GPU unless told otherwise; the summary of `train_run`."""
    gpus, cpus = (int(sum(found)) for found in zip(*((node.gpus, node.cpus) for node in nodes()), strict=True))
    workers = workers or max(gpus, 1)
    if workers > max(gpus, cpus):
        raise ClusterError(f"--workers {workers}: the cluster has {cpus} CPUs and {gpus} GPUs; ask for fewer")
    build_features(config, folder, report)  # with all cores or GPUs, so that every trainer finds them
    mailbox: Any = ray.remote(Mailbox).options(num_cpus=0).remote()
    job = {
        "config": config,
        "folder": folder.resolve(),
        "resume": resume,
        "mailbox": mailbox,
        "sign": uuid.uuid4().hex,
        "threads": max(min(cpus, torch.get_num_threads()) // workers, 1),
        "at": Path.cwd(),
    }
    storage = folder.resolve() / "state" / "ray_train"
    shutil.rmtree(storage, ignore_errors=True)  # Ray would go on with what an earlier run left there
    storage.parent.mkdir(parents=True, exist_ok=True)
    _sign(folder).write_text(job["sign"])
    try:
        _fit(_trainer(job, storage, workers=workers, gpu=gpus >= workers), mailbox, report)
    except ray.train.TrainingFailedError as error:
        _raise_complaint(mailbox)
        raise ClusterError(f"training failed after {_MAX_FAILURES} new starts: {_reason(str(error), config)}") from None
    _raise_complaint(mailbox)
    shutil.rmtree(storage, ignore_errors=True)
    _sign(folder).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        storage.parent.rmdir()  # unless it holds something else
    return stored_summary(folder)


def _trainer(job: dict[str, Any], storage: Path, *, workers: int, gpu: bool) -> TorchTrainer:
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # relative paths in the configuration mean what they say
    timeout_s = round(job["config"].train.group_timeout_s)
    return TorchTrainer(
        _work,
        train_loop_config=job,
        # counts are summed on the CPU, gradients where they are
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo", timeout_s=timeout_s),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(
            name=storage.name,
            storage_path=str(storage.parent),
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )


def _fit(trainer: TorchTrainer, mailbox: Any, report: Reporter) -> None:
    """Run to the end, showing what arrives in the mailbox.

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
    show(mailbox, report, while_=thread.is_alive)
    thread.join()
    if outcome:
        raise outcome[0]


def _raise_complaint(mailbox: Any) -> None:
    complaint = ray.get(mailbox.complaint_of_worker.remote())
    if complaint is not None:
        raise UserError(complaint)


def _reason(text: str, config: Config) -> str:
    """The last line of Ray's story, or what a timeout in a collective means."""
    if "timed out" in text.lower() or "timeout" in text.lower():
        return (
            f"a worker kept the others waiting for train.group_timeout_s = {config.train.group_timeout_s:g}; look for "
            "what stops it (memory, disk, network), or raise the limit"
        )
    return [line.strip() for line in text.splitlines() if line.strip()][-1][:300]


def _work(job: dict[str, Any]) -> None:
    """One worker: joins the group, then trains like a single process would."""
    if ray.get(job["mailbox"].complaint_of_worker.remote()) is not None:
        return  # started again after a mistake that a new start does not mend
    world: World = Alone() if ray.train.get_context().get_world_size() == 1 else Group()
    if job["at"].is_dir():
        os.chdir(job["at"])
    try:
        _train(job, world)
    except UserError as error:
        told = str(error)
    except OSError as error:
        told = disk_trouble(error) or ""
        if not told:
            raise
    else:
        return
    ray.get(job["mailbox"].complain.remote(told))
    if world.size > 1:
        raise RuntimeError(told)  # the others may be waiting for this one: only Ray can end them


def _train(job: dict[str, Any], world: World) -> None:
    config, folder = job["config"], job["folder"]
    if not config.train.threads:
        torch.set_num_threads(job["threads"])
    train_run(
        config,
        folder,
        resume=_begin(job, world) or job["resume"],
        report=PostingReporter(job["mailbox"]),
        world=world,
        # Ray shows every worker all GPUs of its node, and knows which one is whose
        device=ray.train.torch.get_device() if config.train.device in ("auto", "cuda") else None,
        after_epoch=lambda row: ray.train.report({"epoch": row["epoch"], "loss": row["loss"]}),
    )


def _begin(job: dict[str, Any], world: World) -> bool:
    """Whether Ray has started these workers again, after a checkpoint that they can go on from."""
    folder, sign = job["folder"], job["sign"]
    found = _sign(folder).read_text() if _sign(folder).is_file() else ""
    if not found.startswith(sign):
        raise ClusterError(
            f"{node_ip()} does not see the run folder {folder}; put --run where every node has it, under the same path"
        )
    if world.rank == 0:
        recover(folder / LAST)
    world.wait()  # all have looked
    if world.rank == 0:
        _sign(folder).write_text(f"{sign} begun")
    return found != sign and (folder / LAST).exists()


def _sign(folder: Path) -> Path:
    """By this file workers know the run folder as the one that the command named, and whether they began before."""
    return folder / "state" / "job"

"""End-to-end training on Ray Train: the steps of `airmoe_ray.run`, by several workers that share each batch.

Ray Train starts the workers, joins them into a process group and starts them again when one dies; they then go on from
the run's own checkpoint. What a worker does is the same code as in one process.
"""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from actors.cluster import nodes
from actors.errors import ClusterError
from actors.features import build_features
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.run import Reporter, train_run
from airmoe_ray.run_folder import stored_summary
from airmoe_ray.world import Alone, Group

_POLL_S = 0.2
_MAX_FAILURES = 3


class Mailbox:
    """What the first worker reports, until the driver shows it."""

    def __init__(self) -> None:
        self.letters: list[tuple[Any, ...]] = []
        self.complaint: str | None = None

    def post(self, letter: tuple[Any, ...]) -> None:
        """Leave a report."""
        self.letters.append(letter)

    def complain(self, message: str) -> None:
        """A user's mistake, which ends the training."""
        self.complaint = message

    def complaint_of_worker(self) -> str | None:
        """What a worker complained about, if any did."""
        return self.complaint

    def collect(self) -> list[tuple[Any, ...]]:
        """Take all reports."""
        letters, self.letters = self.letters, []
        return letters


class PostingReporter:
    """A `Reporter` that writes to a mailbox and never waits."""

    def __init__(self, mailbox: Any) -> None:
        self.mailbox = mailbox

    def line(self, text: str) -> None:
        """A line that stays."""
        self.mailbox.post.remote(("line", text))

    def progress(self, title: str) -> Any:
        """A bar."""
        self.mailbox.post.remote(("bar", title))
        return lambda done, total: self.mailbox.post.remote(("move", done, total))

    def note(self, text: str) -> None:
        """A note beside the bar."""
        self.mailbox.post.remote(("note", text))


def train_on_ray(config: Config, folder: Path, *, workers: int, resume: bool, report: Reporter) -> dict[str, Any]:
    """Train with `workers` workers on the connected cluster; the summary, as of `train_run`."""
    gpus = sum(node.gpus for node in nodes())
    cpus = sum(node.cpus for node in nodes())
    if workers > max(gpus, cpus):
        raise ClusterError(f"--workers {workers}: the cluster has {cpus:g} CPUs and {gpus:g} GPUs; ask for fewer")
    build_features(config, report)  # with all cores or GPUs, so that every trainer finds them
    mailbox: Any = ray.remote(Mailbox).options(num_cpus=0).remote()
    job = {
        "config": config,
        "folder": folder.resolve(),
        "resume": resume,
        "mailbox": mailbox,
        "attempt": uuid.uuid4().hex,
        "threads": max(int(cpus) // workers, 1),
    }
    trainer = TorchTrainer(
        _work,
        train_loop_config=job,
        torch_config=TorchConfig(backend="nccl" if gpus >= workers else "gloo", timeout_s=1800),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus >= workers),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(folder.resolve() / "state"),
            failure_config=FailureConfig(max_failures=_MAX_FAILURES),
        ),
    )
    with _shown(mailbox, report):
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ClusterError(f"training failed after {_MAX_FAILURES} new starts: {lines[-1][:300]}") from None
        finally:
            complaint = ray.get(mailbox.complaint_of_worker.remote())
    if complaint is not None:
        raise UserError(complaint)
    return stored_summary(folder)


def _work(job: dict[str, Any]) -> None:
    """One worker: joins the group, then trains like a single process would."""
    alone = ray.train.get_context().get_world_size() == 1
    world = Alone() if alone else Group()
    config, folder = job["config"], job["folder"]
    if not config.train.threads:
        torch.set_num_threads(job["threads"])
    # a marker of this very job: whoever finds it has been started again, and goes on from the last checkpoint
    marker = folder / "state" / f"started-{job['attempt']}"
    again = marker.exists()
    world.wait()
    if world.rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    try:
        train_run(
            config,
            folder,
            resume=job["resume"] or (again and (folder / "checkpoint").exists()),
            report=PostingReporter(job["mailbox"]),
            world=world,
            after_epoch=lambda row: ray.train.report({"epoch": row["epoch"], "loss": row["loss"]}),
        )
    except UserError as error:  # starting again would not help
        ray.get(job["mailbox"].complain.remote(str(error)))
    if world.rank == 0:
        marker.unlink(missing_ok=True)


@contextmanager
def _shown(mailbox: Any, report: Reporter) -> Iterator[None]:
    """Show what arrives in the mailbox for the duration of the block."""
    done = threading.Event()

    def show() -> None:
        move: Any = None
        last = False
        while not last:
            last = done.wait(_POLL_S)
            for kind, *content in ray.get(mailbox.collect.remote()):
                if kind == "line":
                    report.line(*content)
                elif kind == "bar":
                    move = report.progress(*content)
                elif kind == "move":
                    move(*content)
                else:
                    report.note(*content)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10)

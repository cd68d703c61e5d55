"""Where workers of Ray Train keep their run: in a folder that all nodes see, or at a URL, each with its own copy."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ray.train
import torch
from ray.train import Checkpoint

from actors.cluster.connection import node_ip
from actors.errors import ClusterError
from airmoe_ray.runtime.workers import Workers
from airmoe_ray.storage.folder_swap import recover
from airmoe_ray.storage.remote_run import RemoteRun, staged
from airmoe_ray.storage.shipped import LAST
from airmoe_ray.training.run_folder import stored_summary

_POINTER = "run.json"  # the one file of Ray Train's own checkpoint


class Opened(NamedTuple):
    """A run in a worker's hands."""

    folder: Path
    resume: bool  # from the checkpoint that is there
    after_epoch: Callable[[dict[str, Any]], None]  # tells Ray Train, and keeps what must be kept


class RunPlace(Protocol):
    """A run as its driver and its workers reach it."""

    def prepare(self, job: str) -> tuple[str, Any]:
        """Before workers start: where Ray Train keeps its own files, and the file system of that path."""
        ...

    def opened(self, workers: Workers, job: str, *, resume: bool) -> AbstractContextManager[Opened]:
        """In a worker: the run for the duration of a block."""
        ...

    def finish(self) -> dict[str, Any]:
        """After the last epoch: tidy up; the run's summary."""
        ...


@dataclass(frozen=True)
class SharedFolder:
    """A folder that every node has under the same path; workers go on from the checkpoint in it."""

    folder: Path

    def prepare(self, job: str) -> tuple[str, Any]:
        """Ray Train's files are in the run's state folder, anew: it would go on with what an earlier run left there."""
        storage = self.folder / "state" / "ray_train"
        shutil.rmtree(storage, ignore_errors=True)
        storage.mkdir(parents=True, exist_ok=True)
        self._job_file.write_text(job)
        return str(storage), None

    @contextmanager
    def opened(self, workers: Workers, job: str, *, resume: bool) -> Iterator[Opened]:
        """The folder itself, if it is the one that the command named."""
        yield Opened(self.folder, self.begun_before(workers, job) or resume, lambda row: ray.train.report(_told(row)))

    def begun_before(self, workers: Workers, job: str) -> bool:
        """Whether Ray has started these workers again, after a checkpoint that they can go on from."""
        found = self._job_file.read_text() if self._job_file.is_file() else ""
        if not found.startswith(job):
            raise ClusterError(
                f"{node_ip()} does not see the run folder {self.folder}; put --run where every node has it, under the "
                "same path, or give a URL such as s3://bucket/run"
            )
        if workers.rank == 0:
            recover(self.folder / LAST)
        workers.wait()  # all have looked
        if workers.rank == 0:
            self._job_file.write_text(f"{job} begun")
        return found != job and (self.folder / LAST).exists()

    def finish(self) -> dict[str, Any]:
        """Remove what was there for Ray alone."""
        state = self._job_file.parent
        shutil.rmtree(state / "ray_train", ignore_errors=True)
        self._job_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            state.rmdir()  # unless it holds something else
        return stored_summary(self.folder)

    @property
    def _job_file(self) -> Path:
        """The file by which workers recognise the folder that the command named, and whether they began before."""
        return self.folder / "state" / "job"


@dataclass(frozen=True)
class RunAtUrl:
    """A URL that every node reaches; Ray Train's checkpoint says that there is one of the run's own to go on from."""

    url: str

    def prepare(self, job: str) -> tuple[str, Any]:
        """Ray Train's files are below the run's URL, in a folder of this training's own."""
        bucket = RemoteRun(self.url).bucket
        return bucket.path(f"state/ray_train/{job}"), bucket.files

    @contextmanager
    def opened(self, workers: Workers, job: str, *, resume: bool) -> Iterator[Opened]:
        """A local folder that stands in for the run, with its newest checkpoint where Ray Train remembers any.

        The one that Ray Train remembers may be gone: it hears of a checkpoint some epochs after the bucket. The first
        worker says which is the newest, so that all go on from the same.
        """
        run, resume = RemoteRun(self.url), resume or ray.train.get_checkpoint() is not None
        with staged(run) as folder:
            if resume:
                version = _said_by_first(workers, run.newest() if workers.rank == 0 else None)
                run.open(folder, resume=True, version=version)
            elif workers.rank == 0:
                run.open(folder, resume=False)
            yield Opened(folder, resume, lambda row: self._keep(run, folder, workers, row))
            if workers.rank == 0:
                run.push(folder)  # the summary

    def _keep(self, run: RemoteRun, folder: Path, workers: Workers, row: dict[str, Any]) -> None:
        """The first worker uploads what is new, and reports the version: a pointer, so that nothing travels twice."""
        before = run.version
        if workers.rank == 0:
            run.push(folder)
        if run.version == before:
            ray.train.report(_told(row))
            return
        with tempfile.TemporaryDirectory() as pointer:
            (Path(pointer) / _POINTER).write_text(json.dumps({"run": run.shown, "version": run.version}))
            ray.train.report(_told(row), checkpoint=Checkpoint.from_directory(pointer))

    def finish(self) -> dict[str, Any]:
        """Remove what was there for Ray alone."""
        run = RemoteRun(self.url)
        run.bucket.remove("state/ray_train")
        with staged(run) as folder:
            run.fetch_log(folder)
            return stored_summary(folder)


def place_of(run: Path | RemoteRun) -> RunPlace:
    """How workers reach a run."""
    return RunAtUrl(run.url) if isinstance(run, RemoteRun) else SharedFolder(run.resolve())


def _said_by_first(workers: Workers, text: str | None) -> str | None:
    """What the first worker says, at every worker."""
    said = list(f".{text or ''}".encode()) if workers.rank == 0 else []
    return bytes(workers.concatenated(torch.tensor(said, dtype=torch.uint8)).tolist())[1:].decode() or None


def _told(row: dict[str, Any]) -> dict[str, Any]:
    return {"epoch": row["epoch"], "loss": row["loss"]}

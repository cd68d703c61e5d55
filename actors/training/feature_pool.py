"""Features by a pool of actors: the chunks of `airmoe_ray.features.cache_builder`, handed out one by one.

A chunk's bytes do not depend on who computes it, so neither the number of workers nor a death among them shows in the
cache. On the CPU a worker has one thread: decoding then scales with the cores as the backbone does.
"""

import math
import os
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import ray
from ray.actor import ActorClass
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.cluster.connection import node_ip, nodes
from actors.cluster.gpus import own_device
from actors.cluster.placement import Node
from actors.errors import ClusterError, last_line
from actors.rounds.calls import Pinned, Ref, ready
from actors.rounds.stubs import ActorCalls
from airmoe_ray.config import Config
from airmoe_ray.data import SegmentationDataset, held_out, open_dataset
from airmoe_ray.errors import UserError
from airmoe_ray.features.backbone import load_training_backbone
from airmoe_ray.features.cache_builder import build_chunk, cache_bytes, check_room, plan_features, whole_of, work_on
from airmoe_ray.features.cache_reader import Plan
from airmoe_ray.runtime.progress import Progress, Reporter
from airmoe_ray.training.preflight import check_space

_PER_GPU = 4  # workers on a GPU: decoding keeps a process busy for longer than its images keep the GPU
_MAX_DEATHS = 3
_POLL_S = 0.2


class View(NamedTuple):
    """One view of one part of the dataset: one folder of the cache."""

    split: str
    name: str


class Job(NamedTuple):
    """One chunk of a view."""

    view: View
    chunk: int


class FeatureWorker:
    """Computes chunks. Opens everything at the first one, so that a user's mistake comes back as such."""

    def __init__(self, config: Config, started_in: Path, weights: Pinned | None) -> None:
        self.config, self.started_in, self.weights = config, started_in, weights
        self.opened: dict[View, tuple[Plan, SegmentationDataset]] = {}
        self.backbone: Any = None

    def pid(self) -> int:
        """The worker's process; it answers once it is up."""
        return os.getpid()

    def build(self, job: Job, folder: Path) -> bool:
        """Build a chunk into `folder`; False where somebody else has it in hand, or done."""
        if job.view not in self.opened:
            self._open(job.view)
        plan, dataset = self.opened[job.view]
        if plan.folder != folder or not folder.is_dir():
            raise ClusterError(
                f"{node_ip()} sees other images, or not the cache in {folder.parent}; put data.root and data.cache_dir "
                "where every node has them, or train without --workers"
            )
        return build_chunk(plan, job.chunk, dataset, self.backbone)

    def _open(self, view: View) -> None:
        if self.backbone is None:
            os.chdir(self.started_in)  # paths in the settings are relative to where the command was given
            weights = None if self.weights is None else self.weights.get()
            self.backbone = load_training_backbone(self.config, weights=weights).to(own_device(threads=1))
        dataset = open_dataset(self.config.data, view.split)
        self.opened[view] = (plan_features(dataset, self.backbone, self.config, view.name), whole_of(dataset))


@dataclass(frozen=True)
class WorkerCalls(ActorCalls):
    """Calls of a `FeatureWorker`."""

    @classmethod
    def start(cls, actor: ActorClass[Any], config: Config, started_in: Path, weights: Pinned | None) -> Self:
        """A new worker, which starts in the background."""
        return cls(actor.remote(config, started_in, weights))

    def pid(self) -> Ref[int]:
        """The worker's process, once it is up."""
        return Ref(self.handle.pid.remote())

    def build(self, job: Job, folder: Path) -> Ref[bool]:
        """Build a chunk; False where somebody else has it in hand, or done."""
        return Ref(self.handle.build.remote(job, folder))


def build_features(config: Config, folder: Path | None, report: Reporter, *, weights: Pinned | None = None) -> None:
    """Build, with all of the connected cluster, what a run with these settings will look for in its cache.

    Not before it is known that there is room for the run itself in `folder` (None: it is at a URL). Where nodes do not
    share the cache, nothing is built here: each then keeps its own, and its first trainer computes it.
    """
    backbone = load_training_backbone(config)
    train = open_dataset(config.data, "train")
    check_space(
        folder or Path(tempfile.gettempdir()), config, feature_dim=backbone.dim, classes=len(train.classes.names)
    )
    val = held_out(config.data, train)
    wanted = [("train", train, config.data.views if config.train.cache else [])]
    wanted += [("val", val, ["identity"])] if val is not None else []
    plans: dict[View, Plan] = {}
    images, size = 0, 0.0
    for split, dataset, names in wanted:
        found = {View(split, name): plan_features(dataset, backbone, config, name) for name in names}
        known = {plan.folder for plan in plans.values()}  # of another split of the same images
        found = {view: plan for view, plan in found.items() if plan.folder not in known}
        check_room(list(found.values()), dataset, backbone)
        plans |= found
        missing = sum(len(plan.about.chunk_indices(chunk)) for plan in found.values() for chunk in plan.missing())
        if missing:
            images += missing
            size += missing * cache_bytes(dataset, backbone, config) / len(whole_of(dataset))
    jobs = [Job(view, chunk) for view, plan in plans.items() for chunk in plan.missing()]
    with ExitStack() as stack:
        for view in {job.view for job in jobs}:
            stack.enter_context(work_on(plans[view]))
        if jobs and not _shared(next(iter(plans.values())).folder.parent):
            report.line(f"nodes do not share {config.data.cache_dir}: each computes and keeps its own features")
        elif jobs:
            report.stage(f"{backbone.name} features of {images} images, {size / 1e6:.0f} MB in {config.data.cache_dir}")
            _build(config, plans, jobs, report.progress("features"), weights)


def _shared(folder: Path) -> bool:
    """Whether all nodes that can work see a folder of this one."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    others = [node["NodeID"] for node in alive if node["NodeID"] != here and node["Resources"].get("CPU", 0) >= 1]
    if not others:
        return True
    mark = folder.resolve() / f".seen-{uuid.uuid4().hex}"
    mark.touch()
    try:
        look = ray.remote(Path.exists)
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
        return all(ray.get([look.options(num_cpus=0, scheduling_strategy=place).remote(mark) for place in places]))
    finally:
        mark.unlink(missing_ok=True)


def pool_size(cluster: Sequence[Node], jobs: int) -> tuple[int, float]:
    """How many workers, and the GPU share of each: several to a GPU, one to a core, and none without work."""
    cpus = max(sum(math.floor(node.cpus) for node in cluster), 1)
    gpus = sum(math.floor(node.gpus) for node in cluster)
    if not gpus:
        return min(cpus, jobs), 0.0
    workers = min(_PER_GPU * gpus, cpus, jobs)
    return workers, 1 / math.ceil(workers / gpus)


def _build(
    config: Config, plans: Mapping[View, Plan], jobs: Sequence[Job], progress: Progress, weights: Pinned | None
) -> None:
    on_cpu = config.train.device == "cpu"
    workers, share = pool_size([Node(node.cpus, 0.0 if on_cpu else node.gpus) for node in nodes()], len(jobs))
    actor = ray.remote(FeatureWorker).options(num_cpus=1, num_gpus=share, max_restarts=0, max_task_retries=0)
    pool = _Pool(lambda: WorkerCalls.start(actor, config, Path.cwd(), weights))
    try:
        for _ in range(workers):
            pool.add()
        pool.run(jobs, plans, progress)
    finally:
        pool.close()


class _Pool:
    """Workers, and what each is busy with."""

    def __init__(self, start: Callable[[], WorkerCalls]) -> None:
        self.start, self.started = start, list[WorkerCalls]()
        self.busy: dict[Ref[Any], tuple[WorkerCalls, Job | None]] = {}  # by pending reply; no job: it comes up
        self.idle: list[WorkerCalls] = []
        self.deaths: Counter[Job | None] = Counter()

    def add(self) -> None:
        """Start a worker; where the cluster has no room for it just now, nobody waits for it."""
        worker = self.start()
        self.started.append(worker)
        self.busy[worker.pid()] = (worker, None)

    def run(self, jobs: Sequence[Job], plans: Mapping[View, Plan], progress: Progress) -> None:
        """Hand out chunks until all are there."""
        waiting, done = deque(jobs), 0
        images = {job: len(plans[job.view].about.chunk_indices(job.chunk)) for job in jobs}
        while waiting or any(job for _, job in self.busy.values()):
            while waiting and self.idle:
                worker, job = self.idle.pop(), waiting.popleft()
                self.busy[worker.build(job, plans[job.view].folder)] = (worker, job)
            finished = self._next()
            if finished is None:
                continue
            if plans[finished.view].sizes(finished.chunk) is None:  # in the hands of another run, or of a dead worker
                waiting.append(finished)
                time.sleep(_POLL_S)
            else:
                done += images[finished]
                progress(done, sum(images.values()))

    def _next(self) -> Job | None:
        """Wait for the next worker to become free, or to die; the job it had."""
        (reply,) = ready(list(self.busy))
        worker, job = self.busy.pop(reply)
        try:
            reply.get()
            self.idle.append(worker)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except RayError as error:
            self.deaths[job] += 1
            if self.deaths[job] == _MAX_DEATHS:
                what = f"chunk {job.chunk} of {job.view.split} ({job.view.name})" if job else "nothing yet"
                raise ClusterError(
                    f"{_MAX_DEATHS} workers died over the features of {what}: {last_line(error)}; if memory is short, "
                    "lower backbone.batch_size"
                ) from None
            self.add()
        return job

    def close(self) -> None:
        """End all workers: the training wants their cores."""
        for worker in self.started:
            worker.end()

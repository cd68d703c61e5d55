"""Requests in, results out: a bounded queue, micro-batches, and several of them in flight at once."""

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from actors.errors import DeadlineError, NoExpertsError, NotFiniteError, OverloadedError, ServiceError, StoppedError
from actors.rounds.messages import Settings
from actors.serving.cloud_link import GRACE_S, Again
from actors.serving.results import ImageResult, results_of
from actors.serving.service_rate import ServiceRate
from actors.serving.supervisor import Supervisor
from actors.serving.system import System
from airmoe_ray.inference.masks import Prepared

log = logging.getLogger("airmoe")
_RETRY_PAUSE_S = 0.25
_CLOUDS = 2  # that may be lost with a batch before it is suspected itself
_NOBODY = 3  # times that no client was there for an image before it is given up: it would keep others from a place


@dataclass(eq=False, repr=False)  # a job is itself: comparing or printing images would be slow
class _Job:
    image: Prepared
    id: int
    settings: Settings
    ends_at: float
    arrived: float
    result: asyncio.Future[ImageResult]
    probe: bool
    ticket: int  # of the request: the same however often it is tried
    clouds_lost: int = 0  # that died while they worked on it
    found_nobody: int = 0  # times that no client was there for it

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Jobs of equal key may share a batch."""
        return (self.image.padded.shape, self.settings.common, self.probe)

    @property
    def is_load(self) -> bool:
        """Whether routing chose freely for somebody's image: what load and balance are measured by."""
        return not self.probe and self.settings.participants.everybody


class Orchestrator:
    """The front end's side: a bounded queue in front of the cloud."""

    def __init__(
        self, system: System, supervisor: Supervisor, *, on_batch: Callable[[int, int], None] = lambda size, calls: None
    ) -> None:
        self.system, self.supervisor, self.config = system, supervisor, system.config
        self.on_batch = on_batch
        self._waiting: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._slots = asyncio.Semaphore(self.config.serve.in_flight)
        self._running: dict[asyncio.Task[None], int] = {}  # images of each
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self._tickets = itertools.count(secrets.randbits(62))  # of no other server, nor of this one before
        self.rate = ServiceRate()
        self.answered_at = -math.inf  # when the last answer left, on `time.monotonic`

    async def __aenter__(self) -> "Orchestrator":
        loops = {"dispatcher": self._dispatch(), "supervisor": self.supervisor.watch(lambda: self.queue_depth)}
        self._loops = {name: asyncio.create_task(loop, name=name) for name, loop in loops.items()}
        for task in self._loops.values():
            task.add_done_callback(_report_end)
        return self

    @property
    def dead_loop(self) -> str | None:
        """A loop that has ended and cannot be had back without a new process; None: all are at work."""
        return next((name for name, task in self._loops.items() if task.done() and not self._stopping), None)

    async def __aexit__(self, *_: object) -> None:
        """Refuse new work, finish what is under way, end every actor."""
        self._stopping = True
        await self.drain()
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)
        self.supervisor.close()
        self.system.stop()

    async def drain(self) -> None:
        """Wait until nothing is queued or running."""
        while self._waiting or self._running:
            await asyncio.sleep(0.02)

    @property
    def queue_depth(self) -> int:
        """Images that wait for a place in a batch."""
        return len(self._waiting)

    async def segment(
        self, image: Prepared, *, id: int, settings: Settings, deadline_s: float | None = None, probe: bool = False
    ) -> ImageResult:
        """One image through the whole system, or an error that says why not; a `probe` is not counted as load."""
        if self._stopping:
            raise StoppedError("the service is stopping")
        now = time.monotonic()
        limit = self.config.serve.deadline_s if deadline_s is None else deadline_s
        if not probe:
            self.check_room(len(self._waiting) + self._in_batches, limit)
        self.supervisor.check_up(settings.participants)
        result: asyncio.Future[ImageResult] = asyncio.get_running_loop().create_future()
        job = _Job(image, id, settings, now + limit, now, result, probe, next(self._tickets))
        if probe:  # at once: what a check waits for says nothing about what it checks
            self._start([job])
        else:
            self._waiting.append(job)
            self._arrival.set()
        try:
            return await asyncio.wait_for(job.result, limit + GRACE_S)
        except TimeoutError:
            raise DeadlineError(f"no answer within {limit:.3g} s") from None
        finally:
            if job in self._waiting:  # whoever gave up does not take a place in a batch
                self._waiting.remove(job)

    def check_room(self, ahead: int, time_s: float) -> None:
        """Refuse an image at once where so many before it leave no time to answer within `time_s`."""
        again_s = self.rate.again_s(ahead)
        if len(self._waiting) >= self.config.serve.queue:
            raise OverloadedError(f"{len(self._waiting)} images are waiting already", again_s)
        if not self.rate.has_room(ahead, time_s):
            wait_s = self.rate.wait_s(ahead)
            told = f"{ahead} images are before it, which take {wait_s:.1f} s; it has {time_s:.3g} s"
            raise OverloadedError(told, again_s)

    # batching

    async def _dispatch(self) -> None:
        while True:
            await self._slots.acquire()
            while not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            batch = self._take([])
            if self._running and len(batch) < self.config.serve.max_batch and self.config.serve.batch_wait_ms:
                await asyncio.sleep(self.config.serve.batch_wait_ms / 1e3)
                batch = self._take(batch)
            self._start(batch, self._slots.release)

    def _start(self, batch: list[_Job], ended: Callable[[], None] = lambda: None) -> None:
        if not self._running:
            self.rate.begun(time.monotonic())
        task = asyncio.create_task(self._run(batch))
        self._running[task] = len(batch)
        task.add_done_callback(self._running.pop)
        task.add_done_callback(lambda _: ended())

    @property
    def _in_batches(self) -> int:
        return sum(self._running.values())

    def _take(self, batch: list[_Job]) -> list[_Job]:
        """The oldest job and those that may go with it, in order of arrival."""
        key = batch[0].key if batch else self._waiting[0].key
        room = self.config.serve.max_batch - len(batch)
        joining = [job for job in self._waiting if job.key == key][:room]
        for job in joining:
            self._waiting.remove(job)
        return batch + joining

    # one batch

    async def _run(self, batch: list[_Job]) -> None:
        """Try a batch, and what is left of it in ever smaller groups, until all have an answer."""
        started, groups = time.monotonic(), deque([batch])
        while groups:
            if group := self._still_wanted(groups.popleft()):
                try:
                    groups.extend(await self._try(group, started))
                except Exception as error:  # a defect: it must reach the requests, not vanish with the task
                    log.exception("batch failed")
                    _fail(group, ServiceError(f"internal error ({type(error).__name__})"))

    async def _try(self, group: list[_Job], started: float) -> list[list[_Job]]:
        """Try a group once; what of it has to be tried again, in groups."""
        try:
            outcome = await self._attempt(group, started)
        except NotFiniteError as error:
            _fail([group[row] for row in error.rows], ServiceError(str(error)))
            return [group]
        except ServiceError as error:
            certain = isinstance(error, DeadlineError | NoExpertsError | StoppedError)
            if len(group) > 1 and not certain:  # one image may be why, and its neighbours are to have their answers
                return _halves(group)
            _fail(group, error)
            return []
        if outcome is None:
            return []
        if outcome.nobody:
            _give_up_on_nobody([group[row] for row in outcome.alone] or group)
        if outcome.pause and any(not job.result.done() for job in group):
            await asyncio.sleep(_RETRY_PAUSE_S)
        return _after_a_lost_cloud(group) if outcome.suspect else _without(group, outcome.alone)

    async def _attempt(self, batch: list[_Job], started: float) -> Again | None:
        """Send a batch once and hand out its results; or how to try it again."""
        first = batch[0]
        result = await self.supervisor.cloud.attempt(
            np.stack([job.image.padded for job in batch]),
            tuple(job.id for job in batch),
            tuple(job.ticket for job in batch),
            [job.settings for job in batch],
            ends_at=min(job.ends_at for job in batch),
        )
        if isinstance(result, Again):
            return result
        self.answered_at = time.monotonic()
        if not first.probe:
            self.rate.done(len(batch), self.answered_at)
        if first.is_load:
            self.supervisor.count(result)
            self.on_batch(len(batch), result.calls)
        images = results_of(
            result,
            config=self.config,
            feature_dim=self.system.card.feature_dim,
            settings_B=[job.settings for job in batch],
            seeds_B=[job.id for job in batch],
            queued_ms_B=[1e3 * (started - job.arrived) for job in batch],
        )
        for job, image in zip(batch, images, strict=True):
            if not job.result.done():
                job.result.set_result(image)
        return None

    def _still_wanted(self, batch: list[_Job]) -> list[_Job]:
        now = time.monotonic()
        for job in batch:
            if job.ends_at <= now and not job.result.done():
                job.result.set_exception(DeadlineError("the request's time is over"))
        return [job for job in batch if not job.result.done()]


def _fail(batch: list[_Job], error: Exception) -> None:
    for job in batch:
        if not job.result.done():
            job.result.set_exception(error)


def _without(group: list[_Job], alone: Collection[int]) -> list[list[_Job]]:
    """The group without some rows, and each of these on its own."""
    rest = [job for row, job in enumerate(group) if row not in alone]
    return [part for part in (rest, *([group[row]] for row in alone)) if part]


def _halves(group: list[_Job]) -> list[list[_Job]]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]]


def _after_a_lost_cloud(group: list[_Job]) -> list[list[_Job]]:
    """Once is bad luck; a batch that takes cloud after cloud with it is divided until the image is found."""
    for job in group:
        job.clouds_lost += 1
    if max(job.clouds_lost for job in group) < _CLOUDS:
        return [group]
    if len(group) > 1:
        return _halves(group)
    log.error("%d clouds died over one image; it is given up", group[0].clouds_lost)
    _fail(group, ServiceError("the cloud was lost over this image, again and again"))
    return []


def _give_up_on_nobody(jobs: list[_Job]) -> None:
    """Fail images whose clients were asked for again and again in vain: whoever sent them may come again."""
    for job in jobs:
        job.found_nobody += 1
    gone = [job for job in jobs if job.found_nobody >= _NOBODY]
    _fail(gone, NoExpertsError("no expert that may answer does so at the moment; try again"))


def _report_end(task: asyncio.Task[None]) -> None:
    """Log why a loop that should never end has ended."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the %s has died: %r", task.get_name(), error)

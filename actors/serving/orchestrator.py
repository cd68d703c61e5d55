"""Requests in, results out: a bounded queue, micro-batches, and several of them in flight at once."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.errors import DeadlineError, OverloadedError, ServiceError, StoppedError
from actors.rounds.messages import Settings
from actors.serving.cloud_link import GRACE_S
from actors.serving.results import ImageResult, results_of
from actors.serving.supervisor import Supervisor
from actors.serving.system import System
from airmoe_ray.inference.masks import Prepared

log = logging.getLogger("airmoe")
_RETRY_PAUSE_S = 0.25


@dataclass(eq=False, repr=False)  # a job is itself: comparing or printing images would be slow
class _Job:
    image: Prepared
    id: int
    settings: Settings
    ends_at: float
    arrived: float
    result: asyncio.Future[ImageResult]
    probe: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Jobs of equal key may share a batch."""
        return (self.image.padded.shape, self.settings, self.probe)

    @property
    def is_load(self) -> bool:
        """Whether routing chose freely for somebody's image: what load and balance are measured by."""
        return not self.probe and self.settings.participants.everybody


class Orchestrator:
    """The front end's side: a bounded queue in front of the cloud."""

    def __init__(
        self, system: System, supervisor: Supervisor, *, on_batch: Callable[[int], None] = lambda size: None
    ) -> None:
        self.system, self.supervisor, self.config = system, supervisor, system.config
        self.on_batch = on_batch
        self._waiting: deque[_Job] = deque()
        self._arrival = asyncio.Event()
        self._slots = asyncio.Semaphore(self.config.serve.in_flight)
        self._running: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False

    async def __aenter__(self) -> "Orchestrator":
        self._loops = [asyncio.create_task(self._dispatch()), asyncio.create_task(self.supervisor.watch())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Refuse new work, finish what is under way, end every actor."""
        self._stopping = True
        await self.drain()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
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
        if len(self._waiting) >= self.config.serve.queue:
            raise OverloadedError(f"{len(self._waiting)} images are waiting already")
        self.supervisor.check_up(settings.participants)
        now = time.monotonic()
        limit = self.config.serve.deadline_s if deadline_s is None else deadline_s
        job = _Job(image, id, settings, now + limit, now, asyncio.get_running_loop().create_future(), probe)
        self._waiting.append(job)
        self._arrival.set()
        try:
            return await asyncio.wait_for(job.result, limit + GRACE_S)
        except TimeoutError:
            raise DeadlineError(f"no answer within {limit:.3g} s") from None
        finally:
            if job in self._waiting:  # whoever gave up does not take a place in a batch
                self._waiting.remove(job)

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
            task = asyncio.create_task(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _take(self, batch: list[_Job]) -> list[_Job]:
        """The oldest job and those that may go with it, in order of arrival."""
        key = batch[0].key if batch else self._waiting[0].key
        room = self.config.serve.max_batch - len(batch)
        joining = [job for job in self._waiting if job.key == key][:room]
        for job in joining:
            self._waiting.remove(job)
        return batch + joining

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    # one batch

    async def _run(self, batch: list[_Job]) -> None:
        started = time.monotonic()
        try:
            while batch := self._still_wanted(batch):
                done = await self._attempt(batch, started)
                if done:
                    return
                await asyncio.sleep(_RETRY_PAUSE_S)
        except ServiceError as error:
            _fail(batch, error)
        except Exception as error:  # a defect: it must reach the requests, not vanish with the task
            log.exception("batch failed")
            _fail(batch, ServiceError(f"internal error ({type(error).__name__})"))

    async def _attempt(self, batch: list[_Job], started: float) -> bool:
        """Send a batch once and hand out its results; False: it has to be sent again."""
        first = batch[0]
        result = await self.supervisor.cloud.attempt(
            np.stack([job.image.padded for job in batch]),
            tuple(job.id for job in batch),
            first.settings,
            ends_at=min(job.ends_at for job in batch),
        )
        if result is None:
            return False
        if first.is_load:
            self.supervisor.count(result)
            self.on_batch(len(batch))
        images = results_of(
            result,
            config=self.config,
            feature_dim=self.system.card.feature_dim,
            settings=first.settings,
            seeds_B=[job.id for job in batch],
            queued_ms_B=[1e3 * (started - job.arrived) for job in batch],
        )
        for job, image in zip(batch, images, strict=True):
            if not job.result.done():
                job.result.set_result(image)
        return True

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

"""Requests in, answers out: micro-batching, bounded work in flight, pipelining, retries on a restarted cloud.

Suffixes: B inputs, N clients, K routed.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayError

from actors.answers import answers_of
from actors.errors import (
    ChannelLostError,
    DeadlineError,
    NoExpertsError,
    OverloadedError,
    RosterNeededError,
    ServiceError,
    StoppedError,
    last_line,
)
from actors.messages import Answer, BatchAnswer, Settings
from actors.supervisor import Supervisor
from actors.system import System
from actors.wire import Beside, pack, unseal
from airmoe_ray.inference import Prepared

log = logging.getLogger("airmoe")
_RETRY_PAUSE_S = 0.25
_LATE_ENOUGH = 3  # batches in a row that a cloud may leave unanswered before it is started again
_GRACE_S = 1.0  # the cloud ends its rounds in time by itself; this is for the way back


@dataclass(eq=False, repr=False)  # a job is itself: comparing or printing images would be slow
class _Job:
    image: Prepared
    id: int
    settings: Settings
    ends_at: float
    arrived: float
    answer: asyncio.Future[Answer]
    probe: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Jobs of equal key may share a batch."""
        return (self.image.padded.shape, self.settings, self.probe)


class Orchestrator:
    """The driver's side: a bounded queue in front of the cloud actor."""

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
        self._cloud_late = 0  # batches in a row
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
    ) -> Answer:
        """One image through the whole system, or an error that says why not; a `probe` is not counted as load."""
        if self._stopping:
            raise StoppedError("the service is stopping")
        if len(self._waiting) >= self.config.serve.queue:
            raise OverloadedError(f"{len(self._waiting)} images are waiting already")
        if not self.supervisor.someone_is_up:
            raise NoExpertsError("no expert is up at the moment; they restart by themselves")
        now = time.monotonic()
        limit = self.config.serve.deadline_s if deadline_s is None else deadline_s
        job = _Job(image, id, settings, now + limit, now, asyncio.get_running_loop().create_future(), probe)
        self._waiting.append(job)
        self._arrival.set()
        try:
            return await asyncio.wait_for(job.answer, limit + _GRACE_S)
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
        """Try once; False: try again on the restarted actor."""
        supervisor = self.supervisor
        if not supervisor.someone_is_up:
            raise NoExpertsError("no expert is up at the moment; they restart by themselves")
        roster, cloud = supervisor.roster_version, self.system.cloud
        time_left = min(job.ends_at for job in batch) - time.monotonic()
        supervisor.in_flight[roster] += 1
        try:
            images = np.stack([job.image.padded for job in batch])
            ids = tuple(job.id for job in batch)
            call = pack("segment", Beside(0), ids, batch[0].settings, roster, time_left)
            ref = cloud.exchange.remote(call, images)
            answer: BatchAnswer = unseal(await asyncio.wait_for(_result(ref), time_left + _GRACE_S))
        except RosterNeededError:
            return await self._introduce(batch, started)
        except NoExpertsError as error:
            supervisor.record(getattr(error, "cause", error).faults)
            return False
        except ChannelLostError as error:
            log.warning("%s; trying again", getattr(error, "cause", error))
            await self._revive_channel()
            return False
        except DeadlineError:  # of the most urgent image; the others may have time left
            return False
        except RayActorError as error:
            self._cloud_lost(cloud, error)
            return False
        except TimeoutError:
            self._cloud_hangs()
            raise DeadlineError("the cloud does not answer") from None
        except RayError as error:
            log.error("the cloud failed: %s", error)
            raise ServiceError("the cloud failed on this batch") from None
        finally:
            supervisor.in_flight[roster] -= 1
            supervisor.in_flight += type(supervisor.in_flight)()  # drops zeros
        self._cloud_late = 0
        supervisor.record(answer.faults, heard=answer.heard)
        if not batch[0].probe:
            supervisor.count(answer)
            self.on_batch(len(batch))
        answers = answers_of(
            answer,
            config=self.config,
            feature_dim=self.system.card.feature_dim,
            channel=batch[0].settings.channel,
            seeds_B=[job.id for job in batch],
            queued_ms_B=[1e3 * (started - job.arrived) for job in batch],
        )
        for job, own in zip(batch, answers, strict=True):
            if not job.answer.done():
                job.answer.set_result(own)
        return True

    async def _introduce(self, batch: list[_Job], started: float) -> bool:
        """The cloud does not know the clients, being new itself: introduce them, then try again at once."""
        try:
            await asyncio.wait_for(_result(self.supervisor.introduce()), self.config.cluster.call_deadline_s)
        except (RayError, TimeoutError):
            return False
        return await self._attempt(batch, started)

    def _still_wanted(self, batch: list[_Job]) -> list[_Job]:
        now = time.monotonic()
        for job in batch:
            if job.ends_at <= now and not job.answer.done():
                job.answer.set_exception(DeadlineError("the request's time is over"))
        return [job for job in batch if not job.answer.done()]

    async def _revive_channel(self) -> None:
        """A channel that died comes back by itself; one that hangs is made to."""
        try:
            await asyncio.wait_for(_result(self.system.channel.ping.remote()), self.config.cluster.call_deadline_s)
        except TimeoutError:
            self.system.restart(self.system.channel)
        except RayError:
            pass

    def _cloud_lost(self, cloud: Any, error: RayActorError) -> None:
        log.warning("the cloud was lost (%s); trying again on the restarted one", last_line(error))
        if error.actor_init_failed:
            self.system.remake_cloud(cloud)

    def _cloud_hangs(self) -> None:
        self._cloud_late += 1
        if self._cloud_late == _LATE_ENOUGH:
            self._cloud_late = 0
            log.warning("the cloud hangs; restarting it")
            self.system.restart(self.system.cloud)


def _fail(batch: list[_Job], error: Exception) -> None:
    for job in batch:
        if not job.answer.done():
            job.answer.set_exception(error)


async def _result(ref: Any) -> Any:
    return await ref

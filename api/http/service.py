"""What the routes share: places for requests, images through the system, and the figures about them."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from actors.errors import DeadlineError, OverloadedError
from actors.rounds.messages import Settings
from actors.serving.orchestrator import Orchestrator
from actors.serving.results import ImageResult
from actors.serving.supervisor import Supervisor
from actors.serving.system import System
from airmoe_ray.data.base import UInt8Array
from airmoe_ray.inference.decode import Picture, decode
from airmoe_ray.inference.masks import Prepared, prepare_image
from airmoe_ray.model.routing import Participants
from api.http.errors import ApiError
from api.http.metrics import Metrics
from api.http.readiness import Readiness
from api.http.recent import RecentImages
from api.http.schemas import Parameters

T = TypeVar("T")
_CODEC_S = 2.0  # beyond the deadline, to make a response of what arrived in time


class Service:
    """One served run. It lives on the event loop; pixels are handled on threads beside it."""

    def __init__(self, system: System, supervisor: Supervisor, *, threads: int = 2) -> None:
        self.system, self.supervisor, self.config = system, supervisor, system.config
        self.classes = system.card.table
        self.metrics = Metrics(self.config)
        self.orchestrator = Orchestrator(system, supervisor, on_batch=self.metrics.observe_batch)
        self.readiness = Readiness(self.orchestrator)
        self.recent = RecentImages()
        self.in_progress = 0
        # apart, so that an answer that is there does not wait behind images that have just come
        self._reading = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._writing = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    async def reading(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run what takes milliseconds of CPU for a request, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, work, *arguments)

    async def writing(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run what takes milliseconds of CPU for a response, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, work, *arguments)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[float]:
        """Give a request a place, from before its body is read until its response is made, and the time it must end.

        What waits is bounded here, bodies and decoded images too; the queue of the orchestrator is only a part of it.
        """
        serve = self.config.serve
        if self.in_progress >= serve.queue + serve.in_flight * serve.max_batch:
            again_s = self.orchestrator.rate.again_s(self.in_progress)
            raise OverloadedError(f"{self.in_progress} images are under way already", again_s)
        self.orchestrator.check_room(self.in_progress, serve.deadline_s)
        self.in_progress += 1
        try:
            async with asyncio.timeout(serve.deadline_s + _CODEC_S):
                yield time.monotonic() + serve.deadline_s
        except TimeoutError:
            raise DeadlineError(f"not sent, read and answered within {serve.deadline_s:g} s") from None
        finally:
            self.in_progress -= 1

    def settings(self, parameters: Parameters) -> Settings:
        """The server's settings with a request's parameters on top."""
        routing, channel = self.config.routing, self.config.channel
        if parameters.top_k is not None:
            if parameters.top_k > self.supervisor.total:
                raise ApiError(422, f"top_k: {parameters.top_k} is more than the {self.supervisor.total} experts")
            routing = routing.model_copy(update={"top_k": parameters.top_k})
        if parameters.snr_db is not None:
            channel = channel.model_copy(update={"snr_db": parameters.snr_db})
        if parameters.channel is not None:
            channel = channel.model_copy(update={"kind": parameters.channel})
        participants = Participants(parameters.only, parameters.without)
        participants.check(self.supervisor.total, shared=self.config.experts.shared)
        renew = self.config.serve.renew_frl and parameters.seed is None and participants.everybody
        return Settings(routing, channel, renew, participants)

    def decode(self, data: bytes, keep_rgb: bool) -> tuple[Prepared, UInt8Array | None]:
        """Decode and prepare an image file; its own pixels, up to 150 MB, are there only where they are needed.

        The model is given the same pixels either way: one seed, one mask, whatever the answer shows.
        """
        max_pixels = self.config.serve.max_pixels
        picture = decode(data, max_pixels=max_pixels, long_side=self.long_side)
        prepared = self.prepare(picture)
        if not keep_rgb:
            return prepared, None
        return prepared, (picture if picture.whole else decode(data, max_pixels=max_pixels)).rgb

    @property
    def long_side(self) -> int | None:
        """What images are scaled down to; None where they keep their size."""
        return self.config.data.image_size if self.config.serve.resize == "fit" else None

    def prepare(self, picture: Picture) -> Prepared:
        """Fit and pad pixels for the backbone."""
        return prepare_image(picture.rgb, self.config, self.system.pad_multiple, original=picture.size)

    async def segment(
        self, image: Prepared, settings: Settings, seed: int | None, *, arrived: float, ends_at: float
    ) -> ImageResult:
        """Send a prepared image through the system, and count it.

        `arrived`, on `time.perf_counter`, is when work on the request began; the time since then was decoding.
        `ends_at`, on `time.monotonic`, is when its time is over.
        """
        decode_ms = 1e3 * (time.perf_counter() - arrived)
        # 53 bits, so that a browser can hold the number and send it back
        identity = secrets.randbits(53) if seed is None else seed
        left_s = max(ends_at - time.monotonic(), 0.0)
        result = await self.orchestrator.segment(image, id=identity, settings=settings, deadline_s=left_s)
        result = replace(result, timings_ms={"decode": decode_ms, **result.timings_ms})
        seconds = time.perf_counter() - arrived
        load = settings.participants.everybody  # else routing did not choose freely
        self.metrics.observe(result, seconds=seconds, load=load)
        if load:
            self.recent.add(result, seconds=seconds)
        return result

    def stats(self) -> dict[str, Any]:
        """Routing load and latency, for the page and `/routing/stats`."""
        load = self.supervisor.load
        return {
            "window": self.config.serve.load_window,
            "images": len(load),
            "balancedness": load.balancedness,
            "experts": [status.as_dict() for status in self.supervisor.status()],
            "requests_per_second": self.recent.requests_per_second(),
            "latency_ms": self.recent.latency_ms(),
            "queue_depth": self.orchestrator.queue_depth,
            "in_progress": self.in_progress,
            "degraded_share": self.recent.degraded_share(),
            "renewals_lost": self.supervisor.renewals_lost,
            "nmse_db": self.recent.nmse_db(),
        }

    async def scrape(self) -> tuple[bytes, str]:
        """Write out the metrics, with gauges as of now; this takes milliseconds and goes to a thread."""
        self.metrics.set_experts(self.supervisor.status())
        self.metrics.set_queue(self.orchestrator.queue_depth)
        if self.supervisor.load.balancedness is not None:
            self.metrics.set_balancedness(self.supervisor.load.balancedness)
        return await asyncio.to_thread(self.metrics.render)  # not behind images: under load it is wanted most

    def close(self) -> None:
        """End the threads."""
        for pool in (self._reading, self._writing):
            pool.shutdown(cancel_futures=True)

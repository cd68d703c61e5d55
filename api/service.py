"""What the routes share: the orchestrator, codecs on threads, metrics, and figures over the last requests."""

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from actors.errors import DeadlineError, OverloadedError
from actors.messages import Answer, Settings
from actors.orchestrator import Orchestrator
from actors.supervisor import Supervisor
from actors.system import System
from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.inference import Prepared, prepare_image
from api.errors import ApiError
from api.images import decode
from api.metrics import Metrics
from api.schemas import Parameters

T = TypeVar("T")
_READY_FOR_S = 3.0  # how long a readiness check is remembered
_CODEC_S = 2.0  # beyond the deadline, to make an answer of what arrived in time
_RECENT = 1000  # requests over which latency is reported


@dataclass(frozen=True)
class Segmented:
    """A finished image with all that an answer is made of."""

    rgb: UInt8Array | None  # at its own size; kept only where an overlay is wanted
    prepared: Prepared
    answer: Answer
    seconds: float
    decode_ms: float


class Service:
    """One served run. Lives on the event loop; pixels are handled on threads beside it."""

    def __init__(self, system: System, supervisor: Supervisor, *, threads: int = 2) -> None:
        self.system, self.supervisor, self.config = system, supervisor, system.config
        self.classes = ClassTable(tuple(system.card.classes), tuple((r, g, b) for r, g, b in system.card.palette))
        self.metrics = Metrics(self.config)
        self.orchestrator = Orchestrator(system, supervisor, on_batch=self.metrics.observe_batch)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="codec")
        self._recent: deque[tuple[float, float, bool, float]] = deque(maxlen=_RECENT)  # when, seconds, degraded, nmse
        self._ready: tuple[float, str | None] = (-math.inf, "starting")
        self._ready_lock = asyncio.Lock()
        self.in_progress = 0

    async def on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run something that takes milliseconds of CPU beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[float]:
        """A place for a request, from before its body is read until its answer is made; gives the time it must end.

        What waits is bounded here, bodies and decoded images too; the queue of the orchestrator is only a part of it.
        """
        serve = self.config.serve
        if self.in_progress >= serve.queue + serve.in_flight * serve.max_batch:
            raise OverloadedError(f"{self.in_progress} images are under way already")
        self.in_progress += 1
        try:
            async with asyncio.timeout(serve.deadline_s + _CODEC_S):
                yield time.monotonic() + serve.deadline_s
        except TimeoutError:
            raise DeadlineError(f"not sent, read and answered within {serve.deadline_s:g} s") from None
        finally:
            self.in_progress -= 1

    async def segment(self, data: bytes, parameters: Parameters, *, ends_at: float) -> Segmented:
        """An image file through decoder, system and back."""
        started = time.perf_counter()
        settings = self.settings(parameters)
        rgb, prepared = await self.on_thread(self._decode, data, parameters.view == "overlay")
        decode_ms = 1e3 * (time.perf_counter() - started)
        answer, seconds = await self.run(
            prepared, settings, parameters.seed, started=started, decode_ms=decode_ms, ends_at=ends_at
        )
        return Segmented(rgb, prepared, answer, seconds, decode_ms)

    async def run(
        self,
        prepared: Prepared,
        settings: Settings,
        seed: int | None,
        *,
        started: float,
        decode_ms: float,
        ends_at: float,
    ) -> tuple[Answer, float]:
        """A prepared image through the system, counted; the answer, and the seconds since `started`."""
        # 53 bits, so that a browser can hold the number and send it back
        identity = secrets.randbits(53) if seed is None else seed
        left_s = max(ends_at - time.monotonic(), 0.0)
        answer = await self.orchestrator.segment(prepared, id=identity, settings=settings, deadline_s=left_s)
        seconds = time.perf_counter() - started
        self.metrics.observe(answer, seconds=seconds)
        self.metrics.observe_stage("decode", seconds=decode_ms / 1e3)
        self._recent.append((time.monotonic(), seconds, answer.degraded, answer.nmse))
        return answer, seconds

    def settings(self, parameters: Parameters) -> Settings:
        """The configuration with a request's own wishes on top."""
        routing, channel = self.config.routing, self.config.channel
        if parameters.top_k is not None:
            if parameters.top_k > self.supervisor.total:
                raise ApiError(422, f"top_k: {parameters.top_k} is more than the {self.supervisor.total} experts")
            routing = routing.model_copy(update={"top_k": parameters.top_k})
        if parameters.snr_db is not None:
            channel = channel.model_copy(update={"snr_db": parameters.snr_db})
        if parameters.channel is not None:
            channel = channel.model_copy(update={"kind": parameters.channel})
        return Settings(routing, channel, renew=self.config.serve.renew_frl and parameters.seed is None)

    def prepare(self, rgb: UInt8Array) -> Prepared:
        """Fit and pad."""
        return prepare_image(rgb, self.config, self.system.pad_multiple)

    def _decode(self, data: bytes, keep: bool) -> tuple[UInt8Array | None, Prepared]:
        rgb = decode(data, max_pixels=self.config.serve.max_pixels).rgb
        return rgb if keep else None, self.prepare(rgb)

    async def why_not_ready(self) -> str | None:
        """None if a tiny image went through cloud, experts and channel within the last seconds."""
        async with self._ready_lock:
            when, reason = self._ready
            if time.monotonic() - when > _READY_FOR_S:
                reason = await self._try_tiny_image()
                self._ready = (time.monotonic(), reason)
        return reason

    async def _try_tiny_image(self) -> str | None:
        side = self.system.pad_multiple
        tiny = Prepared(np.zeros((side, side, 3), dtype=np.uint8), (side, side), (side, side))
        try:
            settings = Settings(self.config.routing, self.config.channel)
            await self.orchestrator.segment(tiny, id=0, settings=settings, deadline_s=10.0, probe=True)
        except RuntimeError as error:  # ServiceError, or the loop is closing
            return str(error)
        return None

    def stats(self) -> dict[str, Any]:
        """Routing load and latency, for the page and `/routing/stats`."""
        now = time.monotonic()
        seconds = sorted(entry[1] for entry in self._recent)
        lately = [entry for entry in self._recent if now - entry[0] < 10]
        noise = [entry[3] for entry in self._recent if entry[3] > 0]
        load = self.supervisor.load
        return {
            "window": self.config.serve.load_window,
            "images": len(load),
            "balancedness": load.balancedness,
            "experts": [status.as_dict() for status in self.supervisor.status()],
            "requests_per_second": len(lately) / 10,
            "latency_ms": {"p50": _quantile(seconds, 0.5), "p95": _quantile(seconds, 0.95)},
            "queue_depth": self.orchestrator.queue_depth,
            "in_progress": self.in_progress,
            "degraded_share": sum(e[2] for e in self._recent) / len(self._recent) if self._recent else None,
            "renewals_lost": self.supervisor.renewals_lost,
            "nmse_db": 10 * math.log10(sum(noise) / len(noise)) if noise else None,
        }

    async def scrape(self) -> tuple[bytes, str]:
        """The metrics page, with gauges as of now; writing it out takes milliseconds and goes to a thread."""
        self.metrics.set_experts(self.supervisor.status())
        self.metrics.set_queue(self.orchestrator.queue_depth)
        if self.supervisor.load.balancedness is not None:
            self.metrics.set_balancedness(self.supervisor.load.balancedness)
        return await asyncio.to_thread(self.metrics.render)  # not behind images: under load it is wanted most

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


def logits_of(answer: Answer) -> torch.Tensor:
    """The fused logits (C, h, w) as a tensor."""
    return torch.from_numpy(np.array(answer.logits_Chw))


def _quantile(ordered: list[float], share: float) -> float | None:
    return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None

"""Counts HTTP requests and their time, by status code."""

import asyncio
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.metrics import Metrics
from api.http.middleware.front_door import HEALTH

PROBES = ("/metrics", *HEALTH)  # asked by machines every few seconds


class MetricsMiddleware:
    """Counts HTTP requests around an ASGI app; paths in `skip` are not counted: probes would outnumber requests."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, skip: Collection[str] = PROBES) -> None:
        self.app, self.metrics, self.skip = app, metrics, frozenset(skip)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.skip:
            await self.app(scope, receive, send)
            return
        code: int | None = None

        async def watch(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        self.metrics.request_started()
        start = time.perf_counter()
        try:
            await self.app(scope, receive, watch)
        except asyncio.CancelledError:
            code = code or 499
            raise
        except Exception:
            code = 500  # also where the response had begun: it never ended
            raise
        finally:
            self.metrics.request_finished(code or 500, time.perf_counter() - start)

"""The readiness check: a tiny image through cloud, experts and channel."""

import asyncio
import math
import time

import numpy as np

from actors.rounds.messages import Settings
from actors.serving.orchestrator import Orchestrator
from airmoe_ray.inference.masks import Prepared

_VALID_S = 3.0  # how long a check's outcome stands for the next ones
_DEADLINE_S = 10.0


class Readiness:
    """Checks the system at most every few seconds, however often it is asked."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self._checked_at = -math.inf
        self._reason: str | None = None
        self._lock = asyncio.Lock()

    async def why_not(self) -> str | None:
        """None if the tiny image went through, else what stopped it."""
        async with self._lock:
            if time.monotonic() - self._checked_at > _VALID_S:
                self._reason = await self._check()
                self._checked_at = time.monotonic()
            return self._reason

    async def _check(self) -> str | None:
        config, side = self.orchestrator.config, self.orchestrator.system.pad_multiple
        tiny = Prepared(np.zeros((side, side, 3), dtype=np.uint8), (side, side), (side, side))
        settings = Settings(config.routing, config.channel)
        try:
            await self.orchestrator.segment(tiny, id=0, settings=settings, deadline_s=_DEADLINE_S, probe=True)
        except RuntimeError as error:  # ServiceError, or the loop is closing
            return str(error)
        return None

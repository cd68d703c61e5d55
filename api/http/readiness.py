"""The readiness check: an answer of the last seconds, or a tiny image through cloud, experts and channel."""

import asyncio
import math
import time

import numpy as np

from actors.rounds.messages import Settings
from actors.serving.orchestrator import Orchestrator
from airmoe_ray.inference.masks import Prepared

_VALID_S = 3.0  # how long an outcome stands for the next checks
_OVERLOADED_S = 15.0  # and how long a good one does while another check is under way: overload is not unreadiness
_DEADLINE_S = 10.0


class Readiness:
    """Checks the system at most every few seconds, however often it is asked; under load, images are the check."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self._checked_at = -math.inf
        self._reason: str | None = None
        self._check: asyncio.Task[None] | None = None

    async def why_not(self) -> str | None:
        """None if images go through, else what stops them."""
        if self._is_younger_than(_VALID_S):
            return self._reason
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._send_tiny_image())
        if self._reason is None and self._is_younger_than(_OVERLOADED_S):
            return None
        await asyncio.shield(self._check)
        return self._reason

    def _is_younger_than(self, most_s: float) -> bool:
        """Whether the last outcome is at most this old; any answer to anybody is a good one."""
        if self.orchestrator.answered_at > self._checked_at:
            self._checked_at, self._reason = self.orchestrator.answered_at, None
        return time.monotonic() - self._checked_at <= most_s

    async def _send_tiny_image(self) -> None:
        config, side = self.orchestrator.config, self.orchestrator.system.pad_multiple
        tiny = Prepared(np.zeros((side, side, 3), dtype=np.uint8), (side, side), (side, side))
        settings = Settings(config.routing, config.channel)
        try:
            await self.orchestrator.segment(tiny, id=0, settings=settings, deadline_s=_DEADLINE_S, probe=True)
            self._reason = None
        except RuntimeError as error:  # ServiceError, or the loop is closing
            self._reason = str(error)
        self._checked_at = time.monotonic()

"""Sends batches to the cloud, and mends what stands in the way: a lost or hanging cloud or channel, an old roster."""

import asyncio
import logging
import time

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError

from actors.errors import (
    ChannelLostError,
    DeadlineError,
    NoExpertsError,
    RosterNeededError,
    ServiceError,
    last_line,
)
from actors.rounds.messages import BatchResult, Segment, Settings
from actors.rounds.stubs import CloudCalls
from actors.serving.host_records import HostRecords

log = logging.getLogger("airmoe")
_LATE_ENOUGH = 3  # batches in a row that a cloud may leave unanswered before it is started again
GRACE_S = 1.0  # the cloud ends its rounds in time by itself; this is for the way back


class CloudLink:
    """The front end's way to the cloud."""

    def __init__(self, hosts: HostRecords) -> None:
        self.hosts, self.system = hosts, hosts.system
        self.call_s = hosts.system.config.cluster.call_deadline_s
        self._cloud_late = 0  # batches in a row

    async def attempt(
        self, images_BHW3: NDArray[np.uint8], ids_B: tuple[int, ...], settings: Settings, *, ends_at: float
    ) -> BatchResult | None:
        """One batch, to be answered by `ends_at` (`time.monotonic`); None: worth another attempt after a moment."""
        self.hosts.check_up(settings.participants)
        cloud, time_left_s = self.system.cloud, ends_at - time.monotonic()
        try:
            with self.hosts.batch_under_way() as roster_version:
                message = Segment(ids_B, settings, roster_version, time_left_s)
                result = await asyncio.wait_for(cloud.segment(message, images_BHW3), time_left_s + GRACE_S)
        except RosterNeededError:
            if await self._send_roster():
                return await self.attempt(images_BHW3, ids_B, settings, ends_at=ends_at)
            return None
        except (RayError, TimeoutError) as error:
            await self._mend(cloud, error)
            return None
        self._cloud_late = 0
        self.hosts.record_faults(result.faults, heard=result.heard)
        return result

    async def _mend(self, cloud: CloudCalls, error: Exception) -> None:
        """What can be done about a failed batch; raises where another attempt is pointless.

        Errors of our own arrive as Ray's, with the one that the cloud raised as their `cause`.
        """
        if isinstance(error, NoExpertsError):
            self.hosts.record_faults(getattr(error, "cause", error).faults)
        elif isinstance(error, ChannelLostError):
            log.warning("%s; trying again", getattr(error, "cause", error))
            await self._revive_channel()
        elif isinstance(error, DeadlineError):
            pass  # of the most urgent image; the others may have time left
        elif isinstance(error, RayActorError):
            self._cloud_lost(cloud, error)
        elif isinstance(error, TimeoutError):
            self._cloud_is_late()
            raise DeadlineError("the cloud does not answer") from None
        else:
            log.error("the cloud failed: %s", error)
            raise ServiceError("the cloud failed on this batch") from None

    async def _send_roster(self) -> bool:
        """The cloud does not know the clients, being new itself: whether it does now."""
        try:
            await asyncio.wait_for(self.hosts.send_roster(), self.call_s)
        except (RayError, TimeoutError):
            return False
        return True

    async def _revive_channel(self) -> None:
        """A channel that died comes back by itself; one that hangs is made to."""
        try:
            await asyncio.wait_for(self.system.channel.ping(), self.call_s)
        except TimeoutError:
            self.system.channel.restart()
        except RayError:
            pass

    def _cloud_lost(self, cloud: CloudCalls, error: RayActorError) -> None:
        """A cloud that died comes back by itself, unless its constructor failed."""
        log.warning("the cloud was lost (%s); trying again on the restarted one", last_line(error))
        if error.actor_init_failed:
            self.system.remake_cloud(cloud)

    def _cloud_is_late(self) -> None:
        """A cloud that leaves several batches in a row unanswered hangs, and is restarted."""
        self._cloud_late += 1
        if self._cloud_late == _LATE_ENOUGH:
            self._cloud_late = 0
            log.warning("the cloud hangs; restarting it")
            self.system.cloud.restart()

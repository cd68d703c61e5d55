"""Sends batches to the cloud, and mends what stands in the way: a lost or hanging cloud or channel, an old roster."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayError

from actors.errors import (
    ChannelLostError,
    DeadlineError,
    NoExpertsError,
    NotFiniteError,
    RosterNeededError,
    ServiceError,
    last_line,
)
from actors.rounds.messages import BatchResult, Segment, Settings
from actors.rounds.stubs import CloudCalls
from actors.serving.host_records import HostRecords

log = logging.getLogger("airmoe")
_LATE_ENOUGH = 3  # batches in a row that a cloud may leave unanswered before it is started again
_CHANNEL_S = 2.0  # it answers in a millisecond; beyond this it hangs
GRACE_S = 1.0  # the cloud ends its rounds in time by itself; this is for the way back


@dataclass(frozen=True)
class Again:
    """A batch that has to be tried again, and how."""

    alone: tuple[int, ...] = ()  # inputs that nobody was left for: on their own, so that their neighbours do not wait
    suspect: bool = False  # the cloud died over it: some input may be why
    pause: bool = True  # somebody has to come back first
    nobody: bool = False  # no client was there for it


class CloudLink:
    """The front end's way to the cloud."""

    def __init__(self, hosts: HostRecords) -> None:
        self.hosts, self.system = hosts, hosts.system
        self.call_s = hosts.system.config.cluster.call_deadline_s
        self._cloud_late = 0  # batches in a row
        self._cloud_up = True  # it has answered since it was last lost

    async def attempt(
        self,
        images_BHW3: NDArray[np.uint8],
        ids_B: tuple[int, ...],
        tickets_B: tuple[int, ...],
        settings_B: Sequence[Settings],
        *,
        ends_at: float,
    ) -> BatchResult | Again:
        """One batch, to be answered by `ends_at` (`time.monotonic`); settings may differ in K and SNR."""
        settings = settings_B[0]
        self.hosts.check_up(settings.participants)
        cloud, was_up, time_left_s = self.system.cloud, self._cloud_up, ends_at - time.monotonic()
        try:
            with self.hosts.batch_under_way() as roster_version:
                top_k_B = tuple(one.routing.top_k for one in settings_B)
                snr_db_B = tuple(one.channel.snr_db for one in settings_B)
                message = Segment(ids_B, tickets_B, settings, top_k_B, snr_db_B, roster_version, time_left_s)
                result = await asyncio.wait_for(cloud.segment(message, images_BHW3), time_left_s + GRACE_S)
        except RosterNeededError:  # so it lives
            self._cloud_up = True
            return Again(pause=not await self._send_roster())
        except (RayError, TimeoutError) as error:
            return await self._mend(cloud, error, was_up=was_up)
        self._cloud_late, self._cloud_up = 0, True
        self.hosts.record_faults(result.faults, answered=result.processes, heard=result.heard)
        self.hosts.notice(result.processes)
        return result

    async def _mend(self, cloud: CloudCalls, error: Exception, *, was_up: bool) -> Again:
        """What can be done about a failed batch; raises where another attempt is pointless.

        Errors of our own arrive as Ray's, with the one that the cloud raised as their `cause`.
        """
        own: Any = getattr(error, "cause", error)
        if isinstance(error, NoExpertsError):
            self.hosts.record_faults(own.faults)
            return Again(alone=own.rows or (), nobody=True)
        if isinstance(error, NotFiniteError):
            raise own from None
        if isinstance(error, ChannelLostError):
            log.warning("%s; trying again", own)
            return Again(pause=not await self._revive_channel())
        if isinstance(error, DeadlineError):
            return Again(pause=False)  # of the most urgent image; the others may have time left
        if isinstance(error, RayActorError):
            self._cloud_lost(cloud, error)
            return Again(suspect=was_up)
        if isinstance(error, TimeoutError):
            self._cloud_is_late()
            raise DeadlineError("the cloud does not answer") from None
        log.error("the cloud failed: %s", error)
        raise ServiceError("the cloud failed on this image") from None

    async def _send_roster(self) -> bool:
        """The cloud does not know the clients, being new itself: whether it does now."""
        try:
            await asyncio.wait_for(self.hosts.send_roster(), self.call_s)
        except (RayError, TimeoutError):
            return False
        return True

    async def _revive_channel(self) -> bool:
        """A channel that died comes back by itself; one that hangs is made to. Whether it is there already."""
        try:
            return await asyncio.wait_for(self.system.channel.ping(), min(self.call_s, _CHANNEL_S))
        except TimeoutError:
            log.warning("the channel hangs; restarting it")
            self.system.channel.restart()
        except RayError:
            pass
        return False

    def _cloud_lost(self, cloud: CloudCalls, error: RayActorError) -> None:
        """A cloud that died comes back by itself, unless its constructor failed."""
        log.warning("the cloud was lost (%s); trying again on the restarted one", last_line(error))
        self._cloud_up = False
        if error.actor_init_failed:
            self.system.remake_cloud(cloud)

    def _cloud_is_late(self) -> None:
        """A cloud that leaves several batches in a row unanswered hangs, and is restarted."""
        self._cloud_late += 1
        if self._cloud_late == _LATE_ENOUGH:
            self._cloud_late = 0
            log.warning("the cloud hangs; restarting it")
            self.system.cloud.restart()

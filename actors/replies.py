"""Waiting for what actors reply: for how long, who failed, and whether that was their own fault."""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.errors import ChannelLostError, DeadlineError, InvalidOutputError, UnknownRoundError
from actors.policy import Fault
from actors.wire import unseal


class Replies:
    """Of one round: replies by instance, and what was wrong with the others."""

    def __init__(self, channel: Any, *, call_s: float, ends_at: float) -> None:
        self.channel, self.call_s, self.ends_at = channel, call_s, ends_at
        self.faults: dict[str, Fault] = {}  # by instance, for the health record

    @property
    def time_left_s(self) -> float:
        """Until the round must be over."""
        return self.ends_at - time.monotonic()

    @property
    def patience_s(self) -> float:
        """For one exchange."""
        return max(min(self.call_s, self.time_left_s), 0.001)

    def gather(self, calls: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Replies by instance; who did not reply well is entered in `faults`."""
        patience_s = self.patience_s if timeout_s is None else timeout_s
        until = time.monotonic() + patience_s
        try:
            replies = ray.get(list(calls.values()), timeout=patience_s)
            return {key: _opened(reply) for key, reply in zip(calls, replies, strict=True)}
        except RayError:
            pass
        found = {}
        for key, ref in calls.items():
            try:
                found[key] = _opened(ray.get(ref, timeout=max(until - time.monotonic(), 0.0)))
            except RayError as error:
                self.check_innocent(error)
                self.faults[key] = fault_of(error)
        return found

    def check_innocent(self, error: RayError) -> None:
        """Errors that are nobody's fault among the clients: the channel died, or the request's own time is over."""
        if isinstance(error, RayActorError) and error.actor_id == self.channel._actor_id.hex():
            raise ChannelLostError("the channel was lost") from None
        if isinstance(error, GetTimeoutError) and self.time_left_s <= 0:
            raise DeadlineError("the request's time is over") from None


def fault_of(error: Exception) -> Fault:
    """What an exception of a call says about the client."""
    if isinstance(error, GetTimeoutError):
        return Fault.LATE
    if isinstance(error, RayActorError | UnknownRoundError):
        return Fault.LOST
    return Fault.INVALID if isinstance(error, InvalidOutputError) else Fault.FAILED


def _opened(reply: Any) -> Any:
    return unseal(reply) if isinstance(reply, bytes) else reply

"""Waiting for what actors reply: for how long, who failed, whether that was their own fault, and what policy says.

Suffixes: B inputs, N clients, K routed.
"""

import time
from collections.abc import Mapping
from typing import TypeVar

import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor

from actors.errors import ChannelLostError, DeadlineError, Fault, InvalidOutputError, NoExpertsError, UnknownRoundError
from actors.rounds.calls import Ref, get_all
from actors.rounds.fault_policy import Decision, Exchange, decide
from actors.rounds.stubs import ChannelCalls
from airmoe_ray.model.routing import Routing

T = TypeVar("T")


class Replies:
    """Replies of one round by host, and what was wrong with the missing ones."""

    def __init__(self, channel: ChannelCalls, *, call_s: float, ends_at: float) -> None:
        self.channel, self.call_s, self.ends_at = channel, call_s, ends_at
        self.faults: dict[str, Fault] = {}  # by host, for the health record

    @property
    def time_left_s(self) -> float:
        """Until the round must be over."""
        return self.ends_at - time.monotonic()

    @property
    def exchange_s(self) -> float:
        """How long one exchange may take."""
        return max(min(self.call_s, self.time_left_s), 0.001)

    def gather(self, calls: Mapping[str, Ref[T]], timeout_s: float | None = None) -> dict[str, T]:
        """Replies by host; a host that did not reply well is entered in `faults`."""
        limit_s = self.exchange_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit_s
        try:
            return dict(zip(calls, get_all(list(calls.values()), limit_s), strict=True))
        except RayError:
            pass
        found = {}
        for key, ref in calls.items():
            try:
                found[key] = ref.get(max(until - time.monotonic(), 0.0))
            except RayError as error:
                self.check_host_at_fault(error)
                self.faults[key] = fault_of(error)
        return found

    def check_host_at_fault(self, error: RayError) -> None:
        """Raise what is no host's fault: the channel died, or the request's own time is over."""
        if isinstance(error, RayActorError) and error.actor_id == self.channel.actor_id:
            raise ChannelLostError("the channel was lost") from None
        if isinstance(error, GetTimeoutError) and self.time_left_s <= 0:
            raise DeadlineError("the request's time is over") from None

    # what policy says about who is lost

    def may_substitute(self, routing: Routing, lost_BK: Tensor, usable_BN: Tensor) -> Tensor:
        """Per input, whether policy wants the next best client instead of the lost ones."""
        taken_BN = torch.zeros_like(usable_BN).scatter(1, routing.transmit_BK.cpu(), True)
        survivors_B = (routing.active_BK.cpu() & ~lost_BK).sum(dim=1).tolist()
        spares_B = (usable_BN & ~taken_BN).sum(dim=1).tolist()
        left_s = self.time_left_s
        decisions = [
            decide(Exchange.FORWARD, survivors=alive, spares=spare, time_left_s=left_s, call_s=self.call_s)
            for alive, spare in zip(survivors_B, spares_B, strict=True)
        ]
        return torch.tensor([decision is Decision.SUBSTITUTE for decision in decisions])

    def check_survivors(self, exchange: Exchange, active_BK: Tensor) -> None:
        """Raise where an input has lost all of its clients."""
        fewest = int(active_BK.sum(dim=1).min())
        if decide(exchange, survivors=fewest, spares=0, time_left_s=0, call_s=0) is Decision.GIVE_UP:
            raise NoExpertsError("every routed expert was lost", self.faults)


def fault_of(error: Exception) -> Fault:
    """What the exception of a call says about the host."""
    if isinstance(error, GetTimeoutError):
        return Fault.LATE
    if isinstance(error, RayActorError | UnknownRoundError):
        return Fault.LOST
    return Fault.INVALID if isinstance(error, InvalidOutputError) else Fault.FAILED

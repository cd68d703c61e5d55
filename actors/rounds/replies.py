"""How a round meets missing replies: whom it waits for and how long, what was wrong, and what policy says.

Suffixes: B inputs, N clients, K routed.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from actors.errors import ChannelLostError, DeadlineError, Fault, NoExpertsError
from actors.rounds.calls import Ref, fault_of, get_all, ready
from actors.rounds.fault_policy import Decision, Exchange, decide
from actors.rounds.messages import Arrival
from actors.rounds.patience import HostClocks, Patience
from actors.rounds.stubs import ChannelCalls
from airmoe_ray.model.routing import Routing

T = TypeVar("T")
_CHANNEL = "channel"  # where hosts have their keys
_MANY = 4  # hosts
_GLANCE_S = 0.05  # replies within it count as equally fast: waking up for each of them would cost more than they do


@dataclass(frozen=True)
class _Call:
    key: str
    ref: Ref[Any]
    exchange: Exchange
    work: float
    sent: float  # `time.monotonic`
    teaches: bool = True  # what its host takes; those behind it only waited for it


class Overdue:
    """Calls of all rounds that were given up and may still be answered; with each answer a host catches up."""

    def __init__(self, patience: Patience) -> None:
        self.patience, self.clocks = patience, HostClocks()
        self._calls: list[_Call] = []
        self._untold: set[str] = set()  # hosts that are behind, of which a round failed to tell
        self._lock = threading.Lock()

    def add(self, call: _Call) -> bool:
        """Note a call that was given up; whether it is this round's to tell that the host is behind."""
        with self._lock:
            first, untold = not self.patience.is_behind(call.key), call.key in self._untold
            self._calls.append(replace(call, teaches=first))
            self.patience.gave_up(call.key)
            self._untold.discard(call.key)
        return first or untold

    def leave_untold(self, keys: Iterable[str]) -> None:
        """A round ends without telling of these hosts: the next one that finds them behind does."""
        with self._lock:
            self._untold |= {key for key in keys if self.patience.is_behind(key)}

    def forget(self, key: str) -> None:
        """A host was lost, and with its process all that it owed: what becomes of those calls is not the next one's."""
        with self._lock:
            self._calls = [call for call in self._calls if call.key != key]
            self._untold.discard(key)
            self.patience.forget(key)
            self.clocks.forget(key)

    def retain(self, keys: Iterable[str]) -> None:
        """Forget all hosts but these: the others have left."""
        kept = {*keys, _CHANNEL}
        for key in self.patience.known - kept:
            self.forget(key)

    def look(self) -> None:
        """Note which of them have been answered meanwhile; nothing is fetched."""
        if not self._calls:
            return
        now = time.monotonic()
        with self._lock:
            arrived = set(ready([call.ref for call in self._calls], count=len(self._calls), timeout_s=0))
            answered = [call for call in self._calls if call.ref in arrived]
            self._calls = [call for call in self._calls if call.ref not in arrived]
            for call in answered:
                self.patience.caught_up(call.key)
                if not self.patience.is_behind(call.key):
                    self._untold.discard(call.key)
        for call in answered:
            if call.teaches:
                self.patience.answered(call.key, call.exchange, now - call.sent, call.work)


class Replies:
    """Replies of one round by host, and what was wrong with the missing ones."""

    def __init__(self, overdue: Overdue, *, ends_at: float) -> None:
        self.overdue, self.patience, self.ends_at = overdue, overdue.patience, ends_at
        self.faults: dict[str, Fault] = {}  # by host
        self.known: set[str] = set()  # of these, hosts that were behind before: nothing new for the health record
        self._to_tell: set[str] = set()  # hosts that this round was the first to find behind
        self.arrived_at: dict[str, float] = {}  # by host, its last reply in time, on `time.monotonic`
        self.calls = 0  # between actors

    @property
    def time_left_s(self) -> float:
        """Until the round must be over."""
        return self.ends_at - time.monotonic()

    def gather(
        self, calls: Mapping[str, Ref[T]], exchange: Exchange, work: Mapping[str, float] | None = None
    ) -> dict[str, T]:
        """Replies by host; a host that did not reply well and in time is entered in `faults`."""
        sent, keys = time.monotonic(), list(calls)
        self.overdue.look()
        if not any(self.patience.is_behind(key) for key in keys):
            try:  # mostly all are there at once: fetched without waiting for each first, which saves a call into Ray
                found_at_once = get_all([calls[key] for key in keys], min(_GLANCE_S, self._left_s))
            except RayError:  # some are late or lost
                pass
            else:
                self.calls += len(calls)
                self._learn(dict.fromkeys(keys, time.monotonic() - sent), exchange, work or {}, sent)
                return dict(zip(keys, found_at_once, strict=True))
        arrived = {key: calls[key] for key in self.await_each(calls, exchange, work, sent=sent)}
        limit_s = min(self.patience.ceiling_s, max(self.time_left_s, 0.001))
        try:
            return dict(zip(arrived, get_all(list(arrived.values()), limit_s), strict=True))
        except RayError:
            pass
        found = {}
        for key, ref in arrived.items():
            try:
                found[key] = ref.get(0.05)
            except RayError as error:
                self.blame(key, fault_of(error))
        return found

    def await_each(
        self,
        calls: Mapping[str, Ref[T]],
        exchange: Exchange,
        work: Mapping[str, float] | None = None,
        *,
        sent: float | None = None,
    ) -> list[str]:
        """Hosts whose reply has arrived, fetched or not; the others are late.

        Each has the time that it usually takes and some slack. One that owes an earlier answer is not waited for, and
        taken in only if it has caught up by the time the others have answered; where all do, they are waited for all
        the same, unless the round can do without.
        """
        self.calls += len(calls)
        self.overdue.look()
        sent, size = sent or time.monotonic(), work or {}
        behind = {key for key in calls if self.patience.is_behind(key)}
        awaited = calls.keys() - behind
        if not awaited and exchange is not Exchange.RENEW:
            awaited = set(calls)
        limits_s = {key: self.patience.limit_s(key, exchange, size.get(key, 1.0)) for key in awaited}
        took_s = self._wait({key: calls[key] for key in awaited}, limits_s, sent)
        self._learn(took_s, exchange, size, sent)
        if len(took_s) < len(awaited) and self.time_left_s <= 0:
            raise DeadlineError("the request's time is over")
        arrived = took_s.keys() | self._caught_up({key: calls[key] for key in behind - awaited})
        for key in calls.keys() - arrived:
            self.faults[key] = Fault.LATE
            new = self.overdue.add(_Call(key, calls[key], exchange, size.get(key, 1.0), sent))
            (self._to_tell if new else self.known).add(key)  # one freeze is one fault, however many rounds it meets
        return [key for key in calls if key in arrived]

    def _learn(self, took_s: Mapping[str, float], exchange: Exchange, work: Mapping[str, float], sent: float) -> None:
        for key, seconds in took_s.items():
            self.patience.answered(key, exchange, seconds, work.get(key, 1.0))
            self.arrived_at[key] = sent + seconds

    def _wait(self, calls: Mapping[str, Ref[T]], limits_s: Mapping[str, float], sent: float) -> dict[str, float]:
        """How long each took, of those that were in time."""
        pending, half_s = dict(calls), None
        took_s: dict[str, float] = {}
        timeout_s, count = _GLANCE_S, len(calls)
        while pending and timeout_s > 0:
            arrived = set(ready(list(pending.values()), count=count, timeout_s=min(timeout_s, self._left_s)))
            now_s = time.monotonic() - sent
            took_s |= {key: now_s for key, ref in pending.items() if ref in arrived}
            pending = {key: ref for key, ref in pending.items() if ref not in arrived}
            if half_s is None and 2 * len(took_s) >= len(calls):
                half_s = now_s
            if pending and self.time_left_s > 0:
                # fewer than half have answered: the machine as a whole is slow, and everybody gets twice the time
                factor = 2 if half_s is None and len(calls) >= _MANY else 1
                longest_s = factor * max(self.patience.stretched_s(limits_s[key], half_s or 0.0) for key in pending)
                timeout_s, count = longest_s - (time.monotonic() - sent), 1
            else:
                timeout_s = 0.0
        return took_s

    @property
    def _left_s(self) -> float:
        return max(self.time_left_s, 0.0) if self.ends_at != float("inf") else 1e6

    def _caught_up(self, calls: Mapping[str, Ref[T]]) -> set[str]:
        """Of hosts that were behind, those that have answered this call and all before it."""
        if not calls:
            return set()
        self.overdue.look()
        arrived = set(ready(list(calls.values()), count=len(calls), timeout_s=0))
        return {key for key, ref in calls.items() if ref in arrived and not self.patience.is_behind(key)}

    def may_ask(self, key: str) -> bool:
        """Whether to ask a host at all; one that has left many calls unanswered counts as late unasked."""
        if not (asked := self.patience.may_ask(key)):
            self.overdue.look()
            asked = self.patience.may_ask(key)
        if not asked:
            self.excuse(key, Fault.LATE)
        return asked

    def from_channel(self, channel: ChannelCalls, arriving: Ref[Arrival], work: float) -> Arrival | str:
        """What the channel delivers; or the actor that died with what it was to deliver, by Ray's name."""
        self.calls += 1
        sent, limit_s = time.monotonic(), 2 * self.patience.limit_s(_CHANNEL, Exchange.SUPERPOSE, work)
        try:
            arrival = arriving.get(max(min(limit_s, self.time_left_s), 0.001))
        except GetTimeoutError:
            if self.time_left_s <= 0:
                raise DeadlineError("the request's time is over") from None
            raise ChannelLostError("the channel does not answer") from None
        except RayActorError as error:
            if error.actor_id == channel.actor_id:
                raise ChannelLostError("the channel was lost") from None
            return str(error.actor_id)
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
                raise  # a defect of the channel's own: once more would end the same
            # such as symbols whose node was lost with them: the next round has them made anew
            raise ChannelLostError(f"the channel got nothing ({type(error).__name__})") from None
        self.patience.answered(_CHANNEL, Exchange.SUPERPOSE, time.monotonic() - sent, work)
        return arrival

    def blame(self, key: str, fault: Fault) -> None:
        """Enter what was wrong with a host that was waited for."""
        self.faults[key] = fault
        self.known.discard(key)
        if fault is Fault.LOST:
            self.overdue.forget(key)

    def excuse(self, key: str, fault: Fault) -> None:
        """Enter what was wrong with a host where it is nothing new for its health record."""
        self.faults[key] = fault
        self.known.add(key)

    def take_news(self) -> dict[str, Fault]:
        """Faults for the health record: a host that stays behind is entered once, by the first round that tells it."""
        self._to_tell.clear()
        return {key: fault for key, fault in self.faults.items() if key not in self.known}

    def leave_untold(self) -> None:
        """The round has failed for another reason, and its faults reach nobody."""
        self.overdue.leave_untold(self._to_tell)

    # what policy says about who is lost

    def may_substitute(self, routing: Routing, lost_BK: Tensor, usable_BN: Tensor) -> Tensor:
        """Per input, whether policy wants the next best client instead of the lost ones."""
        survivors_B = (routing.active_BK.cpu() & ~lost_BK).sum(dim=1).tolist()
        spares_B = (usable_BN & ~routing.taken_BN.cpu()).sum(dim=1).tolist()
        left_s, call_s = self.time_left_s, 2 * self.patience.slack_s
        decisions = [
            decide(Exchange.FORWARD, survivors=alive, spares=spare, time_left_s=left_s, call_s=call_s)
            for alive, spare in zip(survivors_B, spares_B, strict=True)
        ]
        return torch.tensor([decision is Decision.SUBSTITUTE for decision in decisions])

    def check_survivors(self, exchange: Exchange, active_BK: Tensor) -> None:
        """Raise where inputs have lost all of their clients, and say which."""
        survivors_B = active_BK.sum(dim=1).tolist()
        given_up = tuple(
            row
            for row, alive in enumerate(survivors_B)
            if decide(exchange, survivors=alive, spares=0, time_left_s=0, call_s=0) is Decision.GIVE_UP
        )
        if given_up:
            raise NoExpertsError("every routed expert was lost", self.take_news(), given_up)

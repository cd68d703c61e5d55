"""Whom a round waits for, and what it makes of those that do not answer. Without actors."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from actors.errors import ChannelLostError, Fault
from actors.rounds import replies as module
from actors.rounds.fault_policy import Exchange
from actors.rounds.pairs import Pairs
from actors.rounds.patience import HostClocks, Patience
from actors.rounds.ray_round import RayRound
from actors.rounds.replies import Overdue, Replies
from actors.rounds.roster import Host, Roster


class Reply:
    """In place of a reference: there or not, or an error."""

    def __init__(self, *, there: bool = False, error: Exception | None = None) -> None:
        self.there, self.error = there, error

    def get(self, timeout_s: float | None = None) -> str:
        if self.error is not None:
            raise self.error
        return "fine"


@pytest.fixture
def overdue(monkeypatch: pytest.MonkeyPatch) -> Overdue:
    def ready(refs: list[Reply], *, count: int = 1, timeout_s: float | None = None) -> list[Reply]:
        found = [ref for ref in refs if ref.there]
        if len(found) < count:
            time.sleep(timeout_s or 0.0)
        return found

    def get_all(refs: list[Reply], timeout_s: float) -> list[str]:
        if not all(ref.there for ref in refs):
            time.sleep(timeout_s)
            raise GetTimeoutError
        return [ref.get() for ref in refs]

    monkeypatch.setattr(module, "ready", ready)
    monkeypatch.setattr(module, "get_all", get_all)
    return Overdue(Patience(0.2, slack_s=0.05))


def ask(overdue: Overdue, exchange: Exchange = Exchange.READ, **calls: Reply) -> Replies:
    replies = Replies(overdue, ends_at=float("inf"))
    replies.gather(calls, exchange)  # type: ignore[arg-type]
    return replies


def test_replies_that_are_there_are_fetched_at_once_and_teach_what_their_hosts_take(
    overdue: Overdue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ready", None)  # nobody is waited for first
    replies = ask(overdue, a=Reply(there=True), b=Reply(there=True))
    assert (replies.calls, replies.faults) == (2, {})
    assert replies.arrived_at.keys() == overdue.patience.known == {"a", "b"}


def test_what_a_dead_process_owed_is_not_taken_off_what_the_next_one_owes(overdue: Overdue) -> None:
    of_the_dead = Reply()
    replies = ask(overdue, a=of_the_dead, b=Reply(there=True))
    replies.blame("a", Fault.LOST)
    assert not overdue.patience.is_behind("a")
    ask(overdue, a=Reply(), b=Reply(there=True))
    of_the_dead.there = True  # Ray fails it at last
    overdue.look()
    assert overdue.patience.is_behind("a")


def test_nothing_is_kept_of_hosts_that_have_left(overdue: Overdue) -> None:
    ask(overdue, a=Reply(), b=Reply(there=True), c=Reply(there=True))
    overdue.retain(["c"])
    assert overdue.patience.known == {"c"}


def test_that_a_host_is_behind_is_told_once_and_by_the_next_round_where_one_fails(overdue: Overdue) -> None:
    first = ask(overdue, a=Reply(), b=Reply(there=True))
    meanwhile = ask(overdue, a=Reply(), b=Reply(there=True))
    assert meanwhile.take_news() == {}
    first.leave_untold()
    after = ask(overdue, a=Reply(), b=Reply(there=True))
    assert after.take_news() == {"a": Fault.LATE}
    assert ask(overdue, a=Reply(), b=Reply(there=True)).take_news() == {}


def test_a_renewal_of_hosts_that_are_all_behind_is_asked_for_and_not_waited_for(overdue: Overdue) -> None:
    ask(overdue, Exchange.RENEW, a=Reply())
    began = time.monotonic()
    replies = ask(overdue, Exchange.RENEW, a=Reply())
    assert time.monotonic() - began < 0.04
    assert replies.faults == {"a": Fault.LATE}
    began = time.monotonic()
    ask(overdue, Exchange.READ, a=Reply())  # nobody else could answer
    assert time.monotonic() - began > 0.04


def test_symbols_lost_on_their_way_repeat_the_round_and_a_defect_of_the_channel_does_not(overdue: Overdue) -> None:
    replies, channel = Replies(overdue, ends_at=float("inf")), SimpleNamespace(actor_id="channel")
    lost = ObjectLostError("ab", None, "")  # type: ignore[no-untyped-call]
    for error in (lost, RayTaskError("superpose", "lost", lost)):
        with pytest.raises(ChannelLostError):
            replies.from_channel(channel, Reply(error=error), 1.0)  # type: ignore[arg-type]
    defect = RayTaskError("superpose", "a defect", ZeroDivisionError())
    with pytest.raises(RayTaskError):
        replies.from_channel(channel, Reply(error=defect), 1.0)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.lists(st.floats(0.0, 2.0), min_size=1), st.floats(0.0, 100.0))
def test_a_time_on_a_hosts_clock_is_never_later_than_it_is_there_and_only_by_the_quickest_reply(
    ahead: float, took_s: list[float], ours: float
) -> None:
    clocks = HostClocks()
    assert clocks.at("a", ours) == float("inf")
    for turn, seconds in enumerate(took_s):
        clocks.note("a", 1, turn + ahead, turn + seconds)
    assert clocks.at("a", ours) == pytest.approx(ours + ahead - min(took_s), abs=1e-6)
    clocks.note("a", 2, 5.0, 5.5)  # another process, maybe on another machine
    assert clocks.at("a", ours) == pytest.approx(ours - 0.5)


@pytest.mark.parametrize(
    ("fault", "failed"), [(Fault.LATE, [0, 1]), (Fault.LOST, [0, 1]), (Fault.INVALID, [1]), (Fault.FAILED, [1])]
)
def test_no_substitute_is_sought_at_a_host_that_does_not_answer(fault: Fault, failed: list[int]) -> None:
    calls: Any = None
    together, apart = Host("0-1+4/1", calls, (0, 1, 4)), Host("2-3/2", calls, (2, 3))
    round_: Any = object.__new__(RayRound)
    round_.serving = Roster(1, 4, calls, (together, apart)).serving(0)  # client 4 has left
    round_.faults = {together.key: fault}
    its = Pairs(np.array([0, 1]), np.array([0, 0]), np.array([1, 1]))
    assert sorted(round_._failed_with(together.key, its)) == failed

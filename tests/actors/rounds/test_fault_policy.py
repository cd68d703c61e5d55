"""What is done about clients that fail: decisions, health records, numbers of replicas, without Ray or a clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import Fault
from actors.rounds.fault_policy import FORGIVEN_AFTER_S, Decision, Exchange, Health, State, decide

COUNTS, SECONDS = st.integers(0, 9), st.floats(0, 60)
CALL_FAULTS = [Fault.LATE, Fault.INVALID, Fault.FAILED]


@settings(deadline=None)
@given(st.sampled_from(Exchange), COUNTS, COUNTS, SECONDS, SECONDS)
def test_a_round_is_given_up_only_when_nobody_is_left(
    exchange: Exchange, survivors: int, spares: int, time_left_s: float, call_s: float
) -> None:
    decision = decide(exchange, survivors=survivors, spares=spares, time_left_s=time_left_s, call_s=call_s)
    nobody = survivors == 0 and (exchange is not Exchange.FORWARD or spares == 0)
    assert (decision is Decision.GIVE_UP) == nobody


@settings(deadline=None)
@given(st.sampled_from(Exchange), COUNTS, COUNTS, SECONDS, SECONDS)
def test_a_substitute_is_asked_only_before_transmission_and_where_there_is_one(
    exchange: Exchange, survivors: int, spares: int, time_left_s: float, call_s: float
) -> None:
    decision = decide(exchange, survivors=survivors, spares=spares, time_left_s=time_left_s, call_s=call_s)
    if decision is Decision.SUBSTITUTE:
        assert exchange is Exchange.FORWARD
        assert spares > 0
        assert time_left_s > call_s or survivors == 0


def test_time_decides_between_a_substitute_and_going_on_without() -> None:
    def at(time_left_s: float) -> Decision:
        return decide(Exchange.FORWARD, survivors=1, spares=1, time_left_s=time_left_s, call_s=5)

    assert at(5.1) is Decision.SUBSTITUTE
    assert at(4.9) is Decision.GO_ON_WITHOUT


@pytest.mark.parametrize("fault", CALL_FAULTS)
def test_three_failures_in_a_row_quarantine_and_one_good_answer_forgives(fault: Fault) -> None:
    health = Health(State.UP)
    for _ in range(2):
        health = health.failed(fault, now=0.0, quarantine_after=3)
    assert health.state is State.UP
    assert health.failed(fault, now=0.0, quarantine_after=3).fault is Fault.QUARANTINED
    assert health.answered(heard=True).failed(fault, now=0.0, quarantine_after=3).state is State.UP


def test_late_replies_are_forgiven_by_any_good_one_and_nonsense_only_by_a_transmission() -> None:
    def after(*faults: Fault) -> Health:
        health = Health(State.UP)
        for fault in faults:
            health = health.failed(fault, now=0.0, quarantine_after=3).answered(heard=False)
        return health

    assert after(*[Fault.LATE] * 9).state is State.UP  # among thousands of good ones, of a client that is never routed
    assert after(*[Fault.INVALID] * 3).fault is Fault.QUARANTINED
    assert after(Fault.FAILED, Fault.LATE, Fault.LATE).fault is Fault.QUARANTINED
    assert after(Fault.FAILED).answered(heard=True).failures == 0


@settings(deadline=None)
@given(st.lists(st.floats(FORGIVEN_AFTER_S * 1.001, 1e7), max_size=20))
def test_isolated_failures_never_quarantine_however_many(pauses: list[float]) -> None:
    health, now = Health(State.UP), 0.0
    for pause in pauses:
        now += pause
        health = health.failed(Fault.LATE, now=now, quarantine_after=3)
        assert health.state is State.UP
        assert health.failures == 1


def test_a_host_that_leaves_a_plain_question_unanswered_is_left_out_and_restarted_after_the_next() -> None:
    health = Health(State.UP).unanswered()
    assert health.fault is Fault.QUARANTINED
    assert not health.must_restart
    assert health.probed(True) == Health(State.UP)
    assert health.probed(False, late=True).must_restart


def test_a_lost_client_is_left_out_at_once_and_until_a_probe_passes() -> None:
    health = Health(State.UP).failed(Fault.LOST, now=0.0, quarantine_after=3)
    assert health.fault is Fault.RESTARTING
    assert health.answered(heard=True).probed(False).fault is Fault.RESTARTING
    assert health.probed(True) == Health(State.UP)


def test_two_probes_in_a_row_without_an_answer_mean_that_it_hangs() -> None:
    late = Health(State.QUARANTINED).probed(False, late=True)
    assert not late.must_restart
    assert late.probed(False, late=True).must_restart
    assert not late.probed(False).probed(False, late=True).must_restart
    assert not late.probed(True).must_restart


@settings(deadline=None)
@given(st.lists(st.sampled_from([*Fault, "answered", "passed", "late", "failed"]), max_size=20))
def test_a_draining_client_never_takes_part_again(events: list[Fault | str]) -> None:
    health = Health(State.DRAINING)
    for event in events:
        if isinstance(event, Fault):
            health = health.failed(event, now=0.0, quarantine_after=3)
        elif event == "answered":
            health = health.answered(heard=True)
        else:
            health = health.probed(event == "passed", late=event == "late")
    assert health.state is State.DRAINING

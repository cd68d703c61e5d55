"""How long clients are waited for: laws of the estimate, without Ray or a clock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rounds.fault_policy import Exchange
from actors.rounds.patience import SLACK_S, Patience

CEILING_S = 5.0
SECONDS = st.floats(0.0, 20.0)


def used(times: list[float], *, key: str = "a", work: float = 1.0, ceiling_s: float = CEILING_S) -> Patience:
    patience = Patience(ceiling_s)
    for seconds in times:
        patience.answered(key, Exchange.READ, seconds, work)
    return patience


@settings(deadline=None)
@given(st.lists(SECONDS, max_size=40), st.floats(0.05, 60), st.floats(0.1, 100))
def test_a_limit_is_never_above_the_ceiling_and_never_below_the_slack(
    times: list[float], ceiling_s: float, work: float
) -> None:
    limit_s = used(times, ceiling_s=ceiling_s).limit_s("a", Exchange.READ, work)
    assert min(SLACK_S, ceiling_s) <= limit_s <= ceiling_s


@settings(deadline=None)
@given(st.floats(0.001, 0.2), st.integers(20, 60))
def test_whoever_always_takes_the_same_time_is_late_after_a_few_hundred_milliseconds_more(
    seconds: float, calls: int
) -> None:
    limit_s = used([seconds] * calls).limit_s("a", Exchange.READ)
    assert 2 * seconds + SLACK_S <= limit_s <= 2.3 * seconds + SLACK_S


@settings(deadline=None)
@given(st.floats(0.001, 1.0), st.floats(1.0, 3.0))
def test_times_that_vary_as_they_always_did_are_never_late(seconds: float, spread: float) -> None:
    patience = Patience(60.0)
    for turn in range(200):
        took_s = seconds * (spread if turn % 3 == 0 else 1.0)
        assert took_s <= patience.limit_s("a", Exchange.READ)
        patience.answered("a", Exchange.READ, took_s)


def test_the_first_calls_have_all_the_time_and_a_new_host_that_of_the_others_and_twice_the_slack() -> None:
    assert Patience(CEILING_S).limit_s("a", Exchange.READ) == CEILING_S
    patience = used([0.01] * 30)
    assert patience.limit_s("b", Exchange.READ) == pytest.approx(2 * SLACK_S + 0.02, abs=0.01)
    assert patience.limit_s("b", Exchange.FORWARD) == CEILING_S  # that nobody has done yet


def test_one_freeze_does_not_make_the_next_one_expensive_but_a_client_that_has_become_slow_gets_its_time() -> None:
    patience = used([0.01] * 50)
    patience.answered("a", Exchange.READ, 9.0)
    assert patience.limit_s("a", Exchange.READ) < 2.0
    for _ in range(30):
        patience.answered("a", Exchange.READ, 2.0)
    assert patience.limit_s("a", Exchange.READ) > 2.0


def test_eight_times_the_work_may_take_eight_times_as_long() -> None:
    patience = used([0.08] * 50, work=4.0)
    of_one, of_eight = (patience.limit_s("a", Exchange.READ, work) - SLACK_S for work in (4.0, 32.0))
    assert of_eight == pytest.approx(8 * of_one)


@settings(deadline=None)
@given(SECONDS, SECONDS)
def test_where_the_others_are_slow_too_the_limit_is_stretched_up_to_the_ceiling(limit_s: float, half_s: float) -> None:
    stretched_s = Patience(CEILING_S).stretched_s(min(limit_s, CEILING_S), half_s)
    assert min(limit_s, CEILING_S) <= stretched_s <= CEILING_S
    assert stretched_s >= min(3 * half_s, CEILING_S)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["gave up", "caught up", "lost"]), max_size=30))
def test_a_host_is_behind_exactly_while_it_owes_an_answer_and_its_queue_stays_short(events: list[str]) -> None:
    patience, owed = Patience(CEILING_S), 0
    for event in events:
        if event == "gave up":
            patience.gave_up("a")
            owed += 1
        elif event == "caught up":
            patience.caught_up("a")
            owed = max(owed - 1, 0)
        else:
            patience.forget("a")
            owed = 0
        assert patience.is_behind("a") == (owed > 0)
        assert patience.may_ask("a") == (owed < 8)
        assert not patience.is_behind("b")


def test_with_a_slack_as_long_as_the_ceiling_every_call_has_that_time() -> None:
    patience = Patience(60.0, slack_s=60.0)
    for _ in range(50):
        patience.answered("a", Exchange.LEARN, 0.01)
    assert patience.limit_s("a", Exchange.LEARN) == 60.0

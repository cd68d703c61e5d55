"""Replicas follow imbalance, busy time and the queue, by one at a time, and do not come and go."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.serving.replica_policy import BusyMeter, Pressure, hot_load, replicas_wanted

PRESSURE = st.builds(Pressure, load=st.floats(0, 20), busy=st.floats(0, 1), waiting=st.booleans())
LIMITS = st.fixed_dictionaries({"hot_load": st.floats(1.01, 5), "hot_busy": st.floats(0.1, 0.95)})


@settings(deadline=None)
@given(PRESSURE, LIMITS, st.integers(1, 6), st.integers(1, 6))
def test_they_change_by_one_within_bounds_and_at_the_same_work_never_back(
    pressure: Pressure, limits: dict[str, float], most: int, current: int
) -> None:
    current = min(current, most)
    wanted = replicas_wanted(pressure, **limits, most=most, current=current)
    assert abs(wanted - current) <= 1
    assert 1 <= wanted <= most
    spread = replace(pressure, busy=min(pressure.busy * current / wanted, 1.0))  # the same work, by that many
    again = replicas_wanted(spread, **limits, most=most, current=wanted)
    assert (again - wanted) * (wanted - current) >= 0


@settings(deadline=None)
@given(PRESSURE, PRESSURE, LIMITS, st.integers(1, 5))
def test_more_of_anything_never_means_fewer(
    one: Pressure, other: Pressure, limits: dict[str, float], current: int
) -> None:
    more = Pressure(max(one.load, other.load), max(one.busy, other.busy), one.waiting or other.waiting)
    assert replicas_wanted(more, **limits, most=6, current=current) >= replicas_wanted(
        one, **limits, most=6, current=current
    )


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_the_hottest_expert_there_can_be_is_hot_unless_all_are_always_asked(clients: int, data: st.DataObject) -> None:
    routed = data.draw(st.integers(1, clients))
    limit = hot_load(2.0, clients=clients, routed=routed)
    most = clients / routed  # every image goes to it
    assert most > limit or most == pytest.approx(1.0)
    assert limit <= 2.0


def test_plain_overload_grows_and_a_queue_in_front_of_idle_experts_does_not() -> None:
    limits = {"hot_load": 1.5, "hot_busy": 0.75, "most": 3}
    assert replicas_wanted(Pressure(1.0, 0.9, waiting=False), **limits, current=1) == 2
    assert replicas_wanted(Pressure(1.0, 0.5, waiting=True), **limits, current=1) == 2
    assert replicas_wanted(Pressure(1.0, 0.1, waiting=True), **limits, current=1) == 1
    assert replicas_wanted(Pressure(0.2, 0.0, waiting=False), **limits, current=3) == 2


def test_busy_time_is_measured_between_two_looks_and_a_restart_counts_anew() -> None:
    meter = BusyMeter()
    meter.note("a", 10.0, now=100.0)
    assert meter.share == {}
    meter.note("a", 14.0, now=105.0)
    assert meter.share == {"a": pytest.approx(0.8)}
    meter.note("a", 0.5, now=110.0)  # a new process
    meter.note("a", 1.5, now=115.0)
    assert meter.share == {"a": pytest.approx(0.2)}
    meter.forget_all_but(set())
    assert meter.share == {}

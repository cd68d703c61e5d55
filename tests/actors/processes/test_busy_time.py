"""Working time of a process: what several threads do at once counts once."""

import threading
import time
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.processes.busy_time import BusyTime


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=40))
def test_it_is_the_time_in_which_anything_was_under_way(steps: list[tuple[bool, int]]) -> None:
    now, depth, expected = [0.0], 0, 0.0
    busy = BusyTime(lambda: now[0])
    for begins, passed_s in steps:
        expected += passed_s if depth else 0
        now[0] += passed_s
        if begins:
            busy.__enter__()
            depth += 1
        elif depth:
            busy.__exit__()
            depth -= 1
        assert busy.seconds == expected
    assert busy.seconds <= now[0] == sum(passed for _, passed in steps)


def test_threads_that_work_side_by_side_do_not_work_longer_than_the_clock_says() -> None:
    busy, seen = BusyTime(), list[float]()

    def work() -> None:
        for _ in range(200):
            with busy:
                pass
        with busy:
            time.sleep(0.2)

    begun = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(busy.seconds)
        time.sleep(0.01)
    took_s = time.perf_counter() - begun
    assert 0.2 <= busy.seconds <= took_s
    assert seen == list(accumulate(seen, max))  # it never goes back

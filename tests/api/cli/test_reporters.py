"""What a command shows while it works: bars where somebody sees them, lines where a file or a pipe takes them."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.progress import Progress

from api.cli import reporters
from api.cli.reporters import LineReporter, TerminalReporter, reporting


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass for the reporters."""
    now = [1000.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_what_begins_is_told_at_once(log):
    LineReporter(Console(file=log)).stage("features of 600 images")
    assert log.getvalue() == "features of 600 images\n"


def test_long_work_is_told_every_ten_seconds_with_the_time_that_is_left(log, wait):
    report = LineReporter(Console(file=log))
    move = report.progress("features")
    for done in range(10, 101, 10):
        report.note(f"{done} %")
        move(done, 100)
        wait(6)
    assert log.getvalue().splitlines() == [
        "features: 30 of 100, 0:00:42 left  30 %",
        "features: 50 of 100, 0:00:30 left  50 %",
        "features: 70 of 100, 0:00:18 left  70 %",
        "features: 90 of 100, 0:00:06 left  90 %",
    ]


def test_work_found_half_done_is_not_taken_for_fast(log, wait):
    move = LineReporter(Console(file=log)).progress("features")
    move(900, 1000)
    wait(10)
    move(910, 1000)
    assert log.getvalue() == "features: 910 of 1000, 0:01:30 left\n"


def test_short_work_is_not_worth_a_line(log, wait):
    report = LineReporter(Console(file=log))
    for epoch in range(5):
        move = report.progress(f"epoch {epoch}")
        wait(5)
        move(1, 2)
        move(2, 2)
        report.line(f"loss of epoch {epoch}")
    assert log.getvalue().splitlines() == [f"loss of epoch {epoch}" for epoch in range(5)]


def test_work_that_does_not_move_is_told_too(log, wait):
    move = LineReporter(Console(file=log)).progress("actors ready")
    for _ in range(3):
        move(0, 12)
        wait(10)
    assert log.getvalue().splitlines() == ["actors ready: 0 of 12"] * 2


def test_on_a_terminal_a_stage_stays_until_the_first_step_of_its_bar(log):
    bars = Progress(console=Console(file=log, force_terminal=True))
    report = TerminalReporter(bars)
    report.stage("features of 600 images")
    move = report.progress("features")
    assert [(task.description, task.total) for task in bars.tasks] == [("features of 600 images", None)]
    move(1, 600)
    assert [(task.description, task.total) for task in bars.tasks] == [("features", 600)]
    report.stage("warm start")
    assert [task.description for task in bars.tasks] == ["warm start"]
    report.close()
    assert bars.tasks == []


@pytest.mark.parametrize(("interactive", "kind"), [(True, TerminalReporter), (False, LineReporter)])
def test_bars_are_for_terminals(interactive, kind, log, monkeypatch):
    monkeypatch.setattr(
        reporters, "stderr", Console(file=log, force_terminal=interactive, force_interactive=interactive)
    )
    with reporting() as report:
        assert isinstance(report, kind)

"""Runs that go on: after an end, a kill, a changed setting; what does not fit is refused and changes nothing."""

import json
import signal
import subprocess
import time

import pytest

from airmoe_ray.training.run import train_run
from tests.airmoe_ray.training.tiny_runs import AIRMOE, airmoe, tiny, tiny_config


def test_a_resumed_run_ends_like_an_undisturbed_one(tmp_path):
    undisturbed = tiny_config(tmp_path, **{"train.epochs": 3, "train.schedule": "constant"})
    train_run(undisturbed, tmp_path / "a")
    first = tiny_config(tmp_path, **{"train.epochs": 2, "train.schedule": "constant"})
    train_run(first, tmp_path / "b")
    train_run(undisturbed, tmp_path / "b", resume=True)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in "ab"]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in rows]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_does(how, tmp_path):
    command = [str(AIRMOE), "train", "--config", "quickstart", *tiny(**{"train.epochs": 60}), "--run", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not (tmp_path / "r" / "checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert "--resume" in errors
    assert "Traceback" not in errors
    done = len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines())
    result = airmoe("train", "--resume", "--run", "r", "--set", f"train.epochs={done + 2}", cwd=tmp_path)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["last"]["epoch"] == done + 2


def test_resuming_a_finished_run_changes_nothing(copy):
    before = {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()}
    result = airmoe("train", "--resume", "--run", "r", cwd=copy)
    assert result.code == 0
    assert "nothing is left to do" in result.err
    assert {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()} == before


def test_a_run_killed_before_its_summary_gets_it_from_the_log(copy):
    expected = json.loads((copy / "r" / "summary.json").read_text())
    (copy / "r" / "summary.json").unlink()
    assert airmoe("train", "--resume", "--run", "r", cwd=copy).code == 0
    found = json.loads((copy / "r" / "summary.json").read_text())
    assert 0 < found.pop("seconds") <= expected.pop("seconds")  # of the epochs alone
    assert found == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.epochs=1", "2 epochs are trained already"),
        ("data.image_size=320", "dilations"),
        ("frl.prototypes=8", "frl.prototypes"),
        ("experts.hidden=32", "another architecture"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_and_changes_nothing(copy, change, told):
    before = {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()}
    more = ["--set", "data.train_count=6", "--set", "data.val_count=5"] if "image_size" in change else []
    result = airmoe("train", "--resume", "--run", "r", "--set", change, *more, cwd=copy)
    assert result.code == 2
    assert told in result.err
    assert {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()} == before


def test_the_log_has_every_epoch_once_after_a_kill_at_any_point(copy):
    log = copy / "r" / "metrics.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[-1].replace('"epoch": 2', '"epoch": 3') + '\n{"epo')
    assert airmoe("train", "--resume", "--run", "r", "--set", "train.epochs=4", cwd=copy).code == 0
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_diverging_run_stops_and_keeps_its_last_checkpoint(copy):
    before = (copy / "r" / "checkpoint" / "cloud.safetensors").read_bytes()
    result = airmoe("train", "--resume", "--run", "r", "--set", "train.epochs=4", "--set", "train.lr=1e30", cwd=copy)
    assert result.code == 2
    assert "not finite" in result.err
    assert (copy / "r" / "checkpoint" / "cloud.safetensors").read_bytes() == before

"""`airmoe train` on Ray as a service or a batch system runs it: its output goes to a file, and SIGTERM ends it."""

import signal
import subprocess
import time

import psutil
import pytest

from tests.airmoe_ray.training.tiny_runs import AIRMOE, airmoe, tiny
from tests.object_store import object_store


def test_it_says_what_it_does_and_ends_at_sigterm_with_a_line_and_nothing_left(tmp_path):
    settings = tiny(**{"train.epochs": 500, "train.engine": "ray"})
    process = subprocess.Popen(
        [str(AIRMOE), "train", *settings, "--run", "r"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told = []
    while not (told and told[-1].startswith("epoch")) and (line := process.stderr.readline()):
        told.append(line)
    stages = [
        "r: checking settings, data and folder",
        "starting Ray",
        "embedded features of 30 images, ",
        "starting 1 training worker",
        "20 training images, ",
        "warm start of 5 clients",
        "training 500 epochs of 4 steps",
    ]
    begins = [line for line in told if line.startswith(tuple(stages))]
    assert [line.startswith(stage) for line, stage in zip(begins, stages, strict=True)] == [True] * len(stages), told
    while not (tmp_path / "r" / "checkpoint").exists():  # comes after the line
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    assert [line for line in rest if not line.startswith("epoch")] == [
        "airmoe: interrupted; `airmoe train --resume --run r` goes on"
    ]
    assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.parametrize("at_url", [False, True], ids=["folder", "URL"])
def test_a_job_that_is_tried_again_goes_on_from_its_checkpoint_or_begins(tmp_path, monkeypatch, *, at_url):
    with object_store() as store:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        run = store.url("tried") if at_url else "tried"
        job = ("train", "--run", run, "--resume-or-begin", *tiny(), "--config", "quickstart")
        first = airmoe(*job, "--set", "train.epochs=1", cwd=tmp_path)
        assert (first.code, "epoch 1/1" in " ".join(first.err.split())) == (0, True), first.err
        again = airmoe(*job, "--set", "train.epochs=2", cwd=tmp_path)
        said = " ".join(again.err.split())
        assert (again.code, "epoch 1/2" in said, "epoch 2/2" in said) == (0, False, True), again.err
        finished = airmoe(*job, "--set", "train.epochs=2", cwd=tmp_path)
        assert (finished.code, "epoch 2/2" in " ".join(finished.err.split())) == (0, False), finished.err


def test_a_checkpoint_that_was_being_replaced_is_gone_on_from(tmp_path):
    assert airmoe("train", "--run", "r", *tiny(**{"train.epochs": 1}), cwd=tmp_path).code == 0
    (tmp_path / "r/checkpoint").rename(tmp_path / "r/checkpoint.ready")
    again = airmoe("train", "--run", "r", "--resume-or-begin", "--set", "train.epochs=2", cwd=tmp_path)
    assert (again.code, "epoch 1/2" in " ".join(again.err.split())) == (0, False), again.err

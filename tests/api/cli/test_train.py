"""`airmoe train` on Ray as a service or a batch system runs it: its output goes to a file, and SIGTERM ends it."""

import signal
import subprocess
import time

import psutil

from tests.airmoe_ray.training.tiny_runs import AIRMOE, tiny


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

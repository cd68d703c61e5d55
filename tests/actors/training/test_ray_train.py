"""Training on Ray Train gives the run of one process, also when a worker dies on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.errors import ClusterError
from actors.training.ray_train import _reason, train_on_ray
from actors.training.run_places import SharedFolder
from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.errors import UserError
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.training.run import train_run

EPOCHS = 10


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> Config:
    return Config.model_validate(
        {
            "data": {
                "train_count": 20,
                "val_count": 5,
                "image_size": 64,
                "cache_dir": str(tmp_path_factory.mktemp("cache")),
            },
            "experts": {"count": 4, "hidden": 16, "width": 16},
            "frl": {"dim": 8, "prototypes": 3},
            "routing": {"top_k": 2},
            "train": {"epochs": EPOCHS, "batch_size": 8, "threads": 1},
        }
    )


@pytest.fixture(scope="module")
def local_rows(config: Config, tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "local"
    train_run(config, folder)
    return rows_of(folder)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_run(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)  # sums round otherwise, at 1e-7
        assert row["miou"] == pytest.approx(other["miou"], abs=0.05)  # a pixel at a tie
        assert row["load"] == other["load"]


def test_two_workers_have_the_curve_of_one_process(
    own_ray: None, config: Config, local_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    summary = train_on_ray(config, tmp_path / "run", workers=2, resume=False, report=Silent())
    assert_same_run(rows_of(tmp_path / "run"), local_rows)
    assert summary["epochs"] == EPOCHS


def signal_a_worker(what: signal.Signals) -> None:
    """To a worker of our own cluster: others may train on this machine."""
    family = psutil.Process().children(recursive=True)
    os.kill(next(p.pid for p in family if "RayTrainWorker" in " ".join(p.cmdline())), what)


def after_an_epoch(folder: Path, what: signal.Signals) -> None:
    while not rows_of(folder):
        time.sleep(0.05)
    signal_a_worker(what)


@pytest.mark.parametrize(
    ("what", "limit_s"),
    [(signal.SIGKILL, 1800.0), pytest.param(signal.SIGSTOP, 30.0, marks=pytest.mark.slow)],
    ids=["dies", "hangs"],
)
def test_a_worker_that_fails_on_the_way_changes_nothing(
    what: signal.Signals,
    limit_s: float,
    *,
    own_ray: None,
    config: Config,
    local_rows: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    impatient = config.model_copy(update={"train": config.train.model_copy(update={"group_timeout_s": limit_s})})
    trouble = threading.Thread(target=after_an_epoch, args=[tmp_path / "run", what], daemon=True)
    trouble.start()
    train_on_ray(impatient, tmp_path / "run", workers=2, resume=False, report=Silent())
    assert not trouble.is_alive()
    assert_same_run(rows_of(tmp_path / "run"), local_rows)


def start(config: Config, folder: Path, *more: str) -> "subprocess.Popen[str]":
    """`airmoe train` on two workers, in a process of its own."""
    path = folder.parent / "config.yaml"
    path.write_text(to_yaml(config))
    command = [sys.executable, "-m", "api.cli.main", "train", "--config", str(path), "--run", str(folder)]
    return subprocess.Popen([*command, "--workers", "2", *more], stderr=subprocess.PIPE, text=True)


def await_an_epoch(folder: Path, process: "subprocess.Popen[str]") -> None:
    """Until the process has shown an epoch of its own, and kept it."""
    assert process.stderr is not None
    seen = []
    while not (line := process.stderr.readline()).startswith("epoch"):
        seen.append(line)
        assert line, "".join(seen)
    while not (folder / "checkpoint").exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_of_the_driver_and_after_ctrl_c(
    own_ray: None, config: Config, local_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(config, folder)
    await_an_epoch(folder, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=90)  # Ray's agents take their time
    assert alive == []
    process = start(config, folder, "--resume")
    await_an_epoch(folder, process)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert [line for line in told.splitlines() if line and not line.startswith(("epoch", "20 training images"))] == [
        f"airmoe: interrupted; `airmoe train --resume --run {folder}` goes on"
    ]
    train_on_ray(config, folder, workers=2, resume=True, report=Silent())
    assert_same_run(rows_of(folder), local_rows)


def test_a_mistake_of_the_user_ends_all_workers_and_is_told_as_one(
    own_ray: None, config: Config, tmp_path: Path
) -> None:
    broken = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e30})})
    with pytest.raises(UserError, match="the loss is not finite"):
        train_on_ray(broken, tmp_path / "run", workers=2, resume=False, report=Silent())


def test_a_group_that_hangs_again_and_again_is_told_with_the_limit(config: Config) -> None:
    told = _reason("RuntimeError: [gloo/transport/tcp] Timed out waiting 8000ms for recv operation", config)
    assert "train.group_timeout_s = 1800" in told
    assert _reason("Traceback\n  RuntimeError: out of paper\n\n", config) == "RuntimeError: out of paper"


def test_a_worker_that_sees_another_folder_says_so(own_ray: None, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "job").write_text("of another run")
    with pytest.raises(ClusterError, match=r"does not see the run folder .*; put --run where every node has it"):
        SharedFolder(tmp_path).begun_before(OneWorker(), "of this run")


def test_more_workers_than_cores_are_refused(own_ray: None, config: Config, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--workers 3: the cluster has 2 CPUs"):
        train_on_ray(config, tmp_path / "run", workers=3, resume=False, report=Silent())

"""Training on Ray Train gives the run of one process, also when a worker dies on the way."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.errors import ClusterError
from actors.trainer import train_on_ray
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.run import Silent, train_run

EPOCHS = 4


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
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row["miou"] == pytest.approx(other["miou"], abs=1.0)
        assert row["load"] == pytest.approx(other["load"], abs=0.2)


def test_two_workers_have_the_curve_of_one_process(
    own_ray: None, config: Config, local_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    summary = train_on_ray(config, tmp_path / "run", workers=2, resume=False, report=Silent())
    assert_same_run(rows_of(tmp_path / "run"), local_rows)
    assert summary["epochs"] == EPOCHS


def kill_a_worker_after_an_epoch(folder: Path) -> None:
    while not rows_of(folder):
        time.sleep(0.05)
    workers = [p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"] or [])]
    os.kill(workers[0].pid, signal.SIGKILL)


def test_a_worker_killed_on_the_way_changes_nothing(
    own_ray: None, config: Config, local_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    killer = threading.Thread(target=kill_a_worker_after_an_epoch, args=[tmp_path / "run"], daemon=True)
    killer.start()
    train_on_ray(config, tmp_path / "run", workers=2, resume=False, report=Silent())
    assert not killer.is_alive()
    assert_same_run(rows_of(tmp_path / "run"), local_rows)


def test_a_mistake_in_the_settings_is_told_as_one(own_ray: None, config: Config, tmp_path: Path) -> None:
    broken = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e30})})
    with pytest.raises(UserError, match="the loss is not finite"):
        train_on_ray(broken, tmp_path / "run", workers=1, resume=False, report=Silent())


def test_more_workers_than_cores_are_refused(own_ray: None, config: Config, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--workers 3: the cluster has 2 CPUs"):
        train_on_ray(config, tmp_path / "run", workers=3, resume=False, report=Silent())

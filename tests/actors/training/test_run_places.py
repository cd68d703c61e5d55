"""A run at a URL in the hands of workers that Ray Train starts again."""

import json
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train import Checkpoint
from torch import Tensor

from actors.training.run_places import RunAtUrl
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.storage.remote_run import RemoteRun

EPOCHS = 4


class Second(OneWorker):
    """The second of two workers; the first has said something."""

    rank = 1

    def __init__(self, said: str) -> None:
        self.said = said

    def concatenated(self, rows: Tensor) -> Tensor:
        assert not len(rows)  # the first alone decides
        return torch.tensor(list(f".{self.said}".encode()), dtype=torch.uint8)


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run whose bucket is four epochs ahead of what Ray Train remembers: its first."""
    run, state = RemoteRun(f"memory://places/{tmp_path.name}"), tmp_path / "run/checkpoint/trainer/state.json"
    state.parent.mkdir(parents=True)
    made = []
    for epoch in range(EPOCHS):
        state.with_name("new").write_text(json.dumps({"epoch": epoch}))
        state.with_name("new").rename(state)
        (state.parents[1] / f"touched {epoch}").touch()  # a checkpoint is another folder each time
        run.push(tmp_path / "run")
        made.append(str(run.version))
    remembered = tmp_path / "remembered"
    remembered.mkdir()
    (remembered / "run.json").write_text(json.dumps({"run": run.shown, "version": made[0]}))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: Checkpoint.from_directory(str(remembered)))
    return made


def epoch_of(tmp_path: Path, workers: Any) -> int:
    """The epoch that a worker goes on from, when it is started again."""
    with RunAtUrl(f"memory://places/{tmp_path.name}").opened(workers, "job", resume=False) as run:
        assert run.resume
        return int(json.loads((run.folder / "checkpoint/trainer/state.json").read_text())["epoch"])


def test_a_worker_goes_on_from_the_newest_checkpoint_though_ray_train_remembers_one_that_is_gone(
    versions: list[str], tmp_path: Path
) -> None:
    there = RemoteRun(f"memory://places/{tmp_path.name}").bucket.list("versions/checkpoint")
    assert not any(name.startswith(versions[0]) for name in there)
    assert epoch_of(tmp_path, OneWorker()) == EPOCHS - 1


def test_all_workers_go_on_from_the_checkpoint_that_the_first_has_seen(versions: list[str], tmp_path: Path) -> None:
    assert epoch_of(tmp_path, Second(said=versions[-2])) == EPOCHS - 2

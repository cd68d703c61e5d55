"""What a run says and keeps: both channels, the best epoch, the line of an epoch, TensorBoard, and room on the disk."""

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.errors import UserError
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features
from airmoe_ray.inference.evaluate import evaluate
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.inference.validate import validate
from airmoe_ray.training.epoch_log import clock, load_blocks
from airmoe_ray.training.preflight import trainable_bytes
from airmoe_ray.training.run import train_run

SETTINGS = {
    "data.image_size": 64,
    "data.train_count": 20,
    "data.val_count": 11,
    "data.cache_dtype": "float32",
    "experts.count": 5,
    "experts.hidden": 16,
    "experts.width": 16,
    "train.epochs": 3,
    "train.batch_size": 5,
    "train.lr": 0.01,
    "channel.snr_db": 5,
}


def small(folder: Path, **more: object) -> Config:
    settings = SETTINGS | {"data.cache_dir": folder / "cache"} | more
    return load_config("quickstart", [f"{key}={value}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: Any) -> tuple[Config, Path]:
    folder = tmp_path_factory.mktemp("scored")
    config = small(folder)
    train_run(config, folder / "run")
    return config, folder / "run"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_epoch_is_scored_on_the_noisy_and_on_the_ideal_channel(scored):
    config, run = scored
    dataset, last = open_dataset(config.data, "val"), rows_of(run)[-1]
    ideal = config.model_copy(update={"channel": config.channel.model_copy(update={"kind": "ideal"})})
    for settings, name in ((config, "miou"), (ideal, "miou_ideal")):
        direct = evaluate(Segmenter.load(run / "checkpoint", settings), dataset)
        assert last[name] == pytest.approx(direct["miou"], abs=0.01)  # a pixel or two may tie
    assert last["miou"] != last["miou_ideal"]


class Pair:
    """Two workers in two threads."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.meeting, self.table = rank, meeting, table

    def total(self, value: torch.Tensor) -> torch.Tensor:
        self.table[self.rank] = value
        self.meeting.wait(60)
        total = self.table[0] + self.table[1]
        self.meeting.wait(60)
        return total


def test_workers_that_share_the_validation_have_the_scores_of_one(scored):
    config, run = scored
    dataset = open_dataset(config.data, "val")
    cache = cached_features(dataset, load_backbone(config.backbone), config, "identity")
    models = [Segmenter.load(run / "checkpoint").model for _ in range(2)]
    alone = validate(models[0], cache, dataset)
    meeting, table, scores = threading.Barrier(2), {}, {}

    def work(rank: int) -> None:
        scores[rank] = validate(models[rank], cache, dataset, Pair(rank, meeting, table))

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for found in scores[0], scores[1]:
        assert found["images"] == alone["images"] == 11
        assert found["routing"]["load"] == alone["routing"]["load"]
        assert found["routing"]["prototypes_used"] == pytest.approx(alone["routing"]["prototypes_used"], rel=1e-5)
        assert found["miou"] == pytest.approx(alone["miou"], abs=0.01)
        assert found["miou_ideal"] == pytest.approx(alone["miou_ideal"], abs=0.01)


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    files = [checkpoint / "cloud.safetensors", *(checkpoint / "experts").iterdir()]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("scores", "best"), [((10, 30, 20, 25, 15), 2), ((10, 30, 20, 40, 15), 4), ((10, 30, 20, 30, 31), 5)]
)
def test_the_best_epoch_is_kept_with_its_score_also_by_a_resumed_run(scored, tmp_path, monkeypatch, scores, best):
    """Which epoch is best is told to the run; three epochs, then two more in a run that resumes."""
    config, _ = scored
    given, kept = iter(scores), []
    monkeypatch.setattr(
        "airmoe_ray.training.run.validate", lambda *a, **kw: validate(*a, **kw) | {"miou": float(next(given))}
    )

    def keep(row: dict[str, Any]) -> None:
        kept.append(weights_of(tmp_path / "run" / "checkpoint"))

    for epochs, resume in ((3, False), (5, True)):
        longer = small(tmp_path, **{"train.epochs": epochs, "data.cache_dir": config.data.cache_dir})
        summary = train_run(longer, tmp_path / "run", resume=resume, after_epoch=keep)
    assert [row["miou"] for row in rows_of(tmp_path / "run")] == list(scores)
    assert summary["best"] == {"epoch": best, "miou": scores[best - 1]}
    found = weights_of(tmp_path / "run" / "checkpoint-best")
    assert [found == weights for weights in kept] == [epoch == best for epoch in range(1, 6)]


def test_a_disk_too_small_for_the_checkpoints_is_told_before_any_feature_is_computed(tmp_path, monkeypatch):
    config = small(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=100_000))
    with pytest.raises(UserError, match=r"checkpoints need \d+ MB, 0 MB are free"):
        train_run(config, tmp_path / "run")
    assert not (tmp_path / "cache").exists()


def test_the_estimate_of_a_checkpoint_is_its_size(scored):
    config, run = scored
    model = Segmenter.load(run / "checkpoint").model
    expected = trainable_bytes(config, feature_dim=model.query.linear.in_features, classes=10)
    files = [run / "checkpoint" / "cloud.safetensors", *(run / "checkpoint" / "experts").iterdir()]
    weights = sum(file.stat().st_size for file in files)
    moments = (run / "checkpoint" / "trainer" / "optimizer.safetensors").stat().st_size
    assert expected == pytest.approx(weights, rel=0.15)  # small files: names take a part
    assert expected == pytest.approx(moments / 2, rel=0.15)


def test_the_curves_of_tensorboard_are_the_rows_of_the_log(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs, resume in ((2, False), (3, True)):
        config = small(tmp_path, **{"train.tensorboard": True, "train.epochs": epochs, "train.schedule": "constant"})
        train_run(config, tmp_path / "run", resume=resume)
    curves = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rows = rows_of(tmp_path / "run")
    for name in ("loss", "miou", "miou_ideal"):
        points = [(point.step, point.value) for point in curves.Scalars(name)]
        assert points == [(row["epoch"], pytest.approx(row[name])) for row in rows]
    assert [point.value for point in curves.Scalars("load/4")] == pytest.approx([row["load"][4] for row in rows])


def test_a_missing_tensorboard_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"airmoe-ray\[tensorboard\]"):
        train_run(small(tmp_path, **{"train.tensorboard": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_blocks_show_idle_fair_and_overloaded_experts():
    assert load_blocks([0.0, 1.0, 1.0, 2.0, 9.0]) == "▁▄▄██"
    assert load_blocks([0.5] * 50 + [1.5] * 50) == "0.50-1.50"


def test_times_read_like_a_clock():
    assert [clock(s) for s in (0.4, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]

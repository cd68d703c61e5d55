"""Whole runs in small: what train writes, what eval prints, and that a run repeats bit for bit."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from airmoe_ray.data import open_dataset
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features
from airmoe_ray.features.sources import OnlineSource
from airmoe_ray.inference.evaluate import evaluate
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.inference.validate import validate
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.training.run import train_run
from tests.airmoe_ray.training.tiny_runs import airmoe, tiny_config


def test_train_writes_what_it_promises(trained):
    run = trained / "runs" / "quickstart"
    assert {path.name for path in run.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "summary.json", "checkpoint", "checkpoint-best")
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and 0 <= row["miou"] <= 100 for row in rows)


def test_eval_prints_the_json_it_promises_and_draws_a_picture(trained):
    result = airmoe("eval", "--json", "--pictures", "sheet.png", cwd=trained)
    assert result.code == 0, result.err
    scores = json.loads(result.out)
    assert {"miou", "mf1", "mpre", "mrec", "per_class", "per_domain", "routing"} <= scores.keys()
    assert len(scores["per_class"]) == 10
    assert set(scores["per_domain"]) == {"clear", "fog", "rain", "night", "snow"}
    assert len(scores["routing"]["load"]) == 5
    assert sum(scores["routing"]["load"]) == pytest.approx(5, abs=0.01)
    with Image.open(trained / "sheet.png") as sheet:
        assert min(sheet.size) > 500


def test_the_channel_can_be_changed_at_evaluation(trained):
    def nmse_db(*sets: str) -> float | None:
        result = airmoe("eval", "--json", *(part for s in sets for part in ("--set", s)), cwd=trained)
        return json.loads(result.out)["routing"]["nmse_db"]

    good, bad = nmse_db("channel.snr_db=30"), nmse_db("channel.snr_db=10")
    assert bad - good == pytest.approx(20, abs=0.01)  # the same draws, noise power up by 20 dB
    assert nmse_db("channel.kind=ideal") is None


def test_training_again_gives_the_same_model_bit_for_bit(tmp_path):
    config = tiny_config(tmp_path)
    for name in ("a", "b"):
        train_run(config, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "checkpoint").rglob("*.safetensors"))
    assert len(files) == 1 + 5 + 1
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_training_leaves_the_backbone_bit_identical(tmp_path):
    config = tiny_config(tmp_path)
    before = load_backbone(config.backbone).fingerprint
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    assert segmenter.backbone.fingerprint == segmenter.card.backbone_fingerprint == before
    assert not any(parameter.requires_grad for parameter in segmenter.backbone.parameters())


def test_cached_features_score_like_the_whole_way_from_the_image(tmp_path):
    config = tiny_config(tmp_path, **{"data.cache_dtype": "float32"})
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    dataset = open_dataset(config.data, "val")
    cache = cached_features(dataset, segmenter.backbone, config, "identity")
    direct, cached = evaluate(segmenter, dataset), validate(segmenter.model, cache, dataset)
    assert cached["miou"] == pytest.approx(direct["miou"], abs=0.01)  # a pixel or two may tie
    assert cached["routing"]["load"] == direct["routing"]["load"]


def test_the_backbone_in_the_loop_sees_new_views_and_replays(tmp_path):
    config = tiny_config(tmp_path, **{"train.cache": False})
    source = OnlineSource(open_dataset(config.data, "train"), load_backbone(config.backbone), config)
    first, again, later = (source.batch(epoch, [3, 7])[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, later)
    train_run(config, tmp_path / "run")


def test_shared_epochs_hand_one_expert_to_every_client(tmp_path):
    more = {"train.warm_start.shared_epochs": 2, "experts.shared": False}
    train_run(tiny_config(tmp_path, **more), tmp_path / "run")
    experts = Segmenter.load(tmp_path / "run" / "checkpoint").model.clients.experts
    for name, value in experts[0].state_dict().items():
        assert all(torch.equal(value, expert.state_dict()[name]) for expert in experts), name


class Second(OneWorker):
    """A worker that is not the first, for once without the others."""

    rank, size = 1, 2


def test_only_the_first_worker_writes_to_the_folder(tmp_path):
    config = tiny_config(tmp_path, **{"train.epochs": 1})
    train_run(config, tmp_path / "run")
    more = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))}
    train_run(more, tmp_path / "run", resume=True, workers=Second())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))} == before
    train_run(config, tmp_path / "other", workers=Second())
    assert not (tmp_path / "other").exists()

"""The shipped CamVid configurations on real images, in small: a few frames, one epoch, another folder to score."""

import json
from pathlib import Path

import pytest
import torch

from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.evaluation import evaluate
from airmoe_ray.inference import Segmenter
from airmoe_ray.run import train_run


def folder_of(camvid: Path, target: Path, frames: slice) -> Path:
    """A flat CamVid folder of links to some frames."""
    for part in ("images", "labels"):
        (target / part).mkdir(parents=True)
        for path in sorted((camvid / part).iterdir())[frames]:
            (target / part / path.name).symlink_to(path)
    return target


def small(name: str, root: Path, cache: Path, *more: str):
    settings = [f"data.root={root}", f"data.cache_dir={cache}", "train.epochs=2", "train.warm_start.shared_epochs=1"]
    return load_config(name, [*settings, "experts.count=4", "routing.top_k=2", "data.image_size=240", *more])


def test_the_offline_configuration_trains_on_one_folder_and_scores_every_pair_of_another(camvid, tmp_path):
    config = small("camvid-offline", folder_of(camvid, tmp_path / "a", slice(0, 600, 40)), tmp_path / "cache")
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    other = folder_of(camvid, tmp_path / "b", slice(5, 600, 60))
    scores = evaluate(segmenter, open_dataset(config.data.model_copy(update={"root": str(other)}), "test"))
    assert scores["images"] == 10
    assert scores["per_class"]["road"]["iou"] > 30  # 15 frames and a minute of learning know a road
    assert set(scores["per_domain"]) == {"0001TP", "0006R0", "0016E5", "Seq05VD"}
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "miou" not in row  # no images were held out, so none are scored during training


def test_the_vit_configuration_takes_its_weights_from_a_file(camvid, tmp_path):
    import timm  # not before our own modules: they make torchvision importable

    name = "vit_tiny_patch16_224"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(timm.create_model(name).state_dict(), tmp_path / "vit.pth")
    root = folder_of(camvid, tmp_path / "a", slice(0, 600, 75))
    weights = (f"backbone.name={name}", f"backbone.weights={tmp_path / 'vit.pth'}")
    config = small("camvid-vit", root, tmp_path / "cache", *weights, "experts.hidden=32", "experts.width=16")
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    assert segmenter.card.feature_dim == 192
    assert evaluate(segmenter, open_dataset(config.data, "test"))["images"] == 8


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_validation_runs_only_on_held_out_images(camvid, tmp_path, fraction):
    root = folder_of(camvid, tmp_path / "a", slice(0, 600, 50))
    settings = (f"data.val_fraction={fraction}", "experts.hidden=16", "experts.width=16", "train.epochs=1")
    config = small("camvid-offline", root, tmp_path / "cache", *settings)
    assert ("miou" in train_run(config, tmp_path / "run")["last"]) == (fraction > 0)

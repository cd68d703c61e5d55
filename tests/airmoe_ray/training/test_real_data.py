"""The shipped CamVid configurations on real images, in small: a few frames, few epochs, another folder to score."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from airmoe_ray.config_file import load_config
from airmoe_ray.data import SegmentationDataset, open_dataset
from airmoe_ray.data.base import IGNORE
from airmoe_ray.inference.evaluate import evaluate
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.training.run import train_run


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


def scores_of_blind_guesses(known: SegmentationDataset, asked: SegmentationDataset) -> dict[str, float]:
    """IoU per class of the most frequent label at each place, which is all one can know without looking at an image."""
    labels, truth = (np.stack([data[i].label for i in range(len(data))]) for data in (known, asked))
    names = known.classes.names
    guess = np.stack([(labels == c).mean(axis=0) for c in range(len(names))]).argmax(axis=0)
    guess = np.where(truth == IGNORE, IGNORE, guess)
    pairs = {name: (guess == c, truth == c) for c, name in enumerate(names)}
    return {name: 100 * float((a & b).sum() / max((a | b).sum(), 1)) for name, (a, b) in pairs.items()}


def test_the_offline_configuration_trains_on_one_folder_and_scores_every_pair_of_another(camvid, tmp_path):
    root, longer = folder_of(camvid, tmp_path / "a", slice(0, 600, 40)), ("train.epochs=8", "train.lr=0.002")
    config = small("camvid-offline", root, tmp_path / "cache", *longer)
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    other = folder_of(camvid, tmp_path / "b", slice(5, 600, 60))
    asked = open_dataset(config.data.model_copy(update={"root": str(other)}), "test")
    scores = evaluate(segmenter, asked)
    assert scores["images"] == 10
    # 15 frames and a few seconds of learning see what is there, and not only where it mostly is.
    # Seeds 0-4: mIoU 25.2-29.1, cars 37.0-48.4; guesses: mIoU 18.2, cars 6.5, road 75.6 (road everywhere: 30.8)
    guesses = scores_of_blind_guesses(open_dataset(config.data, "train"), asked)
    assert scores["miou"] > np.mean(list(guesses.values())) + 3
    assert scores["per_class"]["car"]["iou"] > guesses["car"] + 20
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

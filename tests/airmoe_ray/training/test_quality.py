"""Whole training runs that must reach a quality: minutes, not seconds."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from airmoe_ray.config import BackboneConfig
from airmoe_ray.config_file import load_config
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.training.run import train_run

pytestmark = pytest.mark.slow


def miou(tmp_path: Path, name: str, *more: str) -> float:
    settings = ["data.train_count=120", "data.val_count=60", f"data.cache_dir={tmp_path / 'cache'}", *more]
    return float(train_run(load_config("quickstart-single-head", settings), tmp_path / name)["last"]["miou"])


def test_a_random_backbone_costs_at_least_five_points(tmp_path):
    random = load_backbone(BackboneConfig(), random_init_seed=1)
    save_file(random.body.vit.state_dict(), tmp_path / "random.safetensors")
    learned = miou(tmp_path, "learned")
    unlearned = miou(tmp_path, "unlearned", f"backbone.weights={tmp_path / 'random.safetensors'}")
    assert learned - unlearned >= 5

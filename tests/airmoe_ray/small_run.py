"""A run folder of a few untrained experts on the embedded backbone, made in a moment."""

from dataclasses import replace
from pathlib import Path

from airmoe_ray.config_file import load_config
from airmoe_ray.data.scenes import CLASSES
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.checkpoint import save_checkpoint
from airmoe_ray.training.run import model_card

KNOWS = ["night drawings", "rain", "fog", "sunny drives"]
SIZES = ("experts.count=4", "experts.hidden=16", "experts.width=16", "routing.top_k=2", "data.image_size=64")


def small_run(folder: Path, *overrides: str) -> Path:
    """Four experts, K = 2, on 64-pixel images, with a head at the cloud; weights follow from the seed."""
    config = load_config("quickstart", [*SIZES, "train.threads=1", *overrides])
    backbone, dilations = load_backbone(config.backbone), (2, 4, 8)
    card = replace(model_card(CLASSES, backbone, dilations), clients=KNOWS)
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(CLASSES.names), dilations=dilations)
    save_checkpoint(folder / "checkpoint", model, card)
    return folder

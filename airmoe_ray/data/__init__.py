"""Datasets by name: procedural scenes and readers of the public layouts."""

from pathlib import Path

from airmoe_ray.config import DataConfig
from airmoe_ray.data.apolloscape import ApolloScape
from airmoe_ray.data.base import IGNORE, ClassTable, Sample, SegmentationDataset
from airmoe_ray.data.camvid import CamVid
from airmoe_ray.data.carla_adv import CarlaAdv
from airmoe_ray.data.cityscapes import Cityscapes
from airmoe_ray.data.files import check_split
from airmoe_ray.data.folder import Folder
from airmoe_ray.data.scenes import Scenes
from airmoe_ray.errors import DataError, MissingFolderError

# Disjoint index ranges of the procedural scenes; pretraining of the embedded backbone starts at 1 000 000.
SCENE_START: dict[str, int] = {"train": 0, "val": 400_000, "test": 500_000}

_READERS = {
    "camvid": CamVid,
    "cityscapes": Cityscapes,
    "apolloscape": ApolloScape,
    "carla_adv": CarlaAdv,
    "folder": Folder,
}

__all__ = ["IGNORE", "SCENE_START", "ClassTable", "Sample", "SegmentationDataset", "held_out", "open_dataset"]


def open_dataset(config: DataConfig, split: str) -> SegmentationDataset:
    """The dataset that `config` names; checks its folders, decodes nothing yet."""
    check_split(split, config.val_fraction)
    if config.name == "scenes":
        if split == "all":
            raise DataError("data.name: scenes has the splits train, val and test; 'all' would be endless")
        count = config.train_count if split == "train" else config.val_count
        height, width = config.image_size * 3 // 4, config.image_size
        return Scenes(SCENE_START[split], count, height=height, width=width)
    if config.root is None:
        raise DataError(f"data.name: {config.name} needs its folder; add --set data.root=DIR")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        raise DataError(f"data.root: {root} is not a folder; give the folder that holds the {config.name} dataset")
    return _READERS[config.name](root, split, val_fraction=config.val_fraction)


def held_out(config: DataConfig, train: SegmentationDataset) -> SegmentationDataset | None:
    """The validation split; None where there is none, or where it would be the training images again."""
    try:
        val = open_dataset(config, "val")
    except MissingFolderError:
        return None
    return None if val[0].name == train[0].name else val

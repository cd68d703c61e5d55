"""Datasets by name: procedural scenes, readers of the public layouts, and mixes of several."""

from pathlib import Path

from airmoe_ray.config import DataConfig, PartConfig
from airmoe_ray.data.apolloscape import ApolloScape
from airmoe_ray.data.base import IGNORE, ClassTable, Sample, SegmentationDataset, by_domain
from airmoe_ray.data.camvid import open_camvid
from airmoe_ray.data.carla_adv import CarlaAdv
from airmoe_ray.data.cityscapes import Cityscapes
from airmoe_ray.data.class_map import STREET, map_classes
from airmoe_ray.data.files import check_split
from airmoe_ray.data.folder import Folder, made_up_colour
from airmoe_ray.data.labelme import LabelMe
from airmoe_ray.data.mix import Mix, Part, adopt, check_mix
from airmoe_ray.data.scenes import Scenes
from airmoe_ray.errors import DataError, MissingFolderError

# Disjoint index ranges of the procedural scenes; pretraining of the embedded backbone starts at 1 000 000.
SCENE_START: dict[str, int] = {"train": 0, "val": 400_000, "test": 500_000}

_READERS = {
    "cityscapes": Cityscapes,
    "apolloscape": ApolloScape,
    "carla_adv": CarlaAdv,
    "labelme": LabelMe,
    "folder": Folder,
}

__all__ = ["IGNORE", "SCENE_START", "ClassTable", "Sample", "SegmentationDataset", "adopt", "held_out", "open_dataset"]


def open_dataset(config: DataConfig, split: str) -> SegmentationDataset:
    """The dataset that `config` names; checks its folders, decodes nothing yet."""
    check_split(split, config.val_fraction)
    if config.name == "mix":
        return _open_mix(config, split)
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
    if config.name == "camvid":
        return open_camvid(root, split, config)
    return _READERS[config.name](root, split, val_fraction=config.val_fraction)


def _open_mix(config: DataConfig, split: str) -> Mix:
    """The parts' own splits; as `val` and `test`, what the parts hold out: nothing that was trained on."""
    if not config.parts:
        raise DataError("data.name: mix needs its datasets; list them in data.parts, such as [{name: scenes}]")
    names = tuple(config.classes) or STREET.names
    colours = dict(zip(STREET.names, STREET.palette, strict=True))
    common = ClassTable(names, tuple(colours.get(name, made_up_colour(i)) for i, name in enumerate(names)))
    unseen = split in ("val", "test")
    parts: list[Part] = []
    kept: list[int] = []
    for p, part in enumerate(config.parts):
        title, settings = part.title or part.name, _settings_of(part, config)
        try:
            dataset = open_dataset(settings, _source_split(part, "train" if unseen else split))
            if unseen and (held := _held_out_of(part, settings, dataset, split)) is not None:
                dataset, kept = held, [*kept, p]
            elif split == "train" and part.hold_out:
                dataset = by_domain(dataset, part.hold_out, inside=False)
        except DataError as error:
            raise type(error)(f"data.parts, {title}: {error}") from error
        meaning = map_classes(dataset.classes, common, given=part.map, source=f"data.parts, {title}")
        parts.append(Part(title, dataset, meaning, share=part.share, words=part.words))
    check_mix(parts, common)
    whole = Mix(parts, common)
    if unseen and not kept:
        raise MissingFolderError(
            "data.parts: no part holds images out; data.val_fraction holds some out of each, "
            "and --split train scores what was trained on"
        )
    return whole.restricted(kept) if unseen else whole


def _source_split(part: PartConfig, split: str) -> str:
    """What a part is cut from: LabelMeFacade's two lists divide each place, so both where places are held out."""
    return "all" if part.name == "labelme" and part.hold_out else split


def _held_out_of(
    part: PartConfig, settings: DataConfig, train: SegmentationDataset, split: str
) -> SegmentationDataset | None:
    """What a part keeps for validation or test: the domains that it names, or what the dataset holds out by itself."""
    return by_domain(train, part.hold_out, inside=True) if part.hold_out else held_out(settings, train, split)


def _settings_of(part: PartConfig, config: DataConfig) -> DataConfig:
    """Of a part as a dataset by itself."""
    root = part.root
    if root is not None and config.root is not None:
        root = str(Path(config.root).expanduser() / Path(root).expanduser())
    return config.model_copy(update={"name": part.name, "root": root, "parts": [], "classes": []})


def held_out(config: DataConfig, train: SegmentationDataset, split: str = "val") -> SegmentationDataset | None:
    """The validation or test split; None where there is none, or where it would be the training images again."""
    try:
        held = open_dataset(config, split)
    except MissingFolderError:
        return None
    return None if held[0].name == train[0].name else held

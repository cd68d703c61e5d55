"""CARLA_ADV: the CARLA simulator in adverse weather, its 23 semantic tags as classes."""

from pathlib import Path

from airmoe_ray.data.base import ClassTable
from airmoe_ray.data.files import (
    Pair,
    PairDataset,
    check_split,
    class_ids,
    hold_out,
    list_images,
    pair_folders,
    require_folder,
    split_folder,
)

# Tags of CARLA 0.9.10 to 0.9.13 in order of id, in the colours of its CityScapesPalette. Later versions renumbered.
_TAGS = (
    ("none", (0, 0, 0)),
    ("building", (70, 70, 70)),
    ("fence", (100, 40, 40)),
    ("other", (55, 90, 80)),
    ("pedestrian", (220, 20, 60)),
    ("pole", (153, 153, 153)),
    ("road_line", (157, 234, 50)),
    ("road", (128, 64, 128)),
    ("sidewalk", (244, 35, 232)),
    ("vegetation", (107, 142, 35)),
    ("vehicle", (0, 0, 142)),
    ("wall", (102, 102, 156)),
    ("traffic_sign", (220, 220, 0)),
    ("sky", (70, 130, 180)),
    ("ground", (81, 0, 81)),
    ("bridge", (150, 100, 100)),
    ("rail_track", (230, 150, 140)),
    ("guard_rail", (180, 165, 180)),
    ("traffic_light", (250, 170, 30)),
    ("static", (110, 190, 160)),
    ("dynamic", (170, 120, 50)),
    ("water", (45, 60, 150)),
    ("terrain", (145, 170, 100)),
)
CLASSES = ClassTable(names=tuple(name for name, _ in _TAGS), palette=tuple(colour for _, colour in _TAGS))


class CarlaAdv(PairDataset):
    """`{split}/{weather}/rgb/*.png` with `{split}/{weather}/semantic/*.png`, or `images/ labels/` with `{weather}/`.

    The paper's files are not published; this layout and the tag table are our reading of its "23 classes". The label
    is the raw tag in the red channel, as CARLA's camera writes it, or an 8-bit greyscale PNG. A domain is a weather.
    A set with only one of `val/` and `test/` uses it for both. `val_fraction` concerns the flat layout alone.
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0) -> None:
        check_split(split, val_fraction)
        if (root / "images").is_dir():
            pairs = hold_out(pair_folders(root / "images", root / "labels"), split=split, val_fraction=val_fraction)
        elif split == "all":
            require_folder(root, expected="train, val and test, or images and labels")
            pairs = [pair for part in ("train", "val", "test") for pair in _weathers(root / part)]
        else:
            pairs = _weathers(split_folder(root, split, expected="{weather}/rgb and {weather}/semantic"))
        super().__init__(
            root,
            pairs,
            split=split,
            val_fraction=val_fraction,
            classes=CLASSES,
            ids=class_ids(len(_TAGS)),
            channel="red",
        )


def _weathers(part: Path) -> list[Pair]:
    pairs = []
    for images in sorted(part.glob("*/rgb")):
        weather = images.parent.name
        labels = require_folder(images.with_name("semantic"), expected="the tag images (*.png)")
        for image in list_images(images):
            label = labels / image.relative_to(images).with_name(f"{image.stem}.png")
            # Frames are numbered anew in every split and weather.
            name = f"{part.name}_{weather}_{image.stem}"
            pairs.append(Pair(image, label, name, domain=weather, sequence=weather))
    return pairs

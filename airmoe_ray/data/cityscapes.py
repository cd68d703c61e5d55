"""Cityscapes: street scenes of 50 cities, the 19 classes of its benchmark (Cordts et al. 2016)."""

from pathlib import Path

from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.data.files import Pair, PairDataset, check_split, class_ids, list_images, require_folder

CLASSES = ClassTable(
    names=(
        "road",
        "sidewalk",
        "building",
        "wall",
        "fence",
        "pole",
        "traffic_light",
        "traffic_sign",
        "vegetation",
        "terrain",
        "sky",
        "person",
        "rider",
        "car",
        "truck",
        "bus",
        "train",
        "motorcycle",
        "bicycle",
    ),
    palette=(
        (128, 64, 128),
        (244, 35, 232),
        (70, 70, 70),
        (102, 102, 156),
        (190, 153, 153),
        (153, 153, 153),
        (250, 170, 30),
        (220, 220, 0),
        (107, 142, 35),
        (152, 251, 152),
        (70, 130, 180),
        (220, 20, 60),
        (255, 0, 0),
        (0, 0, 142),
        (0, 0, 70),
        (0, 60, 100),
        (0, 80, 100),
        (0, 0, 230),
        (119, 11, 32),
    ),
)

# The `labelIds` of the 19 classes, in class order; every other id up to 33 is void in the benchmark.
_LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_LAST_LABEL_ID = 33


class Cityscapes(PairDataset):
    """`leftImg8bit/{split}/{city}/*_leftImg8bit.png` with `gtFine/{split}/{city}/*_gtFine_labelTrainIds.png`.

    Where no `labelTrainIds` were made, the `labelIds` that come with the download are mapped. The labels of the test
    split are not public (its files hold void only), so "test" reads "val"; "all" is train and val. A domain is a city.
    `val_fraction` has no effect: the split is the published one.
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0) -> None:
        check_split(split, val_fraction)
        parts = ("train", "val") if split == "all" else ("val",) if split == "test" else (split,)
        ready = any(file for part in parts for file in (root / "gtFine" / part).glob("*/*_gtFine_labelTrainIds.png"))
        suffix = "labelTrainIds" if ready else "labelIds"
        super().__init__(
            root,
            [pair for part in parts for pair in _pairs(root, part, suffix)],
            split=split,
            val_fraction=val_fraction,
            classes=CLASSES,
            ids=class_ids(len(CLASSES.names)) if ready else _label_ids(),
        )


def _pairs(root: Path, part: str, suffix: str) -> list[Pair]:
    images = require_folder(root / "leftImg8bit" / part, expected="{city}/*_leftImg8bit.png")
    labels = require_folder(root / "gtFine" / part, expected=f"{{city}}/*_gtFine_{suffix}.png")
    pairs = []
    for image in list_images(images):
        city = image.parent.name
        frame = image.stem.removesuffix("_leftImg8bit")
        pairs.append(Pair(image, labels / city / f"{frame}_gtFine_{suffix}.png", frame, domain=city, sequence=city))
    return pairs


def _label_ids() -> dict[int, int]:
    ids = dict.fromkeys((*range(_LAST_LABEL_ID + 1), IGNORE), IGNORE)
    return {**ids, **{label_id: i for i, label_id in enumerate(_LABEL_IDS)}}

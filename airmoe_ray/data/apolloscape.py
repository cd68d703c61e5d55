"""ApolloScape scene parsing: Chinese city roads (Huang et al. 2018)."""

from pathlib import Path

from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.data.files import Pair, PairDataset, check_split, hold_out, list_images, pair_folders, require_folder
from airmoe_ray.errors import DataError

# (class, id in `_bin.png`, colour) in the order of the official train ids, then `others`.
_CLASSES = (
    ("sky", 17, (70, 130, 180)),
    ("car", 33, (0, 0, 142)),
    ("motorbicycle", 34, (0, 0, 230)),
    ("bicycle", 35, (119, 11, 32)),
    ("person", 36, (0, 128, 192)),
    ("rider", 37, (128, 64, 128)),
    ("truck", 38, (128, 0, 192)),
    ("bus", 39, (192, 0, 64)),
    ("tricycle", 40, (128, 128, 192)),
    ("road", 49, (192, 128, 192)),
    ("sidewalk", 50, (192, 128, 64)),
    ("traffic_cone", 65, (255, 128, 64)),
    ("road_pile", 66, (0, 0, 192)),
    ("fence", 67, (64, 64, 128)),
    ("traffic_light", 81, (192, 64, 128)),
    ("pole", 82, (192, 128, 128)),
    ("traffic_sign", 83, (0, 64, 64)),
    ("wall", 84, (192, 192, 128)),
    ("dustbin", 85, (64, 0, 192)),
    ("billboard", 86, (192, 0, 192)),
    ("building", 97, (192, 0, 128)),
    ("vegetation", 113, (128, 128, 64)),
    ("others", 0, (0, 0, 0)),
)
CLASSES = ClassTable(names=tuple(c[0] for c in _CLASSES), palette=tuple(c[2] for c in _CLASSES))

_GROUP_OFFSET = 128  # a crowd of movable objects (ids 33..40) has their id plus this, and is the same class
_VOID = (1, 98, 99, 100, 255)  # rover (the recording car), bridge, tunnel, overpass, unlabelled


class ApolloScape(PairDataset):
    """`road*/ColorImage/Record*/Camera */*.jpg` with `road*/Label/Record*/Camera */*_bin.png`, or `images/ labels/`.

    Our reading of "23 classes": the benchmark's 22, with its train ids, and `others` as the last. The paper's subset
    (854/400) is not published. The official lists (`road*_train.lst`, `road*_val.lst`: image, tab, label), beside the
    road folders or in `public_image_lists/`, make the splits when present; test labels are not public, so "test" then
    reads "val". Without lists, `val_fraction` of every recording is held out. A domain is a road.
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0) -> None:
        check_split(split, val_fraction)
        require_folder(root, expected="road*/ColorImage and road*/Label, or images and labels")
        parts = ("train", "val") if split == "all" else ("val",) if split == "test" else (split,)
        if (root / "images").is_dir():
            pairs = hold_out(pair_folders(root / "images", root / "labels"), split=split, val_fraction=val_fraction)
        elif _lists(root, "train") or _lists(root, "val"):
            pairs = [pair for part in parts for path in _lists(root, part) for pair in _listed(root, path)]
        else:
            pairs = hold_out(_recorded(root), split=split, val_fraction=val_fraction)
        super().__init__(root, pairs, split=split, val_fraction=val_fraction, classes=CLASSES, ids=_ids())


def _lists(root: Path, part: str) -> list[Path]:
    return sorted((*root.glob(f"*_{part}.lst"), *root.glob(f"public_image_lists/*_{part}.lst")))


def _listed(root: Path, path: Path) -> list[Pair]:
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.strip().split("\t")
        if len(fields) != 2:
            raise DataError(f"{path}:{number}: {line.strip()!r}; expected an image path, a tab and a label path")
        image = root / fields[0]
        if not image.is_file():
            raise DataError(f"{image}: missing; {path.name} lists it: fetch that road or shorten the list")
        pairs.append(_pair(root, image, root / fields[1]))
    return pairs


def _recorded(root: Path) -> list[Pair]:
    pairs = []
    for images in sorted(root.glob("*/ColorImage")):
        labels = require_folder(images.with_name("Label"), expected="Record*/Camera */*_bin.png")
        for image in list_images(images):
            label = labels / image.relative_to(images).with_name(f"{image.stem}_bin.png")
            pairs.append(_pair(root, image, label))
    return pairs


def _pair(root: Path, image: Path, label: Path) -> Pair:
    inner = image.relative_to(root)
    road = inner.parts[0]
    return Pair(image, label, f"{road}_{image.stem}", domain=road, sequence=inner.parent.as_posix())


def _ids() -> dict[int, int]:
    ids = dict.fromkeys(_VOID, IGNORE)
    for i, (_, label_id, _) in enumerate(_CLASSES):
        ids[label_id] = i
        if 33 <= label_id <= 40:
            ids[label_id + _GROUP_OFFSET] = i
    return ids

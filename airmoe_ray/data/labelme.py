"""LabelMeFacade: street photographs of many places from LabelMe (Froehlich, Rodner and Denzler 2010)."""

import re
from pathlib import Path

import numpy as np

from airmoe_ray.data.base import IGNORE, ClassTable, UInt8Array
from airmoe_ray.data.files import Pair, PairDataset, check_split, class_ids, decode, hold_out, list_images, pair_folders
from airmoe_ray.data.folder import find_classes, read_classes
from airmoe_ray.errors import DataError

CLASSES = ClassTable(
    names=("sky", "building", "road", "sidewalk", "vegetation", "car"),
    palette=((0, 128, 128), (128, 0, 0), (128, 64, 0), (128, 128, 128), (0, 128, 0), (128, 0, 128)),
)
# the nine colours of its label files; windows and doors are parts of buildings
_COLOURS = {
    (0, 0, 0): IGNORE,
    (128, 0, 0): 1,
    (128, 0, 128): 5,
    (128, 128, 0): 1,
    (128, 128, 128): 3,
    (128, 64, 0): 2,
    (0, 128, 128): 0,
    (0, 128, 0): 4,
    (0, 0, 128): 1,
}
# The places of its collections, by what the file's name says: the first that fits, so towns go before the island they
# are on. Collections that say no place, or one of a few photographs, are `elsewhere`.
_PLACES = (
    ("puigpunyent", "puigpunyent"),
    ("palma", "palma"),
    ("mallorca", "mallorca"),
    ("cambridge_uk", "cambridge_uk"),
    ("cambridge", "cambridge"),
    ("boston", "boston"),
    ("spatial_envelope", "spatial_envelope"),
    ("bay_area", "bay_area"),
    ("dartmouth", "dartmouth"),
    ("davis", "davis"),
    ("harvard", "harvard"),
    ("kendall", "kendall"),
    ("montana", "montana"),
    ("porter", "porter"),
    (r"saxena|^img-.*-p-\d+t\d+$", "saxena"),
)
ELSEWHERE = "elsewhere"


class LabelMe(PairDataset):
    """`images/*.jpg`, `labels/*.png` in nine colours, `train.txt`, `test.txt`; or sorted by place, like `folder`.

    The second layout, `images/PLACE/`, `labels/PLACE/` with class ids and `classes.json`, has no splits of its own:
    `val_fraction` holds out the end of each place. A domain is a place.
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0) -> None:
        check_split(split, val_fraction)
        self._coloured = not (root / "classes.json").is_file()
        if self._coloured:
            classes, ids, pairs = CLASSES, class_ids(len(CLASSES.names)), _listed(root, split)
        else:
            classes, ids = read_classes(find_classes(root))
            pairs = hold_out(pair_folders(root / "images", root / "labels"), split=split, val_fraction=val_fraction)
        super().__init__(root, pairs, split=split, val_fraction=val_fraction, classes=classes, ids=ids)

    def read_label(self, path: Path) -> UInt8Array:
        """Class ids of a label file, from ids or from colours."""
        return _from_colours(path) if self._coloured else super().read_label(path)


def place_of(stem: str) -> str:
    """The place that a file's name tells: `05june05_static_street_boston__p1010736` is of boston."""
    return next((place for words, place in _PLACES if re.search(words, stem.lower())), ELSEWHERE)


def _listed(root: Path, split: str) -> list[Pair]:
    """Pairs that the split's list names; `val` is the test list, `all` both."""
    images = {image.stem: image for image in list_images(root / "images")}
    lists = {"train": ("train",), "val": ("test",), "test": ("test",), "all": ("train", "test")}[split]
    pairs = []
    for name in lists:
        path = root / f"{name}.txt"
        try:
            entries = path.read_text().split()
        except OSError:
            raise DataError(f"{path}: missing; expected the names of the {name} images, one a line") from None
        for entry in entries:
            stem = Path(entry).name.removesuffix(".jpg").removesuffix(".png")
            if stem not in images:
                raise DataError(f"{path}: names {entry!r}, and there is no such image in {root / 'images'}")
            place = place_of(stem)
            pairs.append(Pair(images[stem], root / "labels" / f"{stem}.png", stem, domain=place, sequence=place))
    return pairs


def _from_colours(path: Path) -> UInt8Array:
    pixels = np.asarray(decode(path, "a label").convert("RGB"), dtype=np.int32)
    codes = (pixels[..., 0] << 16) | (pixels[..., 1] << 8) | pixels[..., 2]
    label = np.full(codes.shape, 254, dtype=np.uint8)
    for (red, green, blue), value in _COLOURS.items():
        label[codes == (red << 16 | green << 8 | blue)] = value
    if (label == 254).any():
        y, x = np.argwhere(label == 254)[0]
        raise DataError(f"{path}: colour {tuple(pixels[y, x].tolist())} at ({x}, {y}) is none of LabelMeFacade's nine")
    return label

"""Any folder of images and labels, with a file that names the classes."""

import colorsys
import json
from pathlib import Path

import yaml

from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.data.class_map import VOID
from airmoe_ray.data.files import Pair, PairDataset, check_split, class_ids, hold_out, pair_folders, split_folder
from airmoe_ray.errors import DataError

_CLASS_FILES = ("classes.json", "classes.yaml", "classes.yml", "classes.txt")
_FORMS = "a list of names, or of {name: road, color: [128, 64, 128]}, or {road: 0, sky: 1}"
_GOLDEN_RATIO = 0.618034


class Folder(PairDataset):
    """`images/ labels/`, or `{split}/images {split}/labels`, with `classes.json`, `.yaml` or `.txt` beside them.

    Labels are 8-bit PNGs of class ids 0..C-1 in the order of the classes file; 255 is void, and so is a class that is
    called void. The file is a list of names, or of `{name, color}`, or says the ids, `{road: 0, sky: 1}`; as text, a
    line each, `name` or `name, r, g, b`. Colours are made up when absent.
    Sub-folders of `images/` are domains and sequences. `val_fraction` concerns the layout without splits alone.
    """

    def __init__(self, root: Path, split: str, *, val_fraction: float = 0.0, classes_file: Path | None = None) -> None:
        check_split(split, val_fraction)
        listed = classes_file or find_classes(root)
        classes, ids = read_classes(listed)
        if (root / "images").is_dir():
            pairs = hold_out(pair_folders(root / "images", root / "labels"), split=split, val_fraction=val_fraction)
        elif split == "all":
            parts = [root / part for part in ("train", "val", "test") if (root / part).is_dir()]
            pairs = [pair for part in parts for pair in _part_pairs(part)]
        else:
            pairs = _part_pairs(split_folder(root, split, expected="images and labels"))
        super().__init__(
            root,
            pairs,
            split=split,
            val_fraction=val_fraction,
            classes=classes,
            ids=ids,
            advice=void_advice(listed),
        )
        if ids != class_ids(len(classes.names)):
            self._settings = (*self._settings, sorted(ids.items()))


def read_classes(path: Path) -> tuple[ClassTable, dict[int, int]]:
    """The classes named in a `.json`, `.yaml` or `.txt` file, in label order, and what each label id is."""
    try:
        entries = _parse(path.read_text(encoding="utf-8"), path.suffix)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as a classes file ({reason}); expected {_FORMS}") from error
    if isinstance(entries, dict) and entries:
        label_ids, entries = _by_id(entries, path)
    elif isinstance(entries, list) and 1 <= len(entries) <= IGNORE:
        label_ids = list(range(len(entries)))
    else:
        raise DataError(f"{path}: expected {_FORMS}, of 1 to {IGNORE} classes ({IGNORE} is the void label)")
    parsed = [_entry(entry, path) for entry in entries]
    listed = [name for name, _ in parsed]
    if len(set(listed)) != len(listed):
        double = next(name for name in listed if listed.count(name) > 1)
        raise DataError(f"{path}: class {double!r} is listed twice; names must differ")
    ids, names, palette = {IGNORE: IGNORE}, list[str](), list[tuple[int, int, int]]()
    for label_id, (name, colour) in zip(label_ids, parsed, strict=True):
        if name.lower() == VOID:
            ids[label_id] = IGNORE
            continue
        if label_id == IGNORE:
            raise DataError(f"{path}: class {name!r} has the id {IGNORE}, which is the void label; give it another")
        ids[label_id] = len(names)
        palette.append(colour or made_up_colour(len(names)))
        names.append(name)
    if not names:
        raise DataError(f"{path}: names no class besides {VOID}; expected {_FORMS}")
    return ClassTable(names=tuple(names), palette=tuple(palette)), ids


def void_advice(path: Path) -> str:
    """What to do about label ids that a classes file does not name."""
    return (
        f"name them in {path.name}: an id that means nothing is a class called {VOID} there, or 255 in the labels;"
        " labels hold ids, not colours"
    )


def _by_id(entries: dict[object, object], path: Path) -> tuple[list[int], list[object]]:
    """Ids and names of {road: 0, sky: 1}, or of {0: road, 1: sky}, in the order of the ids."""
    pairs: list[tuple[int, object]] = []
    for key, value in entries.items():
        name, number = (key, value) if isinstance(value, int) else (value, key)
        if isinstance(number, str) and number.isdecimal():  # keys of JSON are text
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= IGNORE:
            raise DataError(f"{path}: entry {key!r}: {value!r}; expected a name and its label id, 0 to {IGNORE}")
        pairs.append((number, name))
    pairs.sort(key=lambda pair: pair[0])
    ids = [number for number, _ in pairs]
    if double := [number for number in ids if ids.count(number) > 1]:
        raise DataError(f"{path}: two classes have the id {double[0]}; give each its own")
    return ids, [name for _, name in pairs]


def made_up_colour(index: int) -> tuple[int, int, int]:
    """Golden-ratio steps around the colour wheel keep any number of classes apart."""
    red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN_RATIO % 1.0, 0.75, (0.95, 0.65)[index % 2])
    return round(255 * red), round(255 * green), round(255 * blue)


def find_classes(root: Path) -> Path:
    """The file of a folder that names its classes."""
    for name in _CLASS_FILES:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"{root / _CLASS_FILES[0]}: missing; expected the class names there (or {', '.join(_CLASS_FILES[1:])})"
    )


def _part_pairs(part: Path) -> list[Pair]:
    return pair_folders(part / "images", part / "labels", prefix=(part.name,))


def _parse(text: str, suffix: str) -> object:
    match suffix:
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text)
    return [_text_entry(line) for line in text.splitlines() if line.strip()]


def _text_entry(line: str) -> object:
    name, *colour = (part.strip() for part in line.split(","))
    return {"name": name, "color": [int(c) if c.isdecimal() else c for c in colour]} if colour else name


def _entry(entry: object, path: Path) -> tuple[str, tuple[int, int, int] | None]:
    name, colour = (entry.get("name"), entry.get("color")) if isinstance(entry, dict) else (entry, None)
    if not isinstance(name, str) or not name:
        raise DataError(f"{path}: class entry {entry!r}; expected {_FORMS}")
    if colour is None:
        return name, None
    match colour:
        case [int(red), int(green), int(blue)] if all(0 <= c <= 255 for c in (red, green, blue)):
            return name, (red, green, blue)
    raise DataError(f"{path}: color {colour!r} of class {name!r}; expected three numbers 0..255, red, green and blue")

"""What the classes of one table mean in another: names, the words other datasets use for them, unions, scoring.

Labels are often partial. A dataset's class may stand for several of a model's (CamVid's road includes lane marks), or
several for one (cars, trucks and buses are vehicles), and what a dataset does not label is void there.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.config import Meaning
from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.errors import DataError

VOID = "void"

STREET = ClassTable(
    names=(
        "road",
        "lane_mark",
        "sidewalk",
        "building",
        "vegetation",
        "sky",
        "vehicle",
        "person",
        "bicyclist",
        "pole",
        "sign",
        "fence",
    ),
    palette=(
        (128, 64, 128),
        (255, 255, 255),
        (244, 35, 232),
        (102, 102, 156),
        (107, 142, 35),
        (70, 130, 180),
        (0, 0, 200),
        (220, 20, 60),
        (0, 160, 160),
        (190, 160, 120),
        (250, 220, 0),
        (230, 120, 60),
    ),
)

# what datasets of streets call these classes
_SYNONYMS = {
    "road": ("street", "asphalt", "drivable", "driveable"),
    "lane_mark": ("lane", "lanemark", "lane_marking", "road_marking", "road_line", "roadlines", "marking", "lane_mkgs"),
    "sidewalk": ("pavement", "footpath", "walkway"),
    "building": ("house", "facade", "wall", "window", "door"),
    "vegetation": ("tree", "trees", "plant", "plants", "bush", "grass", "terrain"),
    "sky": (),
    "vehicle": (
        "car",
        "cars",
        "truck",
        "bus",
        "van",
        "suv",
        "train",
        "tram",
        "motorcycle",
        "motorbike",
        "vehicles",
        "automobile",
    ),
    "person": ("pedestrian", "pedestrians", "people", "human"),
    "bicyclist": ("cyclist", "rider", "bicycle", "bike"),
    "pole": ("column", "column_pole", "lamp_post", "street_light", "post"),
    "sign": ("sign_symbol", "signsymbol", "traffic_sign", "traffic_light", "signal", "symbol"),
    "fence": ("guard_rail", "railing"),
}
_MEANING = {word: name for name, words in _SYNONYMS.items() for word in (name, *words)}
_VOID_WORDS = (VOID, "unlabelled", "unlabeled", "unknown", "ignore", "background", "other", "others")
# the wider class that holds a narrower one where nobody labelled the narrower one apart
_WIDER = {"lane_mark": "road"}


@dataclass(frozen=True)
class ClassMap:
    """What the classes of some labels mean to a model; classes with the same meaning count as one.

    `groups[k]` are the model's classes that class k stands for, no two of them share one; `row_of[i]` is the k of the
    dataset's class i, or IGNORE.
    """

    classes: ClassTable
    groups: tuple[tuple[int, ...], ...]
    row_of: tuple[int, ...]

    def merge(self, logits_Cyx: NDArray[np.float32]) -> NDArray[np.float32]:
        """A model's logits as those of these classes: log of the summed odds; what the labels lack cannot win."""
        return np.stack([np.logaddexp.reduce(logits_Cyx[list(group)], axis=0) for group in self.groups])


def map_classes(
    classes: ClassTable,
    target: ClassTable,
    *,
    given: Mapping[str, Meaning] | None = None,
    source: str,
) -> ClassMap:
    """What each class of `classes` means among those of `target`: as `given`, by name, or by the usual synonyms.

    `source` names the labels in errors. A narrower class that the labels do not have (lane marks) is part of the wider
    one (road).
    """
    meanings = _given_meanings(classes, target, given or {}, source)
    for name in classes.names:
        if name not in meanings:
            meanings[name] = _widened(_meaning(name, target, source), classes.names, target)
    groups = list(dict.fromkeys(group for name in classes.names if (group := meanings[name])))
    _check_disjoint(groups, target, source)
    if not groups:
        raise DataError(
            f"{source}: has no class in common with the others; its classes are {', '.join(classes.names)}, "
            f"theirs {', '.join(target.names)}: give their meaning in `map`"
        )
    members = [[i for i, name in enumerate(classes.names) if meanings[name] == group] for group in groups]
    merged = ClassTable(
        names=tuple("+".join(classes.names[i] for i in own) for own in members),
        palette=tuple(classes.palette[own[0]] for own in members),
    )
    row_of = tuple(groups.index(meanings[name]) if meanings[name] else IGNORE for name in classes.names)
    return ClassMap(merged, tuple(groups), row_of)


def _given_meanings(
    classes: ClassTable, target: ClassTable, given: Mapping[str, Meaning], source: str
) -> dict[str, tuple[int, ...]]:
    meanings = {}
    for name, meant in given.items():
        if name not in classes.names:
            raise DataError(f"{source}: map has {name!r}, which is none of its classes {', '.join(classes.names)}")
        words = [meant] if isinstance(meant, str) else list(meant)
        unknown = [word for word in words if word not in target.names and word != VOID]
        if unknown:
            near = difflib.get_close_matches(unknown[0], target.names, n=1, cutoff=0)[0]
            raise DataError(
                f"{source}: map gives {name!r} the meaning {unknown[0]!r}; expected {VOID} or classes of "
                f"{', '.join(target.names)}, such as {near}"
            )
        meanings[name] = tuple(sorted(target.names.index(word) for word in words if word != VOID))
    return meanings


def _street_word(name: str) -> str:
    """The street class that a name is a usual word for; else the name itself, in one spelling."""
    word = "_".join(name.lower().replace("-", " ").split())
    return _MEANING.get(word, word)


def _meaning(name: str, target: ClassTable, source: str) -> tuple[int, ...]:
    """Of a class by its name: the same one, or one that is a word for the same thing; () for void."""
    if name in target.names:
        return (target.names.index(name),)
    word, words = _street_word(name), [_street_word(own) for own in target.names]
    for candidate in (word, _WIDER.get(word)):
        if candidate in words:
            return (words.index(candidate),)
    if word in _VOID_WORDS:
        return ()
    raise DataError(
        f"{source}: nobody knows what its class {name!r} means among {', '.join(target.names)}; "
        f"say so in `map`, {{{name}: {VOID}}} leaves it out"
    )


def _widened(group: tuple[int, ...], names: Sequence[str], target: ClassTable) -> tuple[int, ...]:
    """The same with narrower classes that the labels do not tell apart."""
    said, words = {_street_word(name) for name in names}, [_street_word(own) for own in target.names]
    wide = {words[c] for c in group}
    more = [c for c, word in enumerate(words) if word not in said and _WIDER.get(word) in wide]
    return tuple(sorted({*group, *more}))


def _check_disjoint(groups: Sequence[tuple[int, ...]], target: ClassTable, source: str) -> None:
    for k, group in enumerate(groups):
        for other in groups[:k]:
            if shared := set(group) & set(other):
                raise DataError(
                    f"{source}: two of its classes both stand for {target.names[min(shared)]!r} and differ in the "
                    "rest; give each class of the model to one of them in `map`"
                )

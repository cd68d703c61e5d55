"""What the classes of one table mean in another: names, the words other datasets use for them, unions, scoring.

Labels are often partial. A dataset's class may stand for several of a model's (CamVid's road includes lane marks), or
several for one (cars, trucks and buses are vehicles), and what a dataset does not label is void there.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
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

# What datasets of streets call these classes, CamVid's 32 names, Cityscapes', CARLA's, ADE20K's and LabelMe's among
# them; one spelling and the singular are enough, see `_spellings`.
_SYNONYMS = {
    "road": ("street", "asphalt", "drivable", "driveable", "road shoulder", "route", "highway", "roadway", "crosswalk",
             "driveway", "carriageway", "parking", "parking lot"),
    "lane_mark": ("lane", "lane marking", "lane line", "road marking", "road line", "road mark", "marking", "lane mkgs",
                  "lane mkgs driv", "lane mkgs non driv", "zebra crossing"),
    "sidewalk": ("pavement", "footpath", "footway", "walkway", "kerb", "curb", "parking block", "pedestrian area"),
    "building": ("house", "facade", "wall", "window", "door", "windowpane", "shop", "roof", "balcony", "skyscraper",
                 "tower", "edifice", "garage", "bridge", "tunnel", "archway", "arch", "architecture", "chimney",
                 "stair", "staircase", "awning"),
    "vegetation": ("tree", "plant", "bush", "grass", "terrain", "shrub", "hedge", "lawn", "foliage", "vegetation misc",
                   "flower", "palm", "palm tree", "nature", "greenery"),
    "sky": ("cloud",),
    "vehicle": ("car", "truck", "bus", "van", "suv", "train", "tram", "motorcycle", "motorbike", "automobile", "auto",
                "motorcar", "taxi", "lorry", "minibus", "coach", "pickup", "trailer", "caravan", "scooter", "minibike",
                "motorcycle scooter", "suv pickup truck", "truck bus", "other moving", "on rails", "license plate"),
    "person": ("pedestrian", "people", "human", "child", "children", "man", "men", "woman", "women"),
    "bicyclist": ("cyclist", "rider", "bicycle", "bike", "cycle"),
    "pole": ("column", "column pole", "lamp post", "lamp", "street light", "street lamp", "post", "pole group",
             "pillar", "lamp pole", "traffic cone"),
    "sign": ("sign symbol", "traffic sign", "traffic light", "traffic signal", "signal", "symbol", "street sign",
             "road sign", "signboard", "stop sign", "stoplight", "billboard", "misc text", "banner"),
    "fence": ("guard rail", "railing", "guardrail fence", "fencing", "barrier", "handrail", "gate"),
}  # fmt: skip
# what is not labelled, or is none of these classes; a table that has such a class of its own keeps it
_VOID_WORDS = (
    VOID, "unlabelled", "unlabeled", "unknown", "ignore", "ignored", "background", "other", "various", "misc", "none",
    "nothing", "null", "undefined", "unclassified", "dont care", "clutter", "static", "dynamic", "ground",
    "ego vehicle", "rectification border", "out of roi", "rail track", "animal", "cart luggage pram", "object",
)  # fmt: skip
# the wider class that holds a narrower one where nobody labelled the narrower one apart
_WIDER = {"lane_mark": "road"}


def _key(text: str) -> str:
    """A name without case and without what separates its words: `TrafficLight`, `traffic_light`, `traffic-light`."""
    return "".join(character for character in text.casefold() if character.isalnum())


_MEANING = {_key(word): name for name, words in _SYNONYMS.items() for word in (name, *words)}
_VOID_KEYS = {_key(word) for word in _VOID_WORDS}


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


def _spellings(name: str) -> Iterator[str]:
    """The keys under which a name may be known: its own, then the singular's."""
    key = _key(name)
    yield key
    for plural, singular in (("ies", "y"), ("es", ""), ("s", "")):
        if key.endswith(plural) and len(key) > len(plural) + 1:
            yield key.removesuffix(plural) + singular


def _known_word(name: str) -> str | None:
    for key in _spellings(name):
        if key in _MEANING:
            return _MEANING[key]
        if key in _VOID_KEYS:
            return VOID
    return None


def _street_word(name: str) -> str:
    """The street class that a name is a usual word for, or void; else the name's own key.

    Of several words for one thing (`sidewalk, pavement`, `bicycle/cyclist`) those that are known must agree.
    """
    if word := _known_word(name):
        return word
    words = {word for part in re.split(r"[/;,|+]", name) if (word := _known_word(part))}
    return words.pop() if len(words) == 1 else _key(name)


def _meaning(name: str, target: ClassTable, source: str) -> tuple[int, ...]:
    """Of a class by its name: the same one, or one that is a word for the same thing; () for void."""
    if name in target.names:
        return (target.names.index(name),)
    keys = [_key(own) for own in target.names]
    for key in _spellings(name):
        if key in keys:
            return (keys.index(key),)
    word, words = _street_word(name), [_street_word(own) for own in target.names]
    for candidate in (word, _WIDER.get(word)):
        if candidate in words:
            return (words.index(candidate),)
    if word == VOID:
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

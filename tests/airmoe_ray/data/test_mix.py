"""Mixes: what classes mean, labels that stand for several, domains, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe_ray.config import DataConfig
from airmoe_ray.data import adopt, open_dataset
from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.data.camvid import CLASSES as CAMVID
from airmoe_ray.data.cityscapes import CLASSES as CITYSCAPES
from airmoe_ray.data.class_map import STREET, ClassMap, map_classes
from airmoe_ray.data.mix import Mix, not_scored
from airmoe_ray.data.scenes import CLASSES as SCENES
from tests.airmoe_ray.data.support import error_of, put_flat, put_image, put_label

ROAD_AND_LANE = (STREET.names.index("road"), STREET.names.index("lane_mark"))


def table(*names: str) -> ClassTable:
    return ClassTable(names, tuple((i, i, i) for i in range(len(names))))


def put_folder(root: Path, classes: list[str], *, ids: Any = 0, stems: tuple[str, ...] = ("a", "b")) -> Path:
    put_flat(root, *stems, ids=ids)
    (root / "classes.json").write_text(json.dumps(classes))
    return root


def mix(*parts: dict[str, Any], **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"name": "mix", "parts": list(parts), "image_size": 64, **settings})


def meanings(classes: ClassTable, target: ClassTable = STREET, **options: Any) -> dict[str, set[str]]:
    found = map_classes(classes, target, source="test", **options)
    groups = zip(found.classes.names, found.groups, strict=True)
    return {name: {target.names[c] for c in group} for name, group in groups}


def test_the_usual_words_for_street_classes_are_understood() -> None:
    assert meanings(CAMVID) == {
        "sky": {"sky"},
        "building": {"building"},
        "pole": {"pole"},
        "road": {"road", "lane_mark"},  # nobody told them apart there
        "sidewalk": {"sidewalk"},
        "tree": {"vegetation"},
        "sign_symbol": {"sign"},
        "fence": {"fence"},
        "car": {"vehicle"},
        "pedestrian": {"person"},
        "bicyclist": {"bicyclist"},
    }
    assert meanings(SCENES)["road"] == {"road"}  # which have lane marks of their own
    assert meanings(CITYSCAPES)["car+truck+bus+train+motorcycle"] == {"vehicle"}
    assert meanings(table("Pavement", "Traffic-Sign", "void")) == {"Pavement": {"sidewalk"}, "Traffic-Sign": {"sign"}}


CAMVID_32 = {
    "road": "Road RoadShoulder", "lane_mark": "LaneMkgsDriv LaneMkgsNonDriv", "sidewalk": "Sidewalk ParkingBlock",
    "building": "Building Wall Bridge Tunnel Archway", "vegetation": "Tree VegetationMisc", "sky": "Sky",
    "vehicle": "Car SUVPickupTruck Truck_Bus Train MotorcycleScooter OtherMoving", "person": "Pedestrian Child",
    "bicyclist": "Bicyclist", "pole": "Column_Pole TrafficCone", "sign": "SignSymbol TrafficLight Misc_Text",
    "fence": "Fence", "void": "Void Animal CartLuggagePram",
}  # fmt: skip
OTHERS = {
    "road": "roads street", "lane_mark": "LaneMarking lane-markings RoadLines", "sidewalk": "pavement Footpaths",
    "building": "buildings facade houses windows doors walls", "vegetation": "trees grass plants bushes Terrain",
    "vehicle": "cars trucks buses bus motorcycles vans on_rails", "person": "persons people Pedestrians human",
    "bicyclist": "bike bicycles cyclist rider", "pole": "poles columns streetlight street-lamp polegroup",
    "sign": "signs TrafficSigns street_sign traffic-lights signboard", "fence": "fences guardrail railings",
    "void": "various unlabelled Unlabeled background ignore void others out_of_roi",
}  # fmt: skip


@pytest.mark.parametrize("names_of", [CAMVID_32, OTHERS], ids=["CamVid's 32", "others"])
def test_spelling_plurals_and_other_datasets_words_are_understood(names_of: dict[str, str]) -> None:
    for meaning, words in names_of.items():
        for word in words.split():
            found = map_classes(table("skies", "lane mark", word), STREET, source="test")
            expected = IGNORE if meaning == "void" else (STREET.names.index(meaning),)
            group = IGNORE if found.row_of[2] == IGNORE else found.groups[found.row_of[2]]
            assert group == expected, word


def test_several_words_for_one_thing_must_agree() -> None:
    lists = table("road;route", "sidewalk, pavement", "bicycle/cyclist", "streetlight, street lamp", "earth, ground")
    assert set(meanings(lists)) == {"road;route", "sidewalk, pavement", "bicycle/cyclist", "streetlight, street lamp"}
    line = error_of(lambda: map_classes(table("sky", "car/person"), STREET, source="mine"))
    assert line.startswith("mine: nobody knows what its class 'car/person' means")


def test_a_model_that_tells_cars_from_trucks_gets_each_by_its_own_name() -> None:
    assert meanings(table("Trucks", "Car", "TrafficSign"), CITYSCAPES) == {
        "Trucks": {"truck"},
        "Car": {"car"},
        "TrafficSign": {"traffic_sign"},
    }


def test_words_are_understood_in_both_directions() -> None:
    """A model of CamVid's classes knows what a vehicle is, and counts lane marks as road."""
    assert meanings(table("vehicle", "lane_mark"), CAMVID) == {"vehicle": {"car"}, "lane_mark": {"road"}}


def test_what_is_given_goes_before_names() -> None:
    classes = table("road", "lawn", "pond")
    given = {"road": ["road"], "lawn": "vegetation", "pond": "void"}
    assert meanings(classes, given=given) == {"road": {"road"}, "lawn": {"vegetation"}}


def test_merged_logits_are_those_of_summed_probabilities_and_a_missing_class_cannot_win() -> None:
    meaning = ClassMap(table("a", "b"), ((0, 2), (1,)), (0, 1))
    logits = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32) * 3
    logits[3] += 100  # a class that these labels lack
    odds = np.exp(logits.astype(np.float64))
    expected = np.log(np.stack([odds[0] + odds[2], odds[1]]))
    assert np.allclose(meaning.merge(logits), expected, rtol=1e-5)


def test_labels_of_a_mix_are_common_classes_then_unions_and_the_rest_is_void(tmp_path: Path) -> None:
    put_folder(tmp_path / "one", ["tree", "road", "unlabelled"], ids=[0, 1, 2, 255, 0, 0, 0, 0])
    put_flat(tmp_path / "cam", "0001TP_1", "0016E5_2", ids=[3, 5, 11, 8, 3, 3, 3, 3])
    parts = [
        {"name": "folder", "root": "one", "title": "mine", "words": "{} of mine"},
        {"name": "camvid", "root": "cam", "words": "drive {}"},
        {"name": "scenes"},
    ]
    dataset = open_dataset(mix(*parts, root=str(tmp_path)), "train")
    assert isinstance(dataset, Mix)
    union = len(STREET.names)
    vegetation, vehicle = STREET.names.index("vegetation"), STREET.names.index("vehicle")
    assert dataset.classes.unions == (ROAD_AND_LANE,)
    assert dataset[0].label[0].tolist() == [vegetation, union, IGNORE, IGNORE, *[vegetation] * 4]
    assert dataset[2].label[0].tolist() == [union, vegetation, IGNORE, vehicle, *[union] * 4]
    assert dataset.domains[:3] == ("mine/all", "camvid/0001TP", "camvid/0016E5")
    assert [dataset.domain_of(i) for i in range(4)] == [dataset[i].domain for i in range(4)] == [0, 0, 1, 2]
    assert dataset[3].name == "camvid/0016E5_2"
    assert [dataset.words_for(d) for d in (0, 2, 4)] == [
        ("{} of mine", "all"),
        ("drive {}", "0016E5"),
        ("{}", "fog"),
    ]
    scene = dataset[4]
    assert set(np.unique(scene.label)) <= set(range(union))  # scenes tell lane marks apart
    assert len(dataset) == 4 + 800


def test_rows_for_scoring_are_the_parts_own_classes(tmp_path: Path) -> None:
    put_flat(tmp_path / "cam", "0001TP_1", ids=[3, 5, 11, 8, 3, 3, 3, 3])
    dataset = open_dataset(mix({"name": "camvid", "root": str(tmp_path / "cam")}, {"name": "scenes"}), "train")
    assert isinstance(dataset, Mix)
    assert dataset.parts[0].meaning.classes.names == CAMVID.names
    assert dataset.rows(dataset[0].label, 0)[0].tolist() == [3, 5, IGNORE, 8, 3, 3, 3, 3]


def test_validation_is_of_the_parts_that_hold_images_out_and_labels_mean_the_same(tmp_path: Path) -> None:
    put_flat(tmp_path / "cam", *(f"0001TP_{i}" for i in range(5)), ids=3)
    parts = ({"name": "camvid", "root": str(tmp_path / "cam")}, {"name": "scenes"})
    scenes_only = open_dataset(mix(*parts), "val")
    assert isinstance(scenes_only, Mix)
    assert [part.name for part in scenes_only.parts] == ["scenes"]
    assert scenes_only.classes == open_dataset(mix(*parts), "train").classes
    both = open_dataset(mix(*parts, val_fraction=0.2), "val")
    assert isinstance(both, Mix)
    assert [(part.name, len(part.dataset)) for part in both.parts] == [("camvid", 1), ("scenes", 200)]
    assert set(np.unique(both[0].label)) == {len(STREET.names)}


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_part_whose_images_were_all_trained_on_is_left_out_and_named(split: str, tmp_path: Path) -> None:
    camvid = {"name": "camvid", "root": str(put_flat(tmp_path, "0001TP_1", "0001TP_2", ids=3)), "title": "drives"}
    held = open_dataset(mix(camvid, {"name": "scenes"}), split)
    assert isinstance(held, Mix)
    assert [part.name for part in held.parts] == ["scenes"]
    assert not_scored(held) == "not scored: drives, whose images were all trained on (--split train scores those)"
    assert not_scored(open_dataset(mix(camvid, {"name": "scenes"}), "train")) is None
    assert not_scored(open_dataset(mix(camvid, {"name": "scenes"}, val_fraction=0.5), split)) is None
    others = {name: "void" for name in CAMVID.names if name not in ("road", "sky")}
    line = error_of(lambda: open_dataset(mix({**camvid, "map": others}, classes=["road", "sky"]), split))
    assert line.startswith("data.parts: no part holds images out")


def test_the_fingerprint_tells_what_labels_mean(tmp_path: Path) -> None:
    put_folder(tmp_path, ["tree", "lawn"])
    prints, camvid = set(), {"name": "camvid", "root": str(put_flat(tmp_path / "cam", "0001TP_1", ids=3))}
    for meaning in ("vegetation", "void", "road"):
        part = {"name": "folder", "root": str(tmp_path), "map": {"lawn": meaning}}
        prints.add(open_dataset(mix(part, {"name": "scenes"}, camvid), "train").fingerprint())
    assert len(prints) == 3


def test_a_foreign_dataset_is_adopted_by_a_model_of_other_classes(tmp_path: Path) -> None:
    root = put_folder(tmp_path, ["car", "pavement", "river"], ids=[0, 1, 2, 255, 0, 0, 0, 0])
    dataset = open_dataset(DataConfig(name="folder", root=str(root)), "all")
    line = error_of(lambda: adopt(dataset, STREET, given={}, source="folder"))
    assert "'river'" in line
    assert "map" in line
    adopted = adopt(dataset, STREET, given={"river": "void"}, source="folder")
    assert adopted.parts[0].meaning.classes.names == ("car", "pavement")
    assert adopted.rows(adopted[0].label, 0)[0].tolist() == [0, 1, IGNORE, IGNORE, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "settings", "complaint"),
    [
        ([], {}, "data.parts"),
        ([{"name": "camvid", "root": "nowhere"}], {}, "data.parts, camvid: data.root: nowhere"),
        ([{"name": "camvid"}], {}, "needs its folder"),
        ([{"name": "scenes"}, {"name": "scenes"}], {"classes": [*SCENES.names]}, "called 'scenes'"),
        ([{"name": "scenes"}], {}, "no part labels 'bicyclist'"),
        ([{"name": "scenes", "map": {"dog": "sky"}}], {}, "map has 'dog'"),
        ([{"name": "scenes", "map": {"sky": "skye"}}], {}, "such as sky"),
        ([{"name": "scenes", "map": {"sky": ["sky", "pole"]}}], {}, "both stand for 'pole'"),
    ],
)
def test_mistakes_in_a_mix_are_told_in_one_line(
    parts: list[dict[str, Any]], settings: dict[str, Any], complaint: str
) -> None:
    assert complaint in error_of(lambda: open_dataset(mix(*parts, **settings), "train"))


def test_a_part_that_shares_no_class_with_the_others_is_refused(tmp_path: Path) -> None:
    root = put_folder(tmp_path, ["river", "boat"])
    classes = [*SCENES.names, "river", "boat"]
    line = error_of(
        lambda: open_dataset(mix({"name": "scenes"}, {"name": "folder", "root": str(root)}, classes=classes), "train")
    )
    assert "has no class in common with the others" in line


def test_the_labels_of_a_real_image_survive_the_way_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    put_image(tmp_path / "images" / "0001TP_1.jpg")
    put_label(tmp_path / "labels" / "0001TP_1.png", rng.integers(0, 12, size=(6, 8)))
    plain = open_dataset(DataConfig(name="camvid", root=str(tmp_path)), "all")
    adopted = adopt(plain, STREET, given={}, source="camvid")
    assert np.array_equal(adopted.rows(adopted[0].label, 0), plain[0].label)


def test_domains_that_a_part_holds_out_are_validation_and_never_training(tmp_path: Path) -> None:
    put_flat(tmp_path, "0001TP_1", "0016E5_2", "0016E5_3", "Seq05VD_4", ids=3)
    part = {"name": "camvid", "root": str(tmp_path), "hold_out": ["0016E5"]}
    config = mix(part, {"name": "scenes"})
    train, val, test = (open_dataset(config, split) for split in ("train", "val", "test"))
    assert [train[i].name for i in range(2)] == ["camvid/0001TP_1", "camvid/Seq05VD_4"]
    assert [val[i].name for i in range(2)] == ["camvid/0016E5_2", "camvid/0016E5_3"]
    assert [dataset.domain_of(1) for dataset in (train, val)] == [2, 1]
    assert [test[i].name for i in range(3)] == ["camvid/0016E5_2", "camvid/0016E5_3", "scenes/scene_0500000"]
    assert (len(val), len(test)) == (2 + 200, 2 + 200)
    assert (
        train.fingerprint()
        != open_dataset(mix({**part, "hold_out": ["Seq05VD"]}, {"name": "scenes"}), "train").fingerprint()
    )
    line = error_of(lambda: open_dataset(mix({**part, "hold_out": ["0016"]}, {"name": "scenes"}), "train"))
    assert "no domain '0016'" in line

"""LabelMeFacade in both layouts."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.data.base import IGNORE
from airmoe_ray.data.labelme import LabelMe, place_of
from tests.airmoe_ray.data.support import error_of, names, put_flat, put_image, put_label

COLOURS = [
    ((0, 0, 0), "void"),
    ((128, 0, 0), "building"),
    ((128, 0, 128), "car"),
    ((128, 128, 0), "building"),
    ((128, 128, 128), "sidewalk"),
    ((128, 64, 0), "road"),
    ((0, 128, 128), "sky"),
    ((0, 128, 0), "vegetation"),
    ((0, 0, 128), "building"),
]


def put_public(root: Path) -> Path:
    """Two photographs as the dataset is published."""
    pixels = np.array([[colour for colour, _ in COLOURS]], np.uint8).repeat(2, axis=0)
    for stem in ("05june05_static_street_boston_p1010736", "static_outdoor_bozeman_montana_usa_img_3807"):
        put_image(root / "images" / f"{stem}.jpg", size=(len(COLOURS), 2))
        (root / "labels").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(root / "labels" / f"{stem}.png")
    (root / "train.txt").write_text("05june05_static_street_boston_p1010736.jpg\n")
    (root / "test.txt").write_text("static_outdoor_bozeman_montana_usa_img_3807\n")
    return root


def test_the_public_layout_has_nine_colours_and_two_lists(tmp_path: Path) -> None:
    root = put_public(tmp_path)
    train, both = LabelMe(root, "train"), LabelMe(root, "all")
    assert names(train) == ["05june05_static_street_boston_p1010736"]
    assert (
        names(LabelMe(root, "val")) == names(LabelMe(root, "test")) == ["static_outdoor_bozeman_montana_usa_img_3807"]
    )
    assert both.domains == ("boston", "montana")
    found = ["void" if i == IGNORE else train.classes.names[i] for i in train[0].label[0]]
    assert found == [name for _, name in COLOURS]


def test_the_layout_by_place_is_that_of_a_folder(tmp_path: Path) -> None:
    for place in ("boston", "palma"):
        put_image(tmp_path / "images" / place / "x.jpg")
        put_label(tmp_path / "labels" / place / "x.png", 1)
    (tmp_path / "classes.json").write_text(json.dumps(["sky", "building"]))
    dataset = LabelMe(tmp_path, "all")
    assert dataset.domains == ("boston", "palma")
    assert dataset.classes.names == ("sky", "building")
    assert (dataset[1].label == 1).all()


@pytest.mark.parametrize(
    ("stem", "place"),
    [
        ("05june05_static_street_boston__p1010736", "boston"),
        ("static_outdoor_street_city_cambridge_uk__IMG_8677", "cambridge_uk"),
        ("static_palma_outdoor_august_2005_set2__img_1286", "palma"),
        ("static_outdoor_bay_area_submitted_alyosha_efros__105_0569", "bay_area"),
        ("spatial_envelope_256x256_static_8outdoorcategories__insidecity_a0004", "spatial_envelope"),
        ("spatial_envelope_256x256_static_8outdoorcategories__street_boston52", "boston"),
        ("static_street_outdoor_palma_mallorca_spain__IMG_0540", "palma"),
        ("static_outdoor_street_village_puigpunyent_mallorca_spain__IMG_0201", "puigpunyent"),
        ("static_outdoor_road_mallorca_spain__IMG_1088", "mallorca"),
        ("static_dartmouth_hanover_june_2006__IMG_2120", "dartmouth"),
        ("static_submitted_saxena_chung_ng_nips2005_learningdepth__img-op1-p-015t000", "saxena"),
        ("img-060705-17.10.14-p-142t000", "saxena"),
        ("10feb04_static_cars_highland__img_0807", "elsewhere"),
        ("holiday", "elsewhere"),
    ],
)
def test_the_place_is_in_the_files_name(stem: str, place: str) -> None:
    assert place_of(stem) == place


def test_published_names_give_the_places_of_the_sorted_folders(labelme: Path) -> None:
    sorted_by_hand = {path.stem: path.parent.name for path in (labelme / "images").glob("*/*.jpg")}
    assert len(sorted_by_hand) > 700
    assert {stem: place_of(stem) for stem in sorted_by_hand} == sorted_by_hand


def test_the_configuration_of_the_model_in_the_box_reads_the_published_layout(labelme: Path, tmp_path: Path) -> None:
    """All real names in one folder with tiny pictures and the two lists: places are cut from both."""
    stems = sorted(path.stem for path in (labelme / "images").glob("*/*.jpg"))
    root = tmp_path / "labelme"
    image, label = put_image(root / "images" / f"{stems[0]}.jpg"), put_label(root / "labels" / f"{stems[0]}.png")
    for stem in stems[1:]:
        (root / "images" / f"{stem}.jpg").hardlink_to(image)
        (root / "labels" / f"{stem}.png").hardlink_to(label)
    (root / "train.txt").write_text("\n".join(stems[::8]))
    (root / "test.txt").write_text("\n".join(stem for i, stem in enumerate(stems) if i % 8))
    put_flat(tmp_path / "camvid", "0001TP_1", ids=3)
    config = load_config("street", [f"data.root={tmp_path}", "data.train_count=5", "data.val_count=5"])
    part = next(part for part in config.data.parts if part.name == "labelme")
    held = [stem for stem in stems if place_of(stem) in part.hold_out]
    train, val, test = (open_dataset(config.data, split) for split in ("train", "val", "test"))
    assert len(train) == len(stems) - len(held) + 1 + 5
    assert len(val) == len(test) == len(held) + 5
    places = {f"labelme/{place}" for place in part.hold_out}
    assert {val.domains[val.domain_of(i)] for i in range(len(held))} == places
    assert not {train.domains[train.domain_of(i)] for i in range(len(train))} & places


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    root = put_public(tmp_path)
    (root / "train.txt").write_text("nobody.jpg\n")
    assert "'nobody.jpg'" in error_of(lambda: LabelMe(root, "train"))
    (root / "train.txt").unlink()
    assert "train.txt: missing" in error_of(lambda: LabelMe(root, "train"))
    Image.new("RGB", (9, 2), (1, 2, 3)).save(root / "labels" / "static_outdoor_bozeman_montana_usa_img_3807.png")
    assert "colour (1, 2, 3)" in error_of(lambda: LabelMe(root, "test")[0])

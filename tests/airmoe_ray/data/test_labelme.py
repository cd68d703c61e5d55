"""LabelMeFacade in both layouts."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.data.base import IGNORE
from airmoe_ray.data.labelme import LabelMe, place_of
from tests.airmoe_ray.data.support import error_of, names, put_image, put_label

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
    assert both.domains == ("boston", "bozeman_montana")
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
        ("10feb04_static_cars_highland_img_0807", "highland"),
        ("img-060705-17.10.14-p-142t000", "elsewhere"),
    ],
)
def test_the_place_is_in_the_files_name(stem: str, place: str) -> None:
    assert place_of(stem) == place


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    root = put_public(tmp_path)
    (root / "train.txt").write_text("nobody.jpg\n")
    assert "'nobody.jpg'" in error_of(lambda: LabelMe(root, "train"))
    (root / "train.txt").unlink()
    assert "train.txt: missing" in error_of(lambda: LabelMe(root, "train"))
    Image.new("RGB", (9, 2), (1, 2, 3)).save(root / "labels" / "static_outdoor_bozeman_montana_usa_img_3807.png")
    assert "colour (1, 2, 3)" in error_of(lambda: LabelMe(root, "test")[0])

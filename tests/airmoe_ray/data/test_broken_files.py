"""Data that cannot be read: each fault is told in one line that names the file."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.data.apolloscape import ApolloScape
from airmoe_ray.data.camvid import CamVid
from airmoe_ray.data.carla_adv import CarlaAdv
from airmoe_ray.data.cityscapes import Cityscapes
from airmoe_ray.data.folder import Folder, read_classes
from airmoe_ray.errors import ConfigError
from tests.airmoe_ray.data.support import HEIGHT, WIDTH, error_of, put_flat, put_image


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "expected a list of names"),
        ("[", "cannot be read as a classes file"),
        ('["a", "a"]', "listed twice"),
        ('{"a": 0, "b": 0}', "two classes have the id 0"),
        ('{"a": 0, "b": 300}', "entry 'b': 300"),
        ('{"a": 0, "b": true}', "entry 'b': True"),
        ('{"a": 0, "b": 255}', "'b' has the id 255, which is the void label"),
        ('["void"]', "names no class besides void"),
        ('["a", 3]', "class entry 3"),
        ('[{"name": "a", "color": [1, 2, 300]}]', "three numbers 0..255"),
    ],
)
def test_a_broken_classes_file_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "classes.json"
    file.write_text(text)
    message = error_of(lambda: read_classes(file))
    assert str(file) in message
    assert complaint in message


def test_a_missing_label_is_named_at_construction(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1", "a_2")
    (tmp_path / "labels" / "a_2.png").unlink()
    message = error_of(lambda: CamVid(tmp_path, "all"))
    assert str(tmp_path / "labels" / "a_2.png") in message
    assert "1 of 2 images" in message


def test_a_missing_folder_is_named_with_what_belongs_there(tmp_path: Path) -> None:
    assert str(tmp_path / "train") in error_of(lambda: CamVid(tmp_path, "train"))
    assert "leftImg8bit" in error_of(lambda: Cityscapes(tmp_path, "train"))
    assert "{weather}/rgb" in error_of(lambda: CarlaAdv(tmp_path, "train"))
    assert "road*/ColorImage" in error_of(lambda: ApolloScape(tmp_path / "nowhere", "train"))
    assert "has no images" in error_of(lambda: ApolloScape(tmp_path, "train"))
    assert "classes.json: missing" in error_of(lambda: Folder(tmp_path, "train"))


def test_a_label_of_another_size_is_refused_with_both_sizes(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    put_image(tmp_path / "images" / "a_1.jpg", size=(20, 10))
    message = error_of(lambda: CamVid(tmp_path, "all")[0])
    assert "a_1.png: label is 8x6 but image a_1.jpg is 20x10" in message


def test_unknown_ids_are_listed_with_the_allowed_range(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1", ids=[0, 1, 12, 13, 14, 77, 255, 11])
    message = error_of(lambda: CamVid(tmp_path, "all")[0])
    assert "a_1.png: label ids 12..14, 77 are unknown, expected 0..11, 255" in message


def test_an_id_past_the_classes_is_refused_with_the_way_to_call_it_void(tmp_path: Path) -> None:
    put_flat(tmp_path, "a", ids=[0, 1, 11, 2, 0, 0, 0, 0])
    (tmp_path / "classes.txt").write_text("\n".join(f"class {i}" for i in range(11)))
    message = error_of(lambda: Folder(tmp_path, "all")[0])
    assert "a.png: label ids 11 are unknown, expected 0..10, 255; name them in classes.txt" in message
    assert "a class called void" in message
    with (tmp_path / "classes.txt").open("a") as file:
        file.write("\nvoid\n")
    assert Folder(tmp_path, "all")[0].label[0, 2] == 255


@pytest.mark.parametrize("content", [b"", b"not an image"])
def test_a_file_that_is_no_image_is_named(content: bytes, tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    (tmp_path / "images" / "a_1.jpg").write_bytes(content)
    assert "a_1.jpg: cannot be read as an image" in error_of(lambda: CamVid(tmp_path, "all")[0])


@pytest.mark.parametrize("file", ["images/a_1.jpg", "labels/a_1.png"])
def test_a_truncated_file_is_named(file: str, tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)
    Image.fromarray(noise).save(tmp_path / file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    message = error_of(lambda: CamVid(tmp_path, "all")[0])
    assert file in message
    assert "truncated" in message


@pytest.mark.parametrize("pixels", [np.zeros((HEIGHT, WIDTH), np.uint16), np.zeros((HEIGHT, WIDTH, 3), np.uint8)])
def test_a_label_that_is_not_8_bit_index_is_refused(pixels: np.ndarray, tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    Image.fromarray(pixels).save(tmp_path / "labels" / "a_1.png")
    assert "expected L or P (8 bits per pixel)" in error_of(lambda: CamVid(tmp_path, "all")[0])


def test_two_images_of_one_name_are_refused(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    put_image(tmp_path / "images" / "a_1.png")
    assert "same name 'a_1'" in error_of(lambda: CamVid(tmp_path, "all"))


@pytest.mark.parametrize(("split", "fraction"), [("training", 0.0), ("train", 1.0), ("train", -0.1)])
def test_a_wrong_split_or_fraction_is_a_config_error(split: str, fraction: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        CamVid(put_flat(tmp_path, "a_1"), split, val_fraction=fraction)

"""Readers on tiny trees in the true layouts, and on real CamVid where it is at hand."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.data import apolloscape, carla_adv, cityscapes
from airmoe_ray.data.apolloscape import ApolloScape
from airmoe_ray.data.base import IGNORE, SegmentationDataset
from airmoe_ray.data.camvid import CamVid
from airmoe_ray.data.carla_adv import CarlaAdv
from airmoe_ray.data.cityscapes import Cityscapes
from airmoe_ray.data.files import read_rgb
from airmoe_ray.data.folder import Folder
from tests.airmoe_ray.data.support import HEIGHT, WIDTH, error_of, names, put_apollo, put_flat, put_image, put_label


def test_camvid_reads_the_segnet_splits(tmp_path: Path) -> None:
    for part, stem in (("train", "0001TP_1"), ("val", "0016E5_2"), ("test", "Seq05VD_3")):
        put_image(tmp_path / part / f"{stem}.png")
        put_label(tmp_path / f"{part}annot" / f"{stem}.png", [0, 10, 11, 255, 3, 3, 3, 3])
    assert names(CamVid(tmp_path, "test")) == ["Seq05VD_3"]
    dataset = CamVid(tmp_path, "all")
    assert dataset.domains == ("0001TP", "0016E5", "Seq05VD")
    assert dataset[1].label[0].tolist() == [0, 10, IGNORE, IGNORE, 3, 3, 3, 3]
    assert dataset[1].image.shape == (HEIGHT, WIDTH, 3)
    assert dataset.domain_of(1) == dataset[1].domain == 1


def test_flat_layout_holds_out_the_end_of_every_sequence(tmp_path: Path) -> None:
    put_flat(tmp_path, *(f"a_{i:02}" for i in range(10)), *(f"b_{i:02}" for i in range(5)), "c_00")
    assert len(CamVid(tmp_path, "train")) == len(CamVid(tmp_path, "val")) == len(CamVid(tmp_path, "all")) == 16
    train, val = (names(CamVid(tmp_path, split, val_fraction=0.2)) for split in ("train", "val"))
    assert val == ["a_08", "a_09", "b_04"]
    assert set(train).isdisjoint(val)
    assert len(train) + len(val) == 16
    assert names(CamVid(tmp_path, "test", val_fraction=0.2)) == val


def test_cityscapes_prefers_train_ids_and_reads_val_for_test(tmp_path: Path) -> None:
    for part, city in (("train", "aachen"), ("train", "bremen"), ("val", "lindau")):
        put_image(tmp_path / "leftImg8bit" / part / city / f"{city}_0_0_leftImg8bit.png")
        put_label(tmp_path / "gtFine" / part / city / f"{city}_0_0_gtFine_labelTrainIds.png", 18)
        put_label(tmp_path / "gtFine" / part / city / f"{city}_0_0_gtFine_labelIds.png", 7)
    train = Cityscapes(tmp_path, "train")
    assert (train.domains, names(train)) == (("aachen", "bremen"), ["aachen_0_0", "bremen_0_0"])
    assert train[0].label.max() == 18
    assert names(Cityscapes(tmp_path, "test")) == names(Cityscapes(tmp_path, "val")) == ["lindau_0_0"]


def test_cityscapes_maps_label_ids(tmp_path: Path) -> None:
    put_image(tmp_path / "leftImg8bit/val/lindau/x_leftImg8bit.png")
    put_label(tmp_path / "gtFine/val/lindau/x_gtFine_labelIds.png", [0, 7, 8, 11, 18, 26, 29, 33])
    label = Cityscapes(tmp_path, "val")[0].label
    expected = ["void", "road", "sidewalk", "building", "void", "car", "void", "bicycle"]
    assert [cityscapes.CLASSES.names[i] if i != IGNORE else "void" for i in label[0]] == expected


def test_apolloscape_maps_groups_to_their_class_and_holds_out_per_recording(tmp_path: Path) -> None:
    for record in ("Record001", "Record002"):
        for i in range(4):
            put_apollo(tmp_path, "road02_seg", record, f"{record}_{i}", [17, 33, 161, 40, 168, 113, 98, 0])
    put_apollo(tmp_path, "road03_seg", "Record001", "x", 49)
    dataset = ApolloScape(tmp_path, "all")
    assert dataset.domains == ("road02_seg", "road03_seg")
    seen = [apolloscape.CLASSES.names[i] if i != IGNORE else "void" for i in dataset[0].label[0]]
    assert seen == ["sky", "car", "car", "tricycle", "tricycle", "vegetation", "void", "others"]
    assert len(ApolloScape(tmp_path, "val", val_fraction=0.25)) == 2


def test_apolloscape_follows_the_official_lists(tmp_path: Path) -> None:
    first = put_apollo(tmp_path, "road01_ins", "Record001", "a", 17)
    second = put_apollo(tmp_path, "road01_ins", "Record001", "b", 17)
    (tmp_path / "road01_ins_train.lst").write_text(first)
    (tmp_path / "road01_ins_val.lst").write_text(second)
    assert names(ApolloScape(tmp_path, "train")) == ["road01_ins_a"]
    assert names(ApolloScape(tmp_path, "test")) == ["road01_ins_b"]
    (tmp_path / second.split("\t")[0]).unlink()
    assert "b.jpg: missing; road01_ins_val.lst lists it" in error_of(lambda: ApolloScape(tmp_path, "val"))


def test_carla_reads_tags_from_the_red_channel(tmp_path: Path) -> None:
    for part, weather in (("train", "fog"), ("train", "rain"), ("test", "fog")):
        put_image(tmp_path / part / weather / "rgb" / "0001.png")
        tags = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        tags[..., 0] = 22
        (tmp_path / part / weather / "semantic").mkdir()
        Image.fromarray(tags).save(tmp_path / part / weather / "semantic" / "0001.png")
    train = CarlaAdv(tmp_path, "train")
    assert train.domains == ("fog", "rain")
    assert carla_adv.CLASSES.names[train[0].label[0, 0]] == "terrain"
    assert names(CarlaAdv(tmp_path, "val")) == ["test_fog_0001"]
    assert len(set(names(CarlaAdv(tmp_path, "all")))) == 3


@pytest.mark.parametrize("reader", [ApolloScape, CarlaAdv])
def test_the_flat_layout_takes_domains_from_sub_folders(
    reader: Callable[[Path, str], SegmentationDataset], tmp_path: Path
) -> None:
    put_flat(tmp_path, "night/1", "rain/1")
    dataset = reader(tmp_path, "all")
    assert (dataset.domains, names(dataset)) == (("night", "rain"), ["night_1", "rain_1"])


@pytest.mark.parametrize("count", [len(t.names) for t in (apolloscape.CLASSES, carla_adv.CLASSES)])
def test_apolloscape_and_carla_have_the_papers_class_count(count: int) -> None:
    assert count == 23


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("classes.json", '["road", {"name": "sky", "color": [1, 2, 3]}]'),
        ("classes.yaml", "- road\n- {name: sky, color: [1, 2, 3]}\n"),
        ("classes.txt", "road\nsky, 1, 2, 3\n\n"),
    ],
)
def test_folder_reads_every_form_of_classes_file(file: str, text: str, tmp_path: Path) -> None:
    put_flat(tmp_path, "x", ids=[0, 1, 255, 0, 0, 0, 0, 0])
    (tmp_path / file).write_text(text)
    dataset = Folder(tmp_path, "train")
    assert dataset.classes.names == ("road", "sky")
    assert dataset.classes.palette[1] == (1, 2, 3)
    assert dataset[0].label[0, :3].tolist() == [0, 1, IGNORE]


@pytest.mark.parametrize(
    "text",
    [
        '{"sky": 3, "road": 1, "Void": 11}',
        '{"1": "road", "3": "sky", "11": "void"}',
        '{"road": 1, "sky": 3, "void": 11}',
    ],
)
def test_a_classes_file_may_say_the_ids_and_which_of_them_is_void(text: str, tmp_path: Path) -> None:
    put_flat(tmp_path, "x", ids=[1, 3, 11, 255, 1, 1, 1, 1])
    (tmp_path / "classes.json").write_text(text)
    dataset = Folder(tmp_path, "train")
    assert dataset.classes.names == ("road", "sky")
    assert dataset[0].label[0, :4].tolist() == [0, 1, IGNORE, IGNORE]
    (tmp_path / "classes.json").write_text('{"road": 3, "sky": 1, "void": 11}')
    assert Folder(tmp_path, "train").fingerprint() != dataset.fingerprint()


def test_a_class_called_void_is_void_in_a_list_as_well(tmp_path: Path) -> None:
    put_flat(tmp_path, "x", ids=[0, 1, 2, 255, 0, 0, 0, 0])
    (tmp_path / "classes.txt").write_text("road\nvoid\nsky, 1, 2, 3\n")
    dataset = Folder(tmp_path, "train")
    assert (dataset.classes.names, dataset.classes.palette[1]) == (("road", "sky"), (1, 2, 3))
    assert dataset[0].label[0, :4].tolist() == [0, IGNORE, 1, IGNORE]


def test_linked_folders_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    put_flat(tmp_path / "elsewhere", "1", "2")
    put_flat(tmp_path / "data", "night/1")
    for kind in ("images", "labels"):
        (tmp_path / "data" / kind / "day").symlink_to(tmp_path / "elsewhere" / kind)
        (tmp_path / "data" / kind / "night" / "loop").symlink_to(tmp_path / "data" / kind)
    (tmp_path / "data" / "classes.txt").write_text("road\n")
    dataset = Folder(tmp_path / "data", "all")
    assert names(dataset) == ["day_1", "day_2", "night_1"]
    assert dataset.domains == ("day", "night")
    assert dataset.fingerprint()


def test_folder_reads_split_folders_and_a_classes_file_elsewhere(tmp_path: Path) -> None:
    put_flat(tmp_path / "data" / "train", "x")
    put_flat(tmp_path / "data" / "val", "x")
    listed = tmp_path / "names.txt"
    listed.write_text("a\nb\nc\n")
    dataset = Folder(tmp_path / "data", "all", classes_file=listed)
    assert names(dataset) == ["train_x", "val_x"]
    assert len(set(dataset.classes.palette)) == 3
    assert names(Folder(tmp_path / "data", "test", classes_file=listed)) == ["val_x"]


def test_palette_labels_give_their_indices(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1")
    label = Image.new("P", (WIDTH, HEIGHT), 7)
    label.putpalette([200] * 768)
    label.save(tmp_path / "labels" / "a_1.png")
    assert (CamVid(tmp_path, "all")[0].label == 7).all()


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "x.jpg", exif=exif)
    assert read_rgb(tmp_path / "x.jpg").shape == (WIDTH, HEIGHT, 3)


def test_the_fingerprint_follows_files_and_parameters(tmp_path: Path) -> None:
    put_flat(tmp_path, "a_1", "a_2", "a_3")
    before = CamVid(tmp_path, "train").fingerprint()
    assert CamVid(tmp_path, "train").fingerprint() == before
    assert CamVid(tmp_path, "all").fingerprint() != before
    assert CamVid(tmp_path, "train", val_fraction=0.4).fingerprint() != before
    os.utime(tmp_path / "labels" / "a_1.png", ns=(0, 1))
    assert CamVid(tmp_path, "train").fingerprint() != before


def test_real_camvid_has_sky_above_road(camvid: Path) -> None:
    dataset = CamVid(camvid, "all")
    sky, road = (dataset.classes.names.index(name) for name in ("sky", "road"))
    for i in np.linspace(0, len(dataset) - 1, 5).astype(int):
        sample = dataset[int(i)]
        assert set(np.unique(sample.label)) <= {*range(11), IGNORE}
        sky_rows, road_rows = (np.nonzero(sample.label == c)[0] for c in (sky, road))
        assert sky_rows.mean() < road_rows.mean()
        assert sample.image[sample.label == sky].mean() > sample.image[sample.label == road].mean()

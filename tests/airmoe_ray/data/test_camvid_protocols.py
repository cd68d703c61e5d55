"""How CamVid is split by `data.protocol`, on tiny trees in both layouts; and that splits share one cache."""

from pathlib import Path

import pytest
import torch

from airmoe_ray.config import DataConfig
from airmoe_ray.config_file import load_config
from airmoe_ray.data import held_out, open_dataset
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features
from tests.airmoe_ray.data.support import error_of, names, put_flat, put_image, put_label


@pytest.fixture
def flat(tmp_path) -> Path:
    """Two drives of ten and five frames."""
    return put_flat(tmp_path, *(f"a_{i:02}" for i in range(10)), *(f"b_{i:02}" for i in range(5)))


@pytest.fixture
def segnet(tmp_path) -> Path:
    """A stand-in for SegNet's folders, two frames each."""
    for part, sequence in (("train", "a"), ("val", "b"), ("test", "c")):
        for i in range(2):
            put_image(tmp_path / part / f"{sequence}_{i}.png")
            put_label(tmp_path / f"{part}annot" / f"{sequence}_{i}.png")
    return tmp_path


def split(root: Path, which: str, **settings) -> list[str]:
    return names(open_dataset(DataConfig(name="camvid", root=str(root), **settings), which))


def test_the_paper_trains_on_segnet_s_train_and_test_and_scores_its_val(segnet):
    assert split(segnet, "train", protocol="paper") == ["a_0", "a_1", "c_0", "c_1"]
    assert split(segnet, "val", protocol="paper") == split(segnet, "test", protocol="paper") == ["b_0", "b_1"]
    assert split(segnet, "test", protocol="segnet") == split(segnet, "test") == ["c_0", "c_1"]


@pytest.mark.parametrize("protocol", ["paper", "segnet"])
def test_published_splits_need_the_published_folders(flat, protocol):
    assert "has no train/ val/ test/ folders" in error_of(lambda: split(flat, "train", protocol=protocol))


def test_a_block_is_the_end_of_each_sequence_in_either_layout(flat, segnet, tmp_path_factory):
    assert split(flat, "test", protocol="block", val_fraction=0.2) == ["a_08", "a_09", "b_04"]
    assert split(flat, "test", protocol="block", val_fraction=0.2) == split(flat, "test", val_fraction=0.2)
    assert "data.val_fraction is 0" in error_of(lambda: split(flat, "train", protocol="block"))


def test_published_folders_can_be_cut_into_blocks_as_well(segnet):
    assert split(segnet, "test", protocol="block", val_fraction=0.5) == ["a_1", "b_1", "c_1"]


def test_a_sequence_left_out_is_never_trained_on(flat):
    train, test = (split(flat, which, protocol="leave_one_out", hold_out=["b"]) for which in ("train", "test"))
    assert test == [f"b_{i:02}" for i in range(5)]
    assert train == [f"a_{i:02}" for i in range(10)]
    config = DataConfig(name="camvid", root=str(flat), protocol="leave_one_out", hold_out=["b"])
    assert names(held_out(config, open_dataset(config, "train"))) == test


@pytest.mark.parametrize(
    ("hold_out", "message"),
    [([], "names no sequence; there are a, b"), (["x"], "no domain 'x'"), (["a", "b"], "holds out every sequence")],
)
def test_a_wrong_sequence_is_told_with_those_there_are(flat, hold_out, message):
    assert message in error_of(lambda: split(flat, "train", protocol="leave_one_out", hold_out=hold_out))


def test_all_splits_and_folds_read_one_cache_and_each_its_own_images(flat, tmp_path):
    base = [f"data.root={flat}", "data.name=camvid", f"data.cache_dir={tmp_path / 'cache'}", "data.image_size=32"]
    backbone = load_backbone(load_config(None, base).backbone)
    folders, rows = set(), {}
    for settings in (["data.val_fraction=0.2"], ["data.protocol=leave_one_out", "data.hold_out=[b]"]):
        config = load_config(None, [*base, *settings])
        for which in ("train", "test"):
            dataset = open_dataset(config.data, which)
            cache = cached_features(dataset, backbone, config, "identity")
            folders.add(cache.folder)
            assert len(cache) == len(dataset)
            for i in range(len(dataset)):
                rows.setdefault(dataset[i].name, []).append(torch.from_numpy(cache.get(i)[0].copy()))
    assert len(folders) == 1
    assert len(rows) == 15
    assert all(len(found) == 2 and torch.equal(*found) for found in rows.values())

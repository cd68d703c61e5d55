"""The mistakes people make, through the real command line: one line that names them, and nothing left behind."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.airmoe_ray.training.tiny_runs import airmoe, tiny


def test_a_bad_picture_path_does_not_lose_the_scores(trained):
    (trained / "file").write_text("not a folder")
    result = airmoe("eval", "--json", "--pictures", "file/x.png", cwd=trained)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert "miou" in json.loads(result.out)


def broken_folder(tmp_path: Path, kind: str) -> Path:
    """A flat CamVid folder of six pairs, one of them broken."""
    root = tmp_path / kind
    (root / "images").mkdir(parents=True)
    (root / "labels").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    for name in [f"s_{i}" for i in range(6)]:
        Image.fromarray(pixels).save(root / "images" / f"{name}.jpg")
        Image.fromarray(np.zeros((48, 64), np.uint8)).save(root / "labels" / f"{name}.png")
    if kind == "size":
        Image.fromarray(np.zeros((48, 60), np.uint8)).save(root / "labels" / "s_1.png")
    elif kind == "ids":
        Image.fromarray(np.full((48, 64), 77, np.uint8)).save(root / "labels" / "s_1.png")
    elif kind == "truncated":
        path = root / "images" / "s_1.jpg"
        path.write_bytes(path.read_bytes()[:400])
    return root


@pytest.mark.parametrize(
    ("kind", "told"), [("size", "60x48"), ("ids", "77"), ("truncated", "s_1.jpg"), ("missing", "not a folder")]
)
def test_broken_data_is_one_line_and_leaves_nothing_behind(tmp_path, kind, told):
    root = tmp_path / "nowhere" if kind == "missing" else broken_folder(tmp_path, kind)
    options = [*tiny(**{"data.name": "camvid", "data.root": root, "data.cache_dir": "cache"}), "--run", "r"]
    result = airmoe("train", *options, cwd=tmp_path)
    assert result.code == 2
    assert result.err.strip().splitlines()[-1].startswith("airmoe: ")
    assert told in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "r" / "checkpoint").exists()
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--set", "experts.cuont=3"], "experts.count"),
        (["train", "--config", "nope"], "quickstart"),
        (["train", "--set", "routing.budget_bits=100"], "20490"),
        (["eval", "--run", "nowhere"], "neither a run folder nor a shipped model"),
        (["eval", "--set", "experts.hidden=24"], "another architecture"),
        (["eval", "--set", "experts.count=4"], "holds 5 experts"),
        (["eval", "--set", "data.name=camvid"], "data.root"),
        (["train"], "--resume"),
        (["train", "--resume", "--run", "nowhere"], "no run to resume"),
        (["train", "--run", "x", "--set", "train.device=tpu"], "tpu"),
        (["train", "--run", "x", "--set", "data.views=[upside]"], "upside"),
        (["train", "--run", "x", "--workers", "2", "--set", "train.engine=local"], "--workers 2"),
        (["train", "--run", "file/x"], "file/x: cannot write here"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(trained, arguments, told):
    (trained / "file").write_text("not a folder")
    result = airmoe(*arguments, cwd=trained)
    assert result.code == 2, result.err
    *before, complaint = result.err.strip().splitlines()
    assert complaint.startswith("airmoe: ")
    assert told in complaint
    assert len(before) <= 1  # what the command was at
    assert not [line for line in before if "airmoe: " in line or "Traceback" in line]


def test_config_lists_every_field_and_prints_the_resolved_configuration(tmp_path):
    listed = json.loads(airmoe("config", "--json", cwd=tmp_path).out)
    assert listed["channel.snr_db"]["default"] == 20.0
    resolved = airmoe("config", "--config", "quickstart", "--set", "seed=7", cwd=tmp_path).out
    assert "seed: 7" in resolved


def test_doctor_tells_what_is_wrong(tmp_path):
    good = airmoe("doctor", "--json", cwd=tmp_path)
    assert good.code == 0, good.out
    bad = airmoe("doctor", "--json", "--set", "data.name=camvid", "--set", "data.root=gone", cwd=tmp_path)
    failed = [finding for finding in json.loads(bad.out) if not finding["ok"]]
    assert bad.code == 1
    assert [finding["check"] for finding in failed] == ["dataset"]
    assert "gone" in failed[0]["message"]

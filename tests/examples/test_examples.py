"""The examples run as they are, on a small untrained model."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.data.scenes import render_scene
from tests.airmoe_ray.small_run import SIZES, small_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("examples") / "run")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`python examples/NAME.py ARGUMENTS` in a folder of its own; what it printed."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def photos(folder: Path, count: int = 2) -> Path:
    folder.mkdir(parents=True)
    for index in range(count):
        Image.fromarray(render_scene(index, height=48, width=64).image).save(folder / f"{index}.png")
    return folder


def test_a_folder_is_segmented_and_what_is_no_image_left_out(run, model, tmp_path):
    (photos(tmp_path / "in") / "notes.txt").write_text("hello")
    printed = run("segment_folder", tmp_path / "in", "--out", "out", "--run", model)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {f"{i}_{kind}.png" for i in range(2) for kind in ("mask", "overlay")}
    assert np.asarray(Image.open(tmp_path / "out" / "0_mask.png")).shape == (48, 64)
    assert "left out" in printed
    assert "notes.txt: the file is not an image" in printed


def test_noise_rises_as_the_snr_falls(run, model):
    printed = run("sweep_snr", "--run", model, "--snr-db", -10, 10, 30, "--seeds", 2)
    rows = re.findall(r"^ *(-?\d+) +(\S+) +([\d.]+)%$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["-10", "10", "30"]
    errors, same = ([float(row[column]) for row in rows] for column in (1, 2))
    assert errors == sorted(errors, reverse=True)
    assert same[2] > same[0]


def test_a_rule_of_ones_own_is_asked(run, model):
    printed = run("own_rule", "--run", model)
    assert re.search(
        r"the model's own rule: clients \d .*\nsure and near: clients \d .*\n[\d.]+% of the pixels", printed
    )


def test_a_client_of_ones_own_data_is_trained_beside_the_others(run, tmp_path):
    mine = photos(tmp_path / "own" / "images").parent
    (mine / "labels").mkdir()
    for path in (mine / "images").iterdir():
        Image.fromarray(np.full((48, 64), 3, np.uint8)).save(mine / "labels" / path.name)
    small = [part for size in (*SIZES[1:], "train.epochs=1", "train.threads=1") for part in ("--set", size)]
    printed = run("own_client", mine, "--run", "trained", "--drawn", 10, *small)
    rows = re.findall(r"^(\w+): client (\d), of your own data, is chosen for (\d+) of (\d+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["clear", "fog", "mine", "night", "rain", "snow"]
    assert {row[1] for row in rows} == {"2"}
    assert (tmp_path / "trained" / "checkpoint" / "experts" / "expert_05.safetensors").exists()


def test_every_cell_of_the_notebook_runs_in_order(model, monkeypatch, capsys):
    monkeypatch.setenv("AIRMOE_MODEL", str(model))
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "20 dB: NMSE" in printed
    assert re.search(r"^[1-4] clients heard; [\d.]+% as over a perfect channel$", printed, re.MULTILINE)
    assert (EXAMPLES / "tour.ipynb").stat().st_size < 100_000


def test_every_example_names_its_own_command():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 4
    for path in scripts:
        assert f"python examples/{path.name} " in path.read_text()

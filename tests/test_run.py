"""Whole runs in small: train, resume, evaluate, and the mistakes people make, through the real command line."""

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from airmoe_ray.backbone import load_backbone
from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.evaluation import evaluate
from airmoe_ray.features import cached_features
from airmoe_ray.inference import Segmenter
from airmoe_ray.run import train_run
from airmoe_ray.sources import OnlineSource
from airmoe_ray.validation import validate
from airmoe_ray.world import Alone
from api.cli.main import run

AIRMOE = Path(sys.executable).parent / "airmoe"
TINY = {
    "data.image_size": 64,
    "data.train_count": 20,
    "data.val_count": 10,
    "experts.count": 5,
    "experts.hidden": 16,
    "experts.width": 16,
    "train.epochs": 2,
    "train.batch_size": 5,
    "train.engine": "local",
}


@dataclass
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str


def airmoe(*arguments: object, cwd: Path) -> Outcome:
    """The entry point of the console script, in this process: starting Python and torch anew takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["airmoe", *map(str, arguments)])
        try:
            run()
        except SystemExit as stop:
            code = stop.code
    return Outcome(int(code or 0), out.getvalue(), err.getvalue())


def tiny(**more: object) -> list[str]:
    return [part for key, value in (TINY | more).items() for part in ("--set", f"{key}={value}")]


def tiny_config(tmp_path: Path, **more: object) -> Config:
    settings = TINY | {"data.cache_dir": tmp_path / "cache"} | more
    return load_config("quickstart", [f"{key}={value}" for key, value in settings.items()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which `airmoe train` has made runs/quickstart."""
    folder = tmp_path_factory.mktemp("trained")
    result = airmoe("train", "--config", "quickstart", *tiny(), cwd=folder)
    assert result.code == 0, result.err
    return folder


def test_train_writes_what_it_promises(trained):
    run = trained / "runs" / "quickstart"
    assert {path.name for path in run.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "summary.json", "checkpoint", "checkpoint-best")
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and 0 <= row["miou"] <= 100 for row in rows)


def test_eval_prints_the_json_it_promises_and_draws_a_picture(trained):
    result = airmoe("eval", "--json", "--pictures", "sheet.png", cwd=trained)
    assert result.code == 0, result.err
    scores = json.loads(result.out)
    assert {"miou", "mf1", "mpre", "mrec", "per_class", "per_domain", "routing"} <= scores.keys()
    assert len(scores["per_class"]) == 10
    assert set(scores["per_domain"]) == {"clear", "fog", "rain", "night", "snow"}
    assert len(scores["routing"]["load"]) == 5
    assert sum(scores["routing"]["load"]) == pytest.approx(5, abs=0.01)
    with Image.open(trained / "sheet.png") as sheet:
        assert min(sheet.size) > 500


def test_the_channel_can_be_changed_at_evaluation(trained):
    def nmse_db(*sets: str) -> float | None:
        result = airmoe("eval", "--json", *(part for s in sets for part in ("--set", s)), cwd=trained)
        return json.loads(result.out)["routing"]["nmse_db"]

    good, bad = nmse_db("channel.snr_db=30"), nmse_db("channel.snr_db=10")
    assert bad - good == pytest.approx(20, abs=0.01)  # the same draws, noise power up by 20 dB
    assert nmse_db("channel.kind=ideal") is None


def test_training_again_gives_the_same_model_bit_for_bit(tmp_path):
    config = tiny_config(tmp_path)
    for name in ("a", "b"):
        train_run(config, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "checkpoint").rglob("*.safetensors"))
    assert len(files) == 1 + 5 + 1
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_a_resumed_run_ends_like_an_undisturbed_one(tmp_path):
    undisturbed = tiny_config(tmp_path, **{"train.epochs": 3, "train.schedule": "constant"})
    train_run(undisturbed, tmp_path / "a")
    first = tiny_config(tmp_path, **{"train.epochs": 2, "train.schedule": "constant"})
    train_run(first, tmp_path / "b")
    train_run(undisturbed, tmp_path / "b", resume=True)
    rows = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in "ab"]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in rows]
    assert losses[0] == losses[1]


def test_training_leaves_the_backbone_bit_identical(tmp_path):
    config = tiny_config(tmp_path)
    before = load_backbone(config.backbone).fingerprint
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    assert segmenter.backbone.fingerprint == segmenter.card.backbone_fingerprint == before
    assert not any(parameter.requires_grad for parameter in segmenter.backbone.parameters())


def test_cached_features_score_like_the_whole_way_from_the_image(tmp_path):
    config = tiny_config(tmp_path, **{"data.cache_dtype": "float32"})
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    dataset = open_dataset(config.data, "val")
    cache = cached_features(dataset, segmenter.backbone, config, "identity")
    direct, cached = evaluate(segmenter, dataset), validate(segmenter.model, cache, dataset)
    assert cached["miou"] == pytest.approx(direct["miou"], abs=0.01)  # a pixel or two may tie
    assert cached["routing"]["load"] == direct["routing"]["load"]


def test_the_backbone_in_the_loop_sees_new_views_and_replays(tmp_path):
    config = tiny_config(tmp_path, **{"train.cache": False})
    source = OnlineSource(open_dataset(config.data, "train"), load_backbone(config.backbone), config)
    first, again, later = (source.batch(epoch, [3, 7])[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, later)
    train_run(config, tmp_path / "run")


def test_shared_epochs_hand_one_expert_to_every_client(tmp_path):
    more = {"train.warm_start.shared_epochs": 2, "experts.shared": False}
    train_run(tiny_config(tmp_path, **more), tmp_path / "run")
    experts = Segmenter.load(tmp_path / "run" / "checkpoint").model.clients.experts
    for name, value in experts[0].state_dict().items():
        assert all(torch.equal(value, expert.state_dict()[name]) for expert in experts), name


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path):
    command = [str(AIRMOE), "train", "--config", "quickstart", *tiny(**{"train.epochs": 60}), "--run", "r"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not (tmp_path / "r" / "checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    assert "Traceback" not in errors
    done = len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines())
    result = airmoe("train", "--resume", "--run", "r", "--set", f"train.epochs={done + 2}", cwd=tmp_path)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["last"]["epoch"] == done + 2


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """The trained run, to be spoiled."""
    shutil.copytree(trained / "runs" / "quickstart", tmp_path / "r")
    return tmp_path


def test_resuming_a_finished_run_changes_nothing(copy):
    before = {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()}
    result = airmoe("train", "--resume", "--run", "r", cwd=copy)
    assert result.code == 0
    assert "nothing is left to do" in result.err
    assert {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()} == before


def test_a_run_killed_before_its_summary_gets_it_from_the_log(copy):
    expected = json.loads((copy / "r" / "summary.json").read_text())
    (copy / "r" / "summary.json").unlink()
    assert airmoe("train", "--resume", "--run", "r", cwd=copy).code == 0
    found = json.loads((copy / "r" / "summary.json").read_text())
    assert 0 < found.pop("seconds") <= expected.pop("seconds")  # of the epochs alone
    assert found == expected


class Second(Alone):
    """A worker that is not the first, for once without the others."""

    rank, size = 1, 2


def test_only_the_first_worker_writes_to_the_folder(tmp_path):
    config = tiny_config(tmp_path, **{"train.epochs": 1})
    train_run(config, tmp_path / "run")
    more = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))}
    train_run(more, tmp_path / "run", resume=True, world=Second())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run", *(tmp_path / "run").rglob("*"))} == before
    train_run(config, tmp_path / "other", world=Second())
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.epochs=1", "2 epochs are trained already"),
        ("data.image_size=320", "dilations"),
        ("frl.prototypes=8", "frl.prototypes"),
        ("experts.hidden=32", "another architecture"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_and_changes_nothing(copy, change, told):
    before = {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()}
    more = ["--set", "data.train_count=6", "--set", "data.val_count=5"] if "image_size" in change else []
    result = airmoe("train", "--resume", "--run", "r", "--set", change, *more, cwd=copy)
    assert result.code == 2
    assert told in result.err
    assert {path: path.read_bytes() for path in (copy / "r").rglob("*") if path.is_file()} == before


def test_the_log_has_every_epoch_once_after_a_kill_at_any_point(copy):
    log = copy / "r" / "metrics.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[-1].replace('"epoch": 2', '"epoch": 3') + '\n{"epo')
    assert airmoe("train", "--resume", "--run", "r", "--set", "train.epochs=4", cwd=copy).code == 0
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_diverging_run_stops_and_keeps_its_last_checkpoint(copy):
    before = (copy / "r" / "checkpoint" / "cloud.safetensors").read_bytes()
    result = airmoe("train", "--resume", "--run", "r", "--set", "train.epochs=4", "--set", "train.lr=1e30", cwd=copy)
    assert result.code == 2
    assert "not finite" in result.err
    assert (copy / "r" / "checkpoint" / "cloud.safetensors").read_bytes() == before


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
        (["eval", "--run", "nowhere"], "no checkpoint"),
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
    assert "Traceback" not in result.err
    assert told in result.err
    assert len(result.err.strip().splitlines()) == 1


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

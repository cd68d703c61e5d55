"""The small copy: half the size, the same answers, nothing of the machine, and a card that says what is known."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from airmoe_ray.config import Config, PartConfig
from airmoe_ray.config_file import load_config
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.storage.card_text import Scores, card_text, read_scores
from airmoe_ray.storage.checkpoint import (
    FORMAT,
    TrainerState,
    expert_file,
    load_checkpoint,
    load_trainer_state,
    load_weights,
    save_checkpoint,
)
from airmoe_ray.storage.export import export_model, portable
from tests.airmoe_ray.small_run import KNOWS, small_run
from tests.airmoe_ray.storage.test_checkpoint import CARD

SCORES = {
    "miou": 61.25,
    "images": 12,
    "per_class": {"road": {"iou": 90.0, "f1": 95.0, "pre": 94.0, "rec": 96.0},
                  "pole": {"iou": 12.0, "f1": 20.0, "pre": 19.0, "rec": 21.0},
                  "sign": {"iou": None, "f1": None, "pre": None, "rec": None}},
    "per_domain": {"night": {"miou": 55.0}, "fog": {"miou": 65.0}},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("export") / "run")


def test_weights_are_the_runs_own_rounded_to_half_and_everything_else_is_left_behind(run, tmp_path):
    card = export_model(run / "checkpoint", tmp_path / "small", name="street", terms="For research.")
    there = {str(path.relative_to(tmp_path / "small")) for path in (tmp_path / "small").rglob("*") if path.is_file()}
    experts = {f"experts/expert_{j:02d}.safetensors" for j in range(4)}
    assert there == {"config.yaml", "model.json", "CARD.md", "cloud.safetensors", *experts}
    assert (card.name, card.terms, card.format, card.clients) == ("street", "For research.", FORMAT, KNOWS)
    assert load_checkpoint(tmp_path / "small")[1] == card
    for name in ("cloud.safetensors", *experts):
        whole, half = (safetensors.torch.load_file(p / name) for p in (run / "checkpoint", tmp_path / "small"))
        assert whole.keys() == half.keys()
        for key, value in whole.items():
            assert torch.equal(half[key], value.half() if value.is_floating_point() else value)
        assert (tmp_path / "small" / name).stat().st_size < 0.6 * (run / "checkpoint" / name).stat().st_size


def test_a_model_filled_from_half_is_in_full_precision_also_where_training_goes_on(tmp_path, make_model):
    model = make_model().float()
    save_checkpoint(tmp_path / "c", model, CARD)
    export_model(tmp_path / "c", tmp_path / "small", name="x")
    again = make_model(model.config).float()
    load_weights(tmp_path / "small", again)
    assert {value.dtype for value in again.state_dict().values()} == {torch.float32}
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.half().float()), name
    with pytest.raises(CheckpointError, match="has no trainer state to resume from"):
        load_trainer_state(tmp_path / "small")


def test_the_configuration_keeps_the_recipe_and_forgets_machine_and_operator():
    mine = ["data.name=folder", "data.root=/home/me/data", "data.cache_dir=/fast/cache", "train.device=cpu",
            "train.threads=3", "train.engine=local", "serve.api_keys=[secret]", "serve.admin_token=token",
            "serve.resize=native", "cluster.storage=/mnt/frl", "cluster.pin={0: site}", "train.lr=0.5", "seed=9",
            "backbone.weights=/home/me/vit.pth"]  # fmt: skip
    config = portable(load_config("quickstart", mine))
    assert not [
        word for word in ("/home", "/fast", "/mnt", "secret", "token: t", "site") if word in config.model_dump_json()
    ]
    plain = Config()
    assert (config.data.root, config.data.cache_dir) == (None, plain.data.cache_dir)
    assert (config.train.device, config.train.threads, config.train.engine) == ("auto", 0, "ray")
    assert config.cluster == plain.cluster
    kept = (config.seed, config.train.lr, config.data.name, config.serve.resize, config.routing.top_k)
    assert kept == (9, 0.5, "folder", "native", 2)


def test_values_beyond_half_precision_are_refused_by_name(tmp_path, make_model):
    model = make_model().float()
    with torch.no_grad():
        model.clients.experts[2].psi.weight.fill_(1e6)
    save_checkpoint(tmp_path / "c", model, CARD)
    with pytest.raises(CheckpointError, match=r"expert_02.*psi\.weight has values that float16 cannot hold"):
        export_model(tmp_path / "c", tmp_path / "small", name="x")
    assert not list(tmp_path.glob("small*"))


def test_only_an_exported_model_is_ever_replaced(run, tmp_path, make_model):
    out = tmp_path / "out"
    export_model(run / "checkpoint", out, name="one")
    export_model(run / "checkpoint", out, name="two")
    assert load_checkpoint(out)[1].name == "two"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    save_checkpoint(tmp_path / "trained", make_model(), CARD, TrainerState(1, 1, {}))
    file = tmp_path / "file"
    file.touch()
    for place in (tmp_path / "notes", tmp_path / "trained", run / "checkpoint", run, file):
        with pytest.raises(UserError, match=f"--out {place}: "):
            export_model(run / "checkpoint", place, name="x")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]
    assert expert_file(run / "checkpoint", 0).exists()


def test_a_name_that_is_a_path_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"--name ../up: expected letters"):
        export_model(run / "checkpoint", tmp_path / "out", name="../up")


def test_the_card_holds_the_facts(run, tmp_path):
    scores = [Scores("unseen streets", SCORES)]
    export_model(
        run / "checkpoint",
        tmp_path / "o",
        name="street",
        terms="For research only.",
        scores=scores,
        command="make street",
    )
    text = (tmp_path / "o" / "CARD.md").read_text()
    facts = ("# street", "4 experts", "lane mark", "Terms of the weights: For research only. The code",
             "Apache-2.0", "**unseen streets**: mIoU 61.2 on 12 images", "| road | 90.0 | 94.0 | 96.0 |",
             "| sign | absent | absent | absent |", "night 55.0, fog 65.0", "- client 3: sunny drives", "make street",
             "Weak on unseen streets (IoU below 40): pole 12.", "scenes: drawn by this package", "float16",
             "fitted to a long side of 64 pixels")  # fmt: skip
    assert not [fact for fact in facts if fact not in text]
    assert "road 90" not in text  # only what is weak is listed as such
    assert str(run) not in text


def test_the_card_leads_with_photographs_and_says_what_nobody_scored(run, tmp_path):
    row = {"iou": 50.0, "f1": 60.0, "pre": 60.0, "rec": 60.0}
    mixed = {
        "miou": 60.0,
        "images": 5,
        "per_class": {"scenes/road": row, "photos/road": row},
        "per_part": {"scenes": {"miou": 80.0, "images": 4}, "photos": {"miou": 40.0, "images": 1}},
        "per_domain": {"scenes/fog": {"miou": 80.0, "images": 4}, "photos/home": {"miou": 40.0, "images": 1}},
        "not_scored": {"parts": ["camvid"], "classes": ["sign", "lane_mark", "fence"]},
    }
    config, card = load_checkpoint(run / "checkpoint")
    data = config.data.model_copy(update={"name": "mix", "parts": [PartConfig(name="scenes")]})
    config = config.model_copy(update={"data": data})
    scores = [Scores("unseen", mixed), Scores("others", SCORES | {"not_scored": {"parts": [], "classes": ["fence"]}})]
    text = card_text(replace(card, name="street"), config, scores=scores, command=None, size=1, shipped=True)
    facts = ("mIoU 40.0 on photos (1 image), 80.0 on scenes (4 images); the mean of the 2 is 60.0",
             "scenes/fog 80.0 (4 images), photos/home 40.0 (1 image).", "night 55.0, fog 65.0.",
             "Not scored: camvid, whose images were all trained on.",
             "Classes that none of these scores is about: fence.", "airmoe serve --run street\n",
             'Segmenter.from_pretrained("street")')  # fmt: skip
    assert not [fact for fact in facts if fact not in text]
    assert 'from_pretrained("DIR")' in card_text(card, config, scores=[], command=None, size=1)


def test_scores_come_with_a_title_of_their_own_or_the_files_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("camvid.json").write_text(json.dumps(SCORES))
    shutil.copy("camvid.json", "a=b.json")
    assert read_scores("camvid.json") == Scores("camvid", SCORES)
    assert read_scores("Hidden frames=camvid.json") == Scores("Hidden frames", SCORES)
    assert read_scores("a=b.json").title == "a=b"
    Path("wrong.json").write_text("[]")
    for text in ("none.json", "Title=none.json", "wrong.json"):
        with pytest.raises(UserError, match=f"--scores {text}: cannot be read"):
            read_scores(text)

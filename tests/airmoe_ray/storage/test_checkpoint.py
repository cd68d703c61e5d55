"""Checkpoints: bit-exact, one file per client, and never half a one."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from airmoe_ray.errors import CheckpointError
from airmoe_ray.storage import checkpoint
from airmoe_ray.storage.checkpoint import (
    ModelCard,
    expert_file,
    load_checkpoint,
    load_trainer_state,
    load_weights,
    save_checkpoint,
)
from airmoe_ray.training.trainer import Batch, Trainer

CARD = ModelCard(["a", "b", "c"], [[0, 0, 0], [1, 1, 1], [2, 2, 2]], 6, [1, 2, 3], "none", "0")


def trained(make_config, make_model, make_features, **blocks):
    """A model after two steps, with its trainer, so that optimizer moments exist."""
    config = make_config(**blocks)
    model = make_model(config)
    trainer = Trainer(model, config, total_steps=4)
    for step in range(2):
        labels = torch.randint(0, 3, (4, 24, 32), generator=torch.Generator().manual_seed(step))
        trainer.step(Batch(make_features(4, seed=step), labels, [10 * step + i for i in range(4)]))
    return model, trainer


def test_the_round_trip_is_bit_exact(tmp_path, make_config, make_model, make_features):
    model, trainer = trained(make_config, make_model, make_features, frl={"prototypes": [1, 2, 3, 2]})
    save_checkpoint(tmp_path / "c", model, CARD, trainer.state(epoch=1))
    config, card = load_checkpoint(tmp_path / "c")
    again = make_model(config)
    load_weights(tmp_path / "c", again)
    assert card == CARD
    assert config == model.config
    valid = model.clients.frl.valid_NM
    for name, value in model.state_dict().items():
        same = again.state_dict()[name] == value
        assert (same[valid] if name.startswith("clients.frl") else same).all(), name


def test_a_resumed_trainer_takes_the_very_step_the_first_would_have_taken(
    tmp_path, make_config, make_model, make_features
):
    model, trainer = trained(make_config, make_model, make_features)
    save_checkpoint(tmp_path / "c", model, CARD, trainer.state(epoch=1))
    again = make_model(model.config)
    load_weights(tmp_path / "c", again)
    resumed = Trainer(again, model.config, total_steps=4)
    resumed.restore(load_trainer_state(tmp_path / "c"))
    batch = Batch(make_features(4, seed=9), torch.zeros(4, 24, 32, dtype=torch.long), [1, 2, 3, 4])
    assert torch.equal(trainer.step(batch).loss.total, resumed.step(batch).loss.total)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_clients_file_holds_its_own_tensors_only(tmp_path, make_model):
    model = make_model()
    save_checkpoint(tmp_path / "c", model, CARD)
    before = expert_file(tmp_path / "c", 1).read_bytes()
    with torch.no_grad():
        model.clients.experts[0].psi.weight.add_(1)
        model.clients.frl.prototypes_NMd[0].add_(1)
    save_checkpoint(tmp_path / "c", model, CARD)
    assert expert_file(tmp_path / "c", 1).read_bytes() == before
    assert expert_file(tmp_path / "c", 0).read_bytes() != before


def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(tmp_path, make_model, monkeypatch):
    model = make_model()
    save_checkpoint(tmp_path / "c", model, CARD)
    before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*.safetensors")}
    real, calls = checkpoint.write_file, []

    def full(path, content):
        calls.append(path)
        if len(calls) == 4:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*previous checkpoint is untouched"):
        save_checkpoint(tmp_path / "c", model, CARD)
    assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*.safetensors")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from airmoe_ray.storage.checkpoint import ModelCard, save_checkpoint
from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE
config = Config.model_validate({"experts": {"count": 3, "hidden": 16, "width": 16}, "routing": {"top_k": 2}})
model = AirMoE(config, feature_dim=6, classes=3, dilations=(1, 2, 3))
card = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, 6, [1, 2, 3], "none", "0")
for generation in range(10**6):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(generation)
    save_checkpoint(Path(sys.argv[1]), model, card)
    print(generation, flush=True)
"""


def test_a_kill_during_save_leaves_the_old_or_the_new_checkpoint(tmp_path, make_model):
    for delay in (0.0, 0.003, 0.007, 0.02):
        folder = tmp_path / f"c{delay}"
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True)
        saved = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        saved = int(rest[-1]) if rest else saved
        config, _ = load_checkpoint(folder)
        model = make_model(config).float()
        load_weights(folder, model)
        values = {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}
        assert len(values) == 1, "tensors of two generations"
        assert values <= {float(saved), float(saved + 1)}


def test_a_swap_cut_short_is_finished_by_the_next_reader(tmp_path, make_model):
    save_checkpoint(tmp_path / "c", make_model(), CARD)
    (tmp_path / "c").rename(tmp_path / "c.ready")  # as after a kill between the two renames
    load_checkpoint(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def load_everything(folder, model):
    load_checkpoint(folder)
    load_weights(folder, model)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: expert_file(folder, 1).unlink(), "holds 3 experts"),
        (lambda folder: expert_file(folder, 1).write_bytes(b"x"), "expert_01.safetensors: cannot be read"),
        (lambda folder: (folder / "cloud.safetensors").unlink(), "cloud.safetensors: missing"),
        (lambda folder: (folder / "model.json").write_text("{}"), "model.json: cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path, make_model, damage, told):
    model = make_model()
    save_checkpoint(tmp_path / "c", model, CARD)
    damage(tmp_path / "c")
    with pytest.raises(CheckpointError) as error:
        load_everything(tmp_path / "c", model)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, make_model):
    save_checkpoint(tmp_path / "c", make_model(), CARD)
    with pytest.raises(CheckpointError, match="another architecture"):
        load_weights(tmp_path / "c", make_model(experts={"hidden": 24}))


def test_no_pickle_is_ever_written(tmp_path, make_config, make_model, make_features):
    model, trainer = trained(make_config, make_model, make_features)
    save_checkpoint(tmp_path / "c", model, CARD, trainer.state(epoch=1))
    suffixes = {path.suffix for path in Path(tmp_path / "c").rglob("*") if path.is_file()}
    assert suffixes == {".yaml", ".json", ".safetensors"}

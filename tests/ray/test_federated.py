"""Experts that learn where they live: the same gradients and the same curve as in one process, and real dropouts."""

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from actors.channel import Channel
from actors.federated_trainer import FederatedTrainer, train_federated
from actors.host import HostSpec
from actors.learner import LearningHost
from actors.participants import Participants
from actors.policy import Fault
from airmoe_ray.checkpoint import ModelCard
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.ledger import Traffic
from airmoe_ray.moe import AirMoE
from airmoe_ray.reporter import Silent
from airmoe_ray.run import train_run
from airmoe_ray.training import Batch, Trainer
from airmoe_ray.validation import _through
from tests.conftest import CLASSES, FEATURE_DIM, SMALL

pytestmark = pytest.mark.usefixtures("own_ray")
CARD = ModelCard(["a", "b", "c"], [[0, 0, 0]] * 3, FEATURE_DIM, [1, 2, 3], "none", "none")


class Reused(Channel):
    """A channel that can begin again, which is quicker than another process."""

    def begin(self, *arguments: Any) -> None:
        """As if it were new."""
        self.__init__(*arguments)  # type: ignore[misc]


class Open(LearningHost):
    """A client that can begin again, and shows its gradients."""

    def begin(self, *arguments: Any) -> None:
        """As if it were new."""
        self.__init__(*arguments)  # type: ignore[misc]

    nap_s = 0.0

    def nap_before_weighing(self, seconds: float) -> None:
        """Once."""
        self.nap_s = seconds

    def weigh(self, *arguments: Any) -> Any:
        time.sleep(self.nap_s)
        self.nap_s = 0.0
        return super().weigh(*arguments)

    def gradients(self) -> dict[str, Any]:
        """After a step, before the next."""
        named = dict(self.clients.named_parameters())
        return {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}


class OwnSource:
    """Twelve samples of one shape."""

    shape_of, grids = np.zeros(12, dtype=np.int64), ((3, 4),)

    def plain(self, index: int) -> Any:
        batch = make_batch(index, size=1)
        return batch.features_BDhw[0].numpy(), batch.labels_BHW[0].numpy()


TRAIN = {"batch_size": 6, "lr": 1e-2, "query_lr_factor": 1.0, "loss_stride": 1, "warm_start": {"enabled": False}}


def configured(**blocks: dict[str, Any]) -> Config:
    settings = SMALL | {"train": TRAIN}
    return Config.model_validate(settings | {name: settings.get(name, {}) | block for name, block in blocks.items()})


def make_model(config: Config) -> AirMoE:
    return AirMoE(config, feature_dim=FEATURE_DIM, classes=CLASSES, dilations=(1, 2, 3)).double()


def make_batch(step: int, size: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(step)
    features = torch.randn(size, FEATURE_DIM, 3, 4, generator=draw, dtype=torch.float64)
    features += 2 * torch.randn(size, FEATURE_DIM, 1, 1, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (size, 12, 16), generator=draw, dtype=torch.uint8)
    return Batch(features, labels, [100 * step + i for i in range(size)])


class Pool:
    """Stands in for an actor class: hands out the same actors again and again."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.made, self.turn = ray.remote(actor), [], 0

    def options(self, **options: Any) -> "Pool":
        self.chosen = options
        return self

    def remote(self, *arguments: Any) -> Any:
        place = arguments[0].clients[0] if isinstance(arguments[0], HostSpec) else 0
        if place == len(self.made):
            self.made.append(self.actor.options(**self.chosen).remote(*arguments))
        self.made[place].begin.remote(*arguments)
        return self.made[place]


@pytest.fixture(scope="module")
def actors(own_ray: None) -> dict[str, Pool]:
    return {"learner": Pool(Open), "channel": Pool(Reused)}


def federated(config: Config, actors: dict[str, Pool], report: Any = None) -> FederatedTrainer:
    trainer = FederatedTrainer(make_model(config), config, CARD, total_steps=20, report=report or Silent(), **actors)
    trainer.begin()
    return trainer


def gradients_of(trainer: FederatedTrainer) -> dict[str, Tensor | None]:
    """By the names of the in-process model."""
    found = {name: p.grad for name, p in trainer.cloud.named_parameters()}
    shown = trainer.participants.ask("gradients")
    for key, grads in shown.items():
        found |= {
            f"clients.experts.{key}.{k.removeprefix('experts.0.')}": v for k, v in grads.items() if "experts" in k
        }
    prototypes = [shown[key]["frl.prototypes_NMd"][0] for key in sorted(shown, key=int)]
    found["clients.frl.prototypes_NMd"] = torch.stack(prototypes)
    return found


def differs(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


CASES: dict[str, dict[str, Any]] = {
    "air": {},
    "bottleneck": {"channel": {"rho_grad": True, "snr_db": 5.0}},
    "substitute": {"channel": {"truncation": "substitute", "gamma_th": 0.4}},
    "all fade": {"channel": {"gamma_th": 5.0}},
    "ideal": {"channel": {"kind": "ideal"}},
    "digital": {"channel": {"kind": "digital", "digital_bits": 4}},
    "published": {"frl": {"renewal": "soft", "sparsity": "entropy"}, "routing": {"score": "reciprocal"}},
    "clipped": {"train": {"grad_clip": 0.3}},
    "head at the cloud": {"experts": {"shared": True}, "channel": {"rho_grad": True}, "train": {"top_k": 1}},
}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_one_process_step_after_step(case: str, actors: dict[str, Pool]) -> None:
    config = configured(**CASES[case])
    trainer, model = federated(config, actors), make_model(config)
    reference = Trainer(model, config, total_steps=20)
    for step in range(4):
        ours, theirs = trainer.step(make_batch(step)), reference.step(make_batch(step))
        for mine, yours in zip(ours.loss, theirs.loss, strict=True):
            assert differs(mine, yours) < 1e-9
        assert torch.equal(ours.selected_BK, theirs.selected_BK)
        found = gradients_of(trainer)
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, name
            else:
                assert differs(found[name], parameter.grad) < 1e-9, (step, name)
    state = trainer.state(epoch=1)  # and so everything they led to: weights, prototypes, moments
    for name, value in model.state_dict().items():
        assert differs(trainer.model.state_dict()[name], value) < 1e-8, name
    expected = reference.state(epoch=1).optimizer
    assert state.optimizer.keys() == expected.keys()
    for name, value in expected.items():
        assert differs(state.optimizer[name], value) < 1e-7, name


@pytest.mark.parametrize("case", ["air", "all fade"])
def test_every_bit_that_crosses_is_counted(case: str, actors: dict[str, Pool]) -> None:
    trainer = federated(configured(**CASES[case]), actors)
    batch, b = make_batch(0), 32
    result = trainer.step(batch)
    pairs = result.forwards
    inputs, cells, n, d = len(batch.ids_B), 12, 4, 8
    outputs = CLASSES * cells
    down = b * inputs * (FEATURE_DIM * cells + d) + inputs * n + b * (pairs + inputs)  # features, Q, who, beta and rho
    down += b * inputs * outputs + b * pairs + b * inputs * n * d  # and back: g, dL/d(delta_j), dL/dP_j
    up = inputs * n * (b * d + 1) + 2 * b * pairs  # P_j and the fade bit, delta_j and c_j
    up += b * pairs + b * inputs * n * d  # and back: a_j, parts of dL/dQ
    if case == "all fade":  # who is asked, and |gamma_j|^2 of those
        down += n
        up += b * inputs * len(result.selected_BK.unique())
    assert trainer.traffic.downlink.total() == down
    assert trainer.traffic.uplink.total() == up
    assert trainer.traffic.channel_uses == inputs * outputs
    assert trainer.account()["traffic"]["uplink_bits"] == up / inputs
    assert Traffic.from_stored(json.loads(json.dumps(trainer.traffic.stored()))) == trainer.traffic


class Notes(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def without_the_last(model: AirMoE, config: Config) -> AirMoE:
    """The same system, had it never had its last client."""
    n = config.experts.count - 1
    fewer = config.model_copy(update={"experts": config.experts.model_copy(update={"count": n})})
    small, wanted = make_model(fewer), model.state_dict()
    small.load_state_dict({name: wanted[name][:n] if ".frl." in name else wanted[name] for name in small.state_dict()})
    return small


def step_until(trainer: FederatedTrainer, said: str, notes: Notes, within_s: float = 60) -> None:
    until = time.monotonic() + within_s
    step = 50
    while not any(said in line for line in notes.lines):
        assert time.monotonic() < until, notes.lines
        trainer.step(make_batch(step := step + 1))


def test_a_client_killed_is_a_client_the_system_never_had_and_comes_back(actors: dict[str, Pool]) -> None:
    config, notes = configured(), Notes()
    trainer = federated(config, actors, notes)
    trainer.step(make_batch(0))
    archive = trainer.state(epoch=1)
    reference = Trainer(without_the_last(trainer.model, config), config, total_steps=20)
    reference.restore(replace(archive, optimizer={k: v for k, v in archive.optimizer.items() if "experts.3." not in k}))
    os.kill(trainer.participants.pids["3"], signal.SIGKILL)
    with contextlib.suppress(RayError):  # until Ray knows
        ray.get(trainer.participants.instances["3"].handle.state.remote())
    trainer.participants.miss({"3": Fault.LOST})
    ours, theirs = trainer.step(make_batch(1)), reference.step(make_batch(1))
    assert differs(ours.loss.ce, theirs.loss.ce) < 1e-9
    for name, parameter in reference.model.query.named_parameters():
        assert differs(dict(trainer.model.query.named_parameters())[name].grad, parameter.grad) < 1e-9
    assert trainer.participants.ask("gradients").keys() == {"0", "1", "2"}

    step_until(trainer, "expert 3 is back, from its last backup", notes)
    assert "expert 3 was lost; going on without" in notes.lines
    assert trainer.participants.ask("gradients").keys() == {"0", "1", "2", "3"}


def test_a_client_that_restarts_unnoticed_is_not_taken_for_who_it_was(actors: dict[str, Pool]) -> None:
    config, notes = configured(), Notes()
    trainer, batch = federated(config, actors, notes), make_batch(1)
    trainer.step(make_batch(0))
    trainer.state(epoch=1)
    handle, backup = trainer.participants.instances["3"].handle, trainer.participants.archived[3]
    os.kill(trainer.participants.pids["3"], signal.SIGKILL)
    until = time.monotonic() + 60
    blank = False
    while not blank and time.monotonic() < until:  # Ray has it up again before anybody asks
        with contextlib.suppress(RayError):
            blank = ray.get(handle.is_blank.remote())
    assert blank
    with torch.inference_mode():
        (answer,) = trainer.answer(partial(_through, [config.channel], trainer.model, *batch[::2]))
    assert 3 not in answer.routing.selected_BK
    assert notes.lines == ["expert 3 was lost; going on without"]
    while len(notes.lines) == 1 and time.monotonic() < until:
        trainer.participants.roster()
    assert notes.lines[1] == "expert 3 is back, from its last backup"
    assert ray.get(handle.archive.remote())[3] == backup


def test_a_client_lost_before_the_first_checkpoint_has_had_its_warm_start(actors: dict[str, Pool]) -> None:
    config = configured(train={"warm_start": {"local_epochs": 1}})
    trainer = federated(config, actors)
    initial = dict(trainer.participants.archived)
    trainer.warm_start(OwnSource(), [np.arange(3 * j, 3 * j + 3) for j in range(4)])
    kept = dict(trainer.participants.archived)
    assert all(kept[j][0] != initial[j][0] for j in range(4))
    assert kept == trainer.participants.archive()  # what the clients hold now
    queries, features = 12 * config.frl.dim, 12 * FEATURE_DIM * 3 * 4
    assert trainer.account()["traffic"]["warm_start_bits"] == 32 * (queries + features)


def test_a_run_that_diverges_is_told_so(actors: dict[str, Pool]) -> None:
    trainer = federated(configured(train={"lr": 1e200}), actors)
    trainer.step(make_batch(0))
    with pytest.raises(UserError, match=r"outputs are not finite any more; lower train\.lr"):
        trainer.step(make_batch(1))


def test_a_client_that_is_late_misses_the_round_and_keeps_what_it_knows(actors: dict[str, Pool]) -> None:
    config, notes = configured(train={"client_deadline_s": 5.0}), Notes()
    trainer = federated(config, actors, notes)
    batch = make_batch(0)
    busy = int(trainer.step(batch).selected_BK[0, 0])
    handle = trainer.participants.instances[str(busy)].handle
    handle.nap_before_weighing.remote(8.0)
    result = trainer.step(batch)
    assert all(term.isfinite() for term in result.loss)
    assert f"expert {busy} was late; going on without" in notes.lines
    step_until(trainer, f"expert {busy} is back", notes)


TINY_RUN: dict[str, Any] = {
    "data": {"train_count": 20, "val_count": 5, "image_size": 64},
    "experts": {"count": 4, "hidden": 16, "width": 16},
    "frl": {"dim": 8, "prototypes": 3},
    "routing": {"top_k": 2},
    "train": {"epochs": 3, "batch_size": 8, "threads": 1, "warm_start": {"local_epochs": 1}},
}


class EnoughError(Exception):
    """Ends a run after an epoch."""


def stop(row: dict[str, Any]) -> None:
    raise EnoughError


def test_a_whole_run_is_that_of_one_process_and_goes_on_from_its_checkpoint(
    actors: dict[str, Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Participants, "close", lambda self: None)  # the next test needs them
    joint = Config.model_validate(TINY_RUN | {"data": TINY_RUN["data"] | {"cache_dir": str(tmp_path / "cache")}})
    apart = joint.model_copy(update={"train": joint.train.model_copy(update={"mode": "federated"})})
    train_run(joint, tmp_path / "joint")
    train_federated(apart, tmp_path / "apart", resume=False, report=Silent(), **actors)
    with pytest.raises(EnoughError):
        train_run(joint, tmp_path / "both", after_epoch=stop)
    train_federated(apart, tmp_path / "both", resume=True, report=Silent(), **actors)
    longer = apart.model_copy(update={"train": apart.train.model_copy(update={"epochs": 4})})
    shutil.copytree(tmp_path / "apart", tmp_path / "longer")
    train_federated(longer, tmp_path / "longer", resume=True, report=Silent(), **actors)
    warm_bits = [row["traffic"]["warm_start_bits"] for row in rows_of(tmp_path / "longer")]
    assert warm_bits[0] > 0
    assert warm_bits == warm_bits[:1] * 4  # counted once, and not forgotten
    expected = rows_of(tmp_path / "joint")
    for run in ("apart", "both"):
        for ours, theirs in zip(rows_of(tmp_path / run), expected, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["miou"] == pytest.approx(theirs["miou"], abs=1.0)
            assert ours["load"] == pytest.approx(theirs["load"], abs=0.2)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

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
import torch
from ray.exceptions import RayError

from actors.errors import Fault
from actors.training.client_pool import ClientPool
from actors.training.federated import train_federated
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.features.backbone import FeatureMaps
from airmoe_ray.inference.validate import Inputs, through
from airmoe_ray.radio.ledger import Traffic
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.run import train_run
from airmoe_ray.training.trainer import Trainer
from tests.actors.training.support import (
    Notes,
    Open,
    OwnSource,
    Pool,
    Reused,
    configured,
    differs,
    federated,
    gradients_of,
    make_batch,
    make_model,
    shown_gradients,
    step_until,
    without_the_last,
)
from tests.conftest import CLASSES, FEATURE_DIM

pytestmark = pytest.mark.usefixtures("own_ray")


@pytest.fixture(scope="module")
def actors(own_ray: None) -> dict[str, Pool]:
    return {"learner": Pool(Open), "channel": Pool(Reused)}


CASES: dict[str, dict[str, Any]] = {
    "air": {},
    "bottleneck": {"channel": {"rho_grad": True, "snr_db": 5.0}},
    "substitute": {"channel": {"truncation": "substitute", "gamma_th": 0.4}},
    "all fade": {"channel": {"gamma_th": 5.0}},
    "ideal": {"channel": {"kind": "ideal"}},
    "digital": {"channel": {"kind": "digital", "digital_bits": 4}},
    "as written": {"frl": {"renewal": "soft", "sparsity": "entropy"}, "routing": {"score": "reciprocal"}},
    "clipped": {"train": {"grad_clip": 0.3}},
    "IoU loss": {"train": {"lambda_iou": 0.7}},
    "refiner at the cloud": {"experts": {"refiner": 16}, "channel": {"rho_grad": True}},
    "head and refiner": {"experts": {"shared": True, "refiner": 16}, "train": {"lambda_iou": 0.7, "grad_clip": 0.3}},
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


def test_a_client_killed_is_a_client_the_system_never_had_and_comes_back(actors: dict[str, Pool]) -> None:
    config, notes = configured(), Notes()
    trainer = federated(config, actors, notes)
    trainer.step(make_batch(0))
    archive = trainer.state(epoch=1)
    reference = Trainer(without_the_last(trainer.model, config), config, total_steps=20)
    reference.restore(replace(archive, optimizer={k: v for k, v in archive.optimizer.items() if "experts.3." not in k}))
    os.kill(trainer.pool.pids["3"], signal.SIGKILL)
    with contextlib.suppress(RayError):  # until Ray knows
        trainer.pool.calls["3"].state().get()
    trainer.pool.leave_out({"3": Fault.LOST})
    ours, theirs = trainer.step(make_batch(1)), reference.step(make_batch(1))
    assert differs(ours.loss.ce, theirs.loss.ce) < 1e-9
    for name, parameter in reference.model.query.named_parameters():
        assert differs(dict(trainer.model.query.named_parameters())[name].grad, parameter.grad) < 1e-9
    assert trainer.pool.ask(shown_gradients).keys() == {"0", "1", "2"}

    step_until(trainer, "expert 3 is back, from its last backup", notes)
    assert "expert 3 was lost; going on without" in notes.lines
    assert trainer.pool.ask(shown_gradients).keys() == {"0", "1", "2", "3"}


def test_a_client_that_restarts_unnoticed_is_not_taken_for_who_it_was(actors: dict[str, Pool]) -> None:
    config, notes = configured(), Notes()
    trainer, batch = federated(config, actors, notes), make_batch(1)
    trainer.step(make_batch(0))
    trainer.state(epoch=1)
    host, backup = trainer.pool.calls["3"], trainer.pool.archived[3]
    os.kill(trainer.pool.pids["3"], signal.SIGKILL)
    until = time.monotonic() + 60
    is_new = False
    while not is_new and time.monotonic() < until:  # Ray has it up again before anybody asks
        with contextlib.suppress(RayError):
            is_new = host.needs_restore().get()
    assert is_new
    with torch.inference_mode():
        maps = FeatureMaps(batch.features_BDhw)
        (answer,) = trainer.ask_clients(partial(through, [config.channel], trainer.model, Inputs(maps, batch.ids_B)))
    assert 3 not in answer.routing.selected_BK
    assert notes.lines == ["expert 3 was lost; going on without"]
    while len(notes.lines) == 1 and time.monotonic() < until:
        trainer.pool.roster()
    assert notes.lines[1] == "expert 3 is back, from its last backup"
    assert host.archive().get()[3] == backup


def test_a_client_lost_before_the_first_checkpoint_has_had_its_warm_start(actors: dict[str, Pool]) -> None:
    config = configured(train={"warm_start": {"local_epochs": 1}})
    trainer = federated(config, actors)
    initial = dict(trainer.pool.archived)
    trainer.warm_start(OwnSource(), [np.arange(3 * j, 3 * j + 3) for j in range(4)])
    kept = dict(trainer.pool.archived)
    assert all(kept[j][0] != initial[j][0] for j in range(4))
    assert kept == trainer.pool.archive()  # what the clients hold now
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
    trainer.pool.calls[str(busy)].handle.nap_before_weighing.remote(8.0)
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
    monkeypatch.setattr(ClientPool, "close", lambda self: None)  # the next test needs them
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
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # sums round otherwise, at 1e-7
            assert ours["miou"] == pytest.approx(theirs["miou"], abs=0.05)  # a pixel at a tie
            assert ours["load"] == theirs["load"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

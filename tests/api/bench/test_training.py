"""The bare loop that training is compared with does the experts' work, all of it and nothing else."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.cluster.connection import cluster
from airmoe_ray.config_file import load_config
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.run import Run, open_run
from api.bench.ray_training import HeldRun
from api.bench.training import _bare_loop, _epoch, _routed, _small, _Stored

SETTINGS = {
    "data.image_size": 64,
    "experts.count": 5,
    "experts.hidden": 16,
    "experts.width": 16,
    "train.batch_size": 6,
    "routing.top_k": 3,
    "train.top_k": 2,  # the loop must not run what only answering needs
    "channel.gamma_th": 0.3,  # so that some of the routed fade
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder: Path = tmp_path_factory.mktemp("bench")
    settings = SETTINGS | {"data.cache_dir": folder / "cache"}
    config = _small(load_config("quickstart", [f"{key}={value}" for key, value in settings.items()]))
    return replace(open_run(config, folder / "run", resume=False, report=Silent()), validation=None)


def test_it_runs_each_expert_on_the_samples_that_the_router_gave_it(run):
    batch = next(iter(run.schedule.batches(0, device=run.device)))
    owner_P, sample_P = _routed(run, batch)
    assert owner_P.tolist() == sorted(owner_P.tolist())
    result = run.trainer.step(batch)
    assert len(owner_P) == result.forwards < result.selected_BK.numel()
    pairs = zip(sample_P.tolist(), owner_P.tolist(), strict=True)
    assert all(owner in result.selected_BK[sample] for sample, owner in pairs)


def test_it_leaves_the_trained_model_alone(run):
    stored = list(run.schedule.batches(0, device=run.device))
    loop = _bare_loop(run, stored)
    before = {name: value.clone() for name, value in run.trainer.model.state_dict().items()}
    assert loop() == 24
    assert all(torch.equal(before[name], value) for name, value in run.trainer.model.state_dict().items())
    assert _epoch(replace(run, schedule=_Stored(run.schedule, stored))) == 24
    assert any(not torch.equal(before[name], value) for name, value in run.trainer.model.state_dict().items())


@pytest.mark.slow
def test_a_run_on_ray_is_held_while_it_is_not_its_turn(run, tmp_path):
    with cluster():
        held = HeldRun(run.config, tmp_path / "ray", turns=1)
        assert held.rate() > 0
        count = len(held._rows())
        time.sleep(5)
        assert len(held._rows()) == count < held.config.train.epochs  # an epoch takes a tenth of that
        held.go_on()
        held.thread.join(timeout=120)
    assert len(held._rows()) == held.config.train.epochs

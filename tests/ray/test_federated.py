"""Experts that learn where they live: the same gradients and the same curve as in one process, and real dropouts."""

from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from actors.channel import Channel
from actors.federated_trainer import FederatedTrainer
from actors.host import HostSpec
from actors.learner import LearningHost
from airmoe_ray.checkpoint import ModelCard
from airmoe_ray.config import Config
from airmoe_ray.moe import AirMoE
from airmoe_ray.run import Silent
from airmoe_ray.training import Batch, Trainer
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

    def gradients(self) -> dict[str, Any]:
        """After a step, before the next."""
        named = dict(self.clients.named_parameters())
        return {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}


def configured(**blocks: Any) -> Config:
    train = {"batch_size": 6, "lr": 1e-2, "query_lr_factor": 1.0, "warm_start": {"enabled": False}}
    settings = {"train": SMALL["train"] | train} | {k: v for k, v in SMALL.items() if k != "train"}
    for name, block in blocks.items():
        settings[name] = settings.get(name, {}) | block
    return Config.model_validate(settings)


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
    found = {f"query.{name}": p.grad for name, p in trainer.model.query.named_parameters()}
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
}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_one_process_step_after_step(case: str, actors: dict[str, Pool]) -> None:
    blocks = CASES[case]
    config = configured(**{k: v for k, v in blocks.items() if k != "train"})
    config = config.model_copy(update={"train": config.train.model_copy(update=blocks.get("train", {}))})
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

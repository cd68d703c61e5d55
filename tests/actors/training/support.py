"""Clients that learn in actors which tests use again and again, and what these are compared with."""

import time
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from actors.processes.channel import Channel
from actors.processes.expert_host import ExpertHost, host_actor
from actors.processes.learning_host import LearningHost
from actors.rounds.backward_messages import Weigh
from actors.rounds.calls import Ref
from actors.rounds.messages import Array, HostSpec
from actors.rounds.stubs import LearningHostCalls
from actors.training.federated import FederatedTrainer
from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.storage.checkpoint import ModelCard
from airmoe_ray.training.trainer import Batch
from tests.conftest import CLASSES, FEATURE_DIM, SMALL

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

    def weigh(self, message: Weigh, g_BChw: Array) -> Array:
        time.sleep(self.nap_s)
        self.nap_s = 0.0
        return super().weigh(message, g_BChw)

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


FINE_DIMS = (4, 6)  # channels of the finer maps
TRAIN = {"batch_size": 6, "lr": 1e-2, "query_lr_factor": 1.0, "loss_stride": 1, "warm_start": {"enabled": False}}


def configured(**blocks: dict[str, Any]) -> Config:
    settings = SMALL | {"train": TRAIN}
    return Config.model_validate(settings | {name: settings.get(name, {}) | block for name, block in blocks.items()})


def make_model(config: Config) -> AirMoE:
    model = AirMoE(config, feature_dim=FEATURE_DIM, classes=CLASSES, dilations=(1, 2, 3), fine_dims=FINE_DIMS).double()
    if model.refiner is not None:  # its last layer starts at zero, behind which gradients would be zero, too
        torch.nn.init.normal_(model.refiner.correct.weight, generator=torch.Generator().manual_seed(0))
    return model


def make_batch(step: int, size: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(step)
    features = torch.randn(size, FEATURE_DIM, 3, 4, generator=draw, dtype=torch.float64)
    features += 2 * torch.randn(size, FEATURE_DIM, 1, 1, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (size, 12, 16), generator=draw, dtype=torch.uint8)
    fine = [torch.randn(size, dim, 12 // n, 16 // n, generator=draw).double() for n, dim in enumerate(FINE_DIMS, 1)]
    return Batch(features, labels, [100 * step + i for i in range(size)], tuple(fine))


class Pool:
    """Stands in for an actor class: hands out the same actors again and again."""

    def __init__(self, actor: Any) -> None:
        make = host_actor if issubclass(actor, ExpertHost) else ray.remote
        self.actor, self.made, self.turn = make(actor), [], 0

    def options(self, **options: Any) -> "Pool":
        self.chosen = options
        return self

    def remote(self, *arguments: Any) -> Any:
        place = arguments[0].clients[0] if isinstance(arguments[0], HostSpec) else 0
        if place == len(self.made):
            self.made.append(self.actor.options(**self.chosen).remote(*arguments))
        self.made[place].begin.remote(*arguments)
        return self.made[place]


def federated(config: Config, actors: dict[str, Pool], report: Any = None) -> FederatedTrainer:
    trainer = FederatedTrainer(make_model(config), config, CARD, total_steps=20, report=report or Silent(), **actors)
    trainer.begin()
    return trainer


def shown_gradients(host: LearningHostCalls) -> Ref[dict[str, Any]]:
    """A call of `Open` that other hosts do not take."""
    return Ref(host.handle.gradients.remote())


def gradients_of(trainer: FederatedTrainer) -> dict[str, Tensor | None]:
    """By the names of the in-process model."""
    found = {name: p.grad for name, p in trainer.cloud.named_parameters()}
    shown = trainer.pool.ask(shown_gradients)
    for key, grads in shown.items():
        found |= {
            f"clients.experts.{key}.{k.removeprefix('experts.0.')}": v for k, v in grads.items() if "experts" in k
        }
    prototypes = [shown[key]["frl.prototypes_NMd"][0] for key in sorted(shown, key=int)]
    found["clients.frl.prototypes_NMd"] = torch.stack(prototypes)
    return found


def differs(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


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

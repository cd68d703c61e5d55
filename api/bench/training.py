"""How much of the machine's speed reaches the experts' training: what cache, routing, channel, log and Ray take of it.

Suffixes: B inputs, C classes, P routed pairs, h w grid.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.cluster.connection import cluster
from actors.training.federated import FederatedTrainer
from airmoe_ray.config import Config
from airmoe_ray.data import open_dataset
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.sources import OnlineSource
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.storage.checkpoint import ModelCard, load_checkpoint
from airmoe_ray.storage.shipped import find_model
from airmoe_ray.training.batches import Schedule
from airmoe_ray.training.pixel_losses import Labelling, cross_entropy, sample_pixels
from airmoe_ray.training.run import Run, open_run, train_epoch
from airmoe_ray.training.trainer import Batch, Learning
from api.bench.figures import Figure, Note, by_turns, rate, ratio
from api.bench.ray_training import turns_with_ray

_STEPS = 4  # of an epoch


def training_figures(run: str | Path, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """All figures of this file: experts, routing and channel of a trained run, on procedural scenes."""
    config, _ = load_checkpoint(find_model(run).checkpoint)
    return figures_of(_small(config), folder, rounds=rounds, seconds=seconds, note=note)


def figures_of(config: Config, folder: Path, *, rounds: int, seconds: float, note: Note) -> dict[str, Figure]:
    """The same of a configuration that is small enough."""
    run = open_run(config, folder / "here", resume=False, report=Silent())
    run = replace(run, validation=None)
    stored = list(run.schedule.batches(0, device=run.device))
    in_memory = replace(run, schedule=_Stored(run.schedule, stored))
    online = OnlineSource(open_dataset(config.data, "train"), load_backbone(config.backbone).to(run.device), config)
    in_the_loop = replace(run, schedule=Schedule(online, config))
    bare = _bare_loop(run, stored)

    def compare(other: Callable[[], int], target: float, name: str) -> Figure:
        note(name)
        other()
        pairs = by_turns(lambda: rate(lambda: _epoch(run), seconds), lambda: rate(other, seconds), rounds)
        return ratio(pairs, target=target, better="higher", **_medians(pairs, "trained", "compared_with"))

    figures = {
        "train_cached": compare(lambda: _epoch(in_memory), 0.95, "train_cached: the cache against tensors in memory"),
        "train_cached_over_backbone": compare(
            lambda: _epoch(in_the_loop), 1.0, "train_cached_over_backbone: the cache against the backbone in the loop"
        ),
        "train_limit": compare(bare, 0.85, "train_limit: against the same experts forward and backward, nothing else"),
    }
    note("ray_train_overhead: one worker of Ray Train against this process")
    with cluster():
        figures["ray_train_overhead"] = _ray_overhead(config, folder, rounds)
        note("federated_overhead: clients that learn in actors of their own against this process")
        figures["federated_overhead"] = _federated_overhead(config, folder / "apart", rounds, seconds)
    return figures


def _small(config: Config) -> Config:
    """The model and channel of a configuration, on as many scenes as a round needs."""
    data = config.data.model_copy(
        update={"name": "scenes", "train_count": _STEPS * config.train.batch_size, "val_count": 5}
    )
    warm = config.train.warm_start.model_copy(update={"shared_epochs": 0})
    train = config.train.model_copy(update={"warm_start": warm, "tensorboard": False})
    return config.model_copy(update={"data": data, "train": train})


class _Stored(Schedule):
    """Batches that are in memory already, every epoch the same."""

    def __init__(self, like: Schedule, stored: Sequence[Batch]) -> None:
        super().__init__(like.source, like.config)
        self.stored = stored

    def batches(self, epoch: int, *, device: torch.device) -> Iterator[Batch]:
        """The stored ones."""
        yield from self.stored


def _epoch(run: Run) -> int:
    """Images of one epoch, as `airmoe train` runs it, without its validation."""
    train_epoch(run, 0, Silent())
    return len(run.schedule.source.shape_of)


def _bare_loop(run: Run, stored: Sequence[Batch]) -> Callable[[], int]:
    """The same experts on the same samples, equal weights, cross-entropy and Adam: no routing, channel, FRL or log."""
    clients = copy.deepcopy(run.trainer.model.clients).train()
    head = copy.deepcopy(run.trainer.model.shared)
    parts = [clients.experts] if head is None else [clients.experts, head]
    adam = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=run.config.train.lr, fused=True)
    plans = [_routed(run, batch) for batch in stored]

    def step(batch: Batch, owner_P: Tensor, sample_P: Tensor) -> None:
        logits_PChw, psi_Pd = clients.run(batch.features_BDhw, owner_P, sample_P)
        own_BChw = logits_PChw.new_zeros(len(batch.ids_B), *logits_PChw.shape[1:])
        if head is not None:
            own_BChw = head(batch.features_BDhw)
        fused_BChw = own_BChw.index_add(0, sample_P, logits_PChw)
        stride = run.config.train.loss_stride
        loss = cross_entropy(sample_pixels(fused_BChw, batch.labels_BHW, stride=stride))
        adam.zero_grad(set_to_none=True)
        (loss + psi_Pd.square().mean()).backward()
        adam.step()

    def loop() -> int:
        for batch, plan in zip(stored, plans, strict=True):
            step(batch, *plan)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        return sum(len(batch.ids_B) for batch in stored)

    return loop


@torch.no_grad()
def _routed(run: Run, batch: Batch) -> tuple[Tensor, Tensor]:
    """Owner and sample of every routed pair, grouped by owner."""
    as_trained = run.config.train.routing(run.config.routing)
    routing = run.trainer.model(batch.features_BDhw, batch.ids_B, routing_config=as_trained).routing
    sample_P, rank_P = routing.active_BK.nonzero(as_tuple=True)
    owner_P, order_P = torch.sort(routing.transmit_BK[sample_P, rank_P], stable=True)
    return owner_P, sample_P[order_P]


def _ray_overhead(config: Config, folder: Path, rounds: int) -> Figure:
    pairs = turns_with_ray(config, folder / "ray", 2 * rounds)
    return ratio(pairs, target=0.95, better="higher", **_medians(pairs, "ray_train", "local"))


def _federated_overhead(config: Config, folder: Path, rounds: int, seconds: float) -> Figure:
    """Time per epoch, with the clients there already."""
    here = open_run(config, folder / "here", resume=False, report=Silent())

    def federation(model: AirMoE, card: ModelCard, total_steps: int, labelling: Labelling) -> Learning:
        return FederatedTrainer(model, config, card, total_steps=total_steps, labelling=labelling, report=Silent())

    apart = open_run(config, folder / "apart", resume=False, report=Silent(), federation=federation)
    try:
        loops = [replace(run, validation=None) for run in (apart, here)]
        for loop in loops:
            _epoch(loop)
        rates = by_turns(
            lambda: rate(lambda: _epoch(loops[0]), seconds), lambda: rate(lambda: _epoch(loops[1]), seconds), rounds
        )
    finally:
        apart.trainer.close()
    times = [(1 / a, 1 / b) for a, b in rates]
    return ratio(times, target=1.5, better="lower", **_medians(rates, "federated", "local"))


def _medians(pairs: Sequence[tuple[float, float]], first: str, second: str) -> dict[str, Any]:
    values = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {f"{name}_images_per_s": round(value, 2) for name, value in zip((first, second), values, strict=True)}

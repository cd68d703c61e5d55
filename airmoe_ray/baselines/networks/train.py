"""Training of a network from scratch, as all runs are trained: data, views, order, losses, Adam, schedule, folder.

Suffixes: B inputs, C classes, H W image.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from airmoe_ray.baselines.networks.checkpoint import build_network, fill_network, network_card, save_network
from airmoe_ray.baselines.networks.images import ImageSource
from airmoe_ray.baselines.networks.score import TrainedNetwork, evaluate_network
from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.errors import UserError
from airmoe_ray.features.sources import ahead
from airmoe_ray.runtime.device import pick_device
from airmoe_ray.runtime.progress import Reporter, Silent
from airmoe_ray.runtime.rng import derive_key
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.storage.checkpoint import TrainerState, load_trainer_state
from airmoe_ray.storage.shipped import BEST, LAST
from airmoe_ray.training.batches import Schedule, labelling_of
from airmoe_ray.training.losses import pixel_loss
from airmoe_ray.training.optimizers import descend, learning_rate, optimizers, restore_moments, stored_moments
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.preflight import Data, check_settings, open_data
from airmoe_ray.training.run_folder import (
    Best,
    append_row,
    begin_folder,
    reopen,
    stored_summary,
    summarise,
    write_summary,
)
from airmoe_ray.training.trainer import Batch


class NetworkTrainer:
    """A network with its optimizer; one step at a time."""

    def __init__(self, network: nn.Module, config: Config, *, total_steps: int, labelling: Labelling) -> None:
        self.network, self.config, self.total_steps, self.labelling = network, config, total_steps, labelling
        self.adam, _ = optimizers([(network, 1.0)], None, config)
        self.step_count = 0

    def step(self, batch: Batch) -> Tensor | None:
        """Loss of the batch; None for a single image, whose batch statistics would be its own."""
        self.step_count += 1
        if len(batch.ids_B) == 1:
            return None
        train = self.config.train
        self.network.train()
        # what a network draws in its forward pass (dropout, crops) follows from the step, so that a resumed run goes on
        torch.manual_seed(derive_key(self.config.seed, f"network/{self.step_count}") & (2**63 - 1))
        answer = self.network(batch.features_BDhw)
        logits_BCHW, auxiliary = answer if isinstance(answer, tuple) else (answer, [])
        loss = torch.stack([self._loss(each, batch.labels_BHW) for each in (logits_BCHW, *auxiliary)]).sum()
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        if train.grad_clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), train.grad_clip)
        descend(self.adam, None, rate=learning_rate(self.step_count - 1, self.total_steps, train))
        return loss.detach()

    def _loss(self, logits_BCHW: Tensor, labels_BHW: Tensor) -> Tensor:
        train = self.config.train
        return pixel_loss(logits_BCHW, labels_BHW, train, self.labelling, OneWorker()).weighed(train)


def train_network(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    report: Reporter | None = None,
    after_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Train to the end in this process and return the summary that is also written to `summary.json`."""
    report, started = report or Silent(), time.monotonic()
    check_settings(config)
    data = open_data(config)
    begin_folder(folder, config, resume=resume)
    device = pick_device(config.train.device, threads=config.train.threads)
    report.stage(f"reading {len(data.train)} training images")
    source = ImageSource(data.train, config)
    schedule = Schedule(source, config)
    network = build_network(config, len(data.train.classes.names)).to(device)
    labelling = labelling_of(source, data.train.classes, config.train.class_balance).to(device)
    total_steps = schedule.steps_per_epoch() * config.train.epochs
    trainer = NetworkTrainer(network, config, total_steps=total_steps, labelling=labelling)
    start, best = _restore(folder, trainer) if resume else (0, None)
    if start == config.train.epochs:
        report.line(f"{folder}: all {start} epochs are trained, nothing is left to do")
        return stored_summary(folder)
    (folder / "config.yaml").write_text(to_yaml(config))
    row: dict[str, Any] = {}
    report.stage(f"training {config.train.epochs - start} epochs of {schedule.steps_per_epoch()} steps")
    for epoch in range(start, config.train.epochs):
        row = _train_epoch(trainer, schedule, data, epoch, device, report)
        best = _keep(folder, trainer, data, row, best)
        after_epoch(row)
    summary = summarise(row, best, seconds=time.monotonic() - started)
    write_summary(folder, summary)
    return summary


def _restore(folder: Path, trainer: NetworkTrainer) -> tuple[int, Best | None]:
    """Weights, moments and steps of the run's checkpoint; the epochs already trained, and the best of them."""
    state = load_trainer_state(folder / LAST)
    fill_network(folder / LAST, trainer.network)
    restore_moments(trainer.network, trainer.adam, state.optimizer)
    trainer.step_count = state.step
    done = state.epoch == trainer.config.train.epochs
    return state.epoch, None if done else reopen(folder, epoch=state.epoch)


def _train_epoch(  # noqa: PLR0917
    trainer: NetworkTrainer, schedule: Schedule, data: Data, epoch: int, device: torch.device, report: Reporter
) -> dict[str, Any]:
    """One pass over the data and one validation; the row for `metrics.jsonl`."""
    begun, steps, losses = time.monotonic(), schedule.steps_per_epoch(), []
    epochs = trainer.config.train.epochs
    bar = report.progress(f"epoch {epoch + 1}/{epochs}")
    for step, batch in enumerate(ahead(schedule.batches(epoch, device=device)), start=1):
        loss = trainer.step(batch)
        if loss is not None:
            losses.append(float(loss))
            if not torch.isfinite(loss):
                raise UserError(f"the loss is not finite by step {step} of epoch {epoch + 1}; lower train.lr")
        bar(step, steps)
    seconds = time.monotonic() - begun
    row: dict[str, Any] = {"epoch": epoch + 1, "loss": sum(losses) / max(len(losses), 1)}
    row |= {"images_per_s": len(data.train) / seconds, "seconds": seconds}
    if data.held_out is not None:
        scores = evaluate_network(TrainedNetwork(trainer.config, trainer.network), data.held_out).scores
        row |= {name: scores[name] for name in ("miou", "mf1")}
        row |= {"miou_ideal": row["miou"], "mf1_ideal": row["mf1"]}
        row["validation_seconds"] = time.monotonic() - begun - seconds
    score = f"  mIoU {row['miou']:5.1f}" if "miou" in row else ""
    report.line(f"epoch {epoch + 1:>3}/{epochs}  loss {row['loss']:.3f}{score}  {row['images_per_s']:.1f} images/s")
    return row


def _keep(folder: Path, trainer: NetworkTrainer, data: Data, row: dict[str, Any], best: Best | None) -> Best | None:
    """The row, then the checkpoints, as other runs keep them."""
    append_row(folder, row)
    epoch, train = row["epoch"], trainer.config.train
    card = network_card(trainer.config, data.train.classes)
    if "miou" in row and (best is None or row["miou"] > best.miou):
        best = Best(epoch, row["miou"])
        bare = TrainerState(epoch, trainer.step_count, {})
        save_network(folder / BEST, trainer.network, trainer.config, card, bare)
    if epoch % train.checkpoint_every == 0 or epoch == train.epochs:
        state = TrainerState(epoch, trainer.step_count, stored_moments(trainer.network, trainer.adam))
        save_network(folder / LAST, trainer.network, trainer.config, card, state)
    return best

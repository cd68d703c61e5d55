"""A training run from configuration to checkpoint, in one process: data, features, warm start, epochs, validation.

DIR/config.yaml  DIR/metrics.jsonl  DIR/summary.json (once finished)  DIR/checkpoint/
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from airmoe_ray.backbone import Backbone, load_backbone
from airmoe_ray.checkpoint import ModelCard, save_checkpoint
from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.data import SegmentationDataset, held_out, open_dataset
from airmoe_ray.data.base import ClassTable
from airmoe_ray.data.transforms import parse_view
from airmoe_ray.device import pick_device
from airmoe_ray.errors import UserError
from airmoe_ray.evaluation import validate
from airmoe_ray.experts import dilations_for
from airmoe_ray.features import FeatureCache, Progress, cache_bytes, cached_features
from airmoe_ray.ledger import check_budget
from airmoe_ray.losses import LossTerms
from airmoe_ray.metrics import balancedness
from airmoe_ray.moe import AirMoE
from airmoe_ray.run_folder import append_row, begin_folder, restore, stored_summary
from airmoe_ray.sources import CachedSource, OnlineSource, Source
from airmoe_ray.training import Schedule, Trainer, class_weights
from airmoe_ray.warm_start import client_data, fill_libraries, pooled_features
from airmoe_ray.world import Alone, World, first_then_others


class Reporter(Protocol):
    """Where progress goes; the command line draws bars, tests stay silent."""

    def line(self, text: str) -> None:
        """One line that stays."""
        ...

    def progress(self, title: str) -> Progress:
        """A bar; the returned function moves it to (done, total)."""
        ...

    def note(self, text: str) -> None:
        """A live note beside the bar."""
        ...


class Silent:
    """No output."""

    def line(self, text: str) -> None:
        """Nothing."""

    def progress(self, title: str) -> Progress:
        """Nothing."""
        return lambda done, total: None

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass
class Run:
    """Everything a loop over epochs needs."""

    config: Config
    folder: Path
    card: ModelCard
    trainer: Trainer
    schedule: Schedule
    validation: tuple[FeatureCache, SegmentationDataset] | None
    device: torch.device
    start_epoch: int = 0


def train_run(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    report: Reporter | None = None,
    world: World | None = None,
    after_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Train to the end and return the summary that is also written to `summary.json`.

    Each of several workers calls this; the first one writes files and reports.
    """
    world = world or Alone()
    report = (report if world.rank == 0 else None) or Silent()
    begun = time.monotonic()
    run = open_run(config, folder, resume=resume, report=report, world=world)
    if run.start_epoch == config.train.epochs:
        report.line(f"{folder}: all {config.train.epochs} epochs are trained, nothing is left to do")
        return stored_summary(folder)
    row: dict[str, Any] = {}
    for epoch in range(run.start_epoch, config.train.epochs):
        row = train_epoch(run, epoch, report)
        if world.rank == 0:
            append_row(folder, row)  # before the checkpoint: a resumed run drops rows it will write again
            if (epoch + 1) % config.train.checkpoint_every == 0 or epoch + 1 == config.train.epochs:
                save_checkpoint(folder / "checkpoint", run.trainer.model, run.card, run.trainer.state(epoch=epoch + 1))
        after_epoch(row)
    summary = {"epochs": config.train.epochs, "seconds": round(time.monotonic() - begun, 1), "last": row}
    if world.rank == 0:
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def open_run(config: Config, folder: Path, *, resume: bool, report: Reporter, world: World | None = None) -> Run:
    """Check what can be checked before the work starts, then build or restore everything."""
    world = world or Alone()
    check_budget(config)
    for view in config.data.views:
        parse_view(view)
    device = pick_device(config.train.device, threads=config.train.threads)
    dataset = open_dataset(config.data, "train")
    val_dataset = held_out(config.data, dataset)
    warm = config.train.warm_start.enabled and not resume
    clients_data = client_data([dataset.domain_of(i) for i in range(len(dataset))], config) if warm else []
    if world.rank == 0:
        begin_folder(folder, config, resume=resume)
    backbone = load_backbone(config.backbone).to(device)
    validation = None
    with first_then_others(world):
        source = _open_source(dataset, backbone, config, report)
        if val_dataset is None:
            report.line("no held-out images, so no validation during training; data.val_fraction holds some out")
        else:
            bar = report.progress("features (validation)")
            validation = (cached_features(val_dataset, backbone, config, "identity", progress=bar), val_dataset)
    dilations = dilations_for(config.experts, max(max(grid) for grid in source.grids))
    classes = dataset.classes
    card = model_card(classes, backbone, dilations)
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(classes.names), dilations=dilations).to(device)
    schedule = Schedule(source, config, world)
    weight_C = class_weights(source, len(classes.names), config.train.class_balance)
    trainer = Trainer(
        model,
        config,
        total_steps=schedule.steps_per_epoch() * config.train.epochs,
        class_weight_C=None if weight_C is None else weight_C.to(device),
        world=world,
    )
    start_epoch = 0
    if resume:
        start_epoch = restore(folder, trainer, card)
    elif warm:
        fill_libraries(model, pooled_features(source), clients_data, config)
    if world.rank == 0:
        (folder / "config.yaml").write_text(to_yaml(config))
    return Run(config, folder, card, trainer, schedule, validation, device, start_epoch)


def model_card(classes: ClassTable, backbone: Backbone, dilations: Sequence[int]) -> ModelCard:
    """`model.json` of a model on these classes and features."""
    return ModelCard(
        classes=list(classes.names),
        palette=[list(colour) for colour in classes.palette],
        feature_dim=backbone.dim,
        dilations=list(dilations),
        backbone_name=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
    )


def _open_source(dataset: SegmentationDataset, backbone: Backbone, config: Config, report: Reporter) -> Source:
    if not config.train.cache:
        report.line(f"{len(dataset)} training images, {backbone.name} in the loop, augmented")
        return OnlineSource(dataset, backbone, config)
    size = cache_bytes(dataset, backbone, config) * len(config.data.views) / 1e6
    report.line(f"{len(dataset)} training images, {backbone.name} features of {size:.0f} MB in {config.data.cache_dir}")
    views = []
    for view in config.data.views:
        bar = report.progress(f"features ({view})")
        views.append(cached_features(dataset, backbone, config, view, progress=bar))
    return CachedSource(views, config)


def train_epoch(run: Run, epoch: int, report: Reporter) -> dict[str, Any]:
    """One pass over the data and one validation; the row for `metrics.jsonl`."""
    begun, steps = time.monotonic(), run.schedule.steps_per_epoch()
    bar = report.progress(f"epoch {epoch + 1}/{run.config.train.epochs}")
    selected_N = np.zeros(run.config.experts.count, dtype=np.int64)
    terms = torch.zeros(len(LossTerms._fields))
    images = 0
    for step, batch in enumerate(run.schedule.batches(epoch, device=run.device)):
        result = run.trainer.step(batch)
        terms += torch.stack(result.loss).cpu()
        selected_N += np.bincount(result.selected_BK.cpu().numpy().ravel(), minlength=len(selected_N))
        images += result.images
        if not terms[0].isfinite():
            raise UserError(
                f"the loss is not finite in step {step + 1} of epoch {epoch + 1}; lower train.lr or set train.grad_clip"
            )
        report.note(f"loss {float(result.loss.total):.3f}  {images / (time.monotonic() - begun):.1f} images/s")
        bar(step + 1, steps)
    run.trainer.end_epoch()
    selected_N = run.trainer.world.total(torch.from_numpy(selected_N)).numpy()
    seconds = time.monotonic() - begun
    names = ("loss", *LossTerms._fields[1:])
    row: dict[str, Any] = {"epoch": epoch + 1, **dict(zip(names, (terms / steps).tolist(), strict=True))}
    row |= {"images_per_s": images / seconds, "seconds": seconds}
    if selected_N.any():  # else one expert learned for all, and nobody was routed
        load = (selected_N / selected_N.mean()).round(3).tolist()
        row |= {"balancedness": balancedness(selected_N), "load": load}
    if run.validation is not None and run.trainer.world.rank == 0:
        scores = validate(run.trainer.model, *run.validation)
        row |= {"miou": scores["miou"], "nmi": scores["routing"]["nmi_domain_expert"]}
    report.line(describe(row, run.config.train.epochs))
    return row


def describe(row: dict[str, Any], epochs: int) -> str:
    """One line per epoch."""
    parts = [
        f"epoch {row['epoch']:>3}/{epochs}",
        f"loss {row['loss']:.3f} (ce {row['ce']:.3f}, lb {row['lb']:.3f}, align {row['align']:.3f})",
        f"mIoU {row['miou']:5.1f}" if "miou" in row else "",
        f"balance {row['balancedness']:.2f}" if "balancedness" in row else "shared expert",
        f"{row['images_per_s']:.1f} images/s",
    ]
    return "  ".join(part for part in parts if part)

"""A training run from configuration to checkpoint, in one process: data, features, warm start, epochs, validation.

DIR/config.yaml  DIR/metrics.jsonl  DIR/summary.json  DIR/checkpoint/
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from airmoe_ray.backbone import Backbone, load_backbone
from airmoe_ray.checkpoint import ModelCard, load_checkpoint, load_trainer_state, load_weights, save_checkpoint
from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.data import SegmentationDataset, held_out, open_dataset
from airmoe_ray.data.transforms import parse_view
from airmoe_ray.device import pick_device
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.evaluation import validate
from airmoe_ray.experts import dilations_for
from airmoe_ray.features import FeatureCache, Progress, cache_bytes, cached_features
from airmoe_ray.ledger import check_budget
from airmoe_ray.metrics import balancedness
from airmoe_ray.moe import AirMoE
from airmoe_ray.sources import CachedSource, OnlineSource, Source
from airmoe_ray.training import Schedule, Trainer, class_weights
from airmoe_ray.warm_start import client_data, fill_libraries, pooled_features


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

    @property
    def checkpoint(self) -> Path:
        """The run's checkpoint folder."""
        return self.folder / "checkpoint"


def train_run(config: Config, folder: Path, *, resume: bool = False, report: Reporter | None = None) -> dict[str, Any]:
    """Train to the end and return the summary that is also written to `summary.json`."""
    report = report or Silent()
    begun = time.monotonic()
    run = open_run(config, folder, resume=resume, report=report)
    row: dict[str, Any] = {}
    for epoch in range(run.start_epoch, config.train.epochs):
        row = train_epoch(run, epoch, report)
        if (epoch + 1) % config.train.checkpoint_every == 0 or epoch + 1 == config.train.epochs:
            save_checkpoint(run.checkpoint, run.trainer.model, run.card, run.trainer.state(epoch=epoch + 1))
        with (folder / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
    summary = {"epochs": config.train.epochs, "seconds": round(time.monotonic() - begun, 1), "last": row}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def open_run(config: Config, folder: Path, *, resume: bool, report: Reporter) -> Run:
    """Check what can be checked before the work starts, then build or restore everything."""
    check_budget(config)
    for view in config.data.views:
        parse_view(view)
    _prepare_folder(folder, resume=resume)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    device = pick_device(config.train.device)
    dataset, val_dataset = open_dataset(config.data, "train"), held_out(config.data)
    backbone = load_backbone(config.backbone).to(device)
    source = _open_source(dataset, backbone, config, report)
    validation = None
    if val_dataset is not None:
        bar = report.progress("features (validation)")
        validation = (cached_features(val_dataset, backbone, config, "identity", progress=bar), val_dataset)
    dilations = dilations_for(config.experts, max(max(grid) for grid in source.grids))
    classes = dataset.classes
    card = ModelCard(
        classes=list(classes.names),
        palette=[list(colour) for colour in classes.palette],
        feature_dim=backbone.dim,
        dilations=list(dilations),
        backbone_name=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
    )
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(classes.names), dilations=dilations).to(device)
    schedule = Schedule(source, config)
    weight = class_weights(source, len(classes.names), config.train.class_balance)
    trainer = Trainer(
        model,
        config,
        total_steps=schedule.steps_per_epoch() * config.train.epochs,
        class_weight_C=None if weight is None else weight.to(device),
    )
    run = Run(config, folder, card, trainer, schedule, validation, device)
    if resume:
        _restore(run)
    elif config.train.warm_start.enabled:
        domains = [dataset.domain_of(i) for i in range(len(dataset))]
        fill_libraries(model, pooled_features(source), client_data(domains, config), config)
    (folder / "config.yaml").write_text(to_yaml(config))
    return run


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
    terms = torch.zeros(5)
    images = 0
    for step, batch in enumerate(run.schedule.batches(epoch, device=run.device)):
        result = run.trainer.step(batch)
        terms += torch.stack(result.loss).cpu()
        selected_N += np.bincount(result.selected_BK.cpu().numpy().ravel(), minlength=len(selected_N))
        images += len(batch.ids_B)
        report.note(f"loss {float(result.loss.total):.3f}  {images / (time.monotonic() - begun):.1f} images/s")
        bar(step + 1, steps)
    run.trainer.end_epoch()
    seconds = time.monotonic() - begun
    names = ("loss", "ce", "lb", "frl", "align")
    row: dict[str, Any] = {"epoch": epoch + 1, **dict(zip(names, (terms / steps).tolist(), strict=True))}
    row |= {"images_per_s": images / seconds, "seconds": seconds, "balancedness": balancedness(selected_N)}
    row["load"] = (selected_N / max(selected_N.mean(), 1)).round(3).tolist()
    if run.validation is not None:
        scores = validate(run.trainer.model, *run.validation)
        row |= {"miou": scores["miou"], "nmi": scores["routing"]["nmi_domain_expert"]}
    quality = f"mIoU {row['miou']:5.1f}  " if "miou" in row else ""
    report.line(
        f"epoch {epoch + 1:>3}/{run.config.train.epochs}  loss {row['loss']:.3f} (ce {row['ce']:.3f}, "
        f"lb {row['lb']:.3f}, align {row['align']:.3f})  {quality}balance {row['balancedness']:.2f}  "
        f"{row['images_per_s']:.1f} images/s"
    )
    return row


def _prepare_folder(folder: Path, *, resume: bool) -> None:
    if not resume and (folder / "checkpoint").exists():
        raise UserError(f"{folder}: already holds a trained run; add --resume to continue it, or choose another --run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot write here ({error.strerror}); choose another --run") from None


def _restore(run: Run) -> None:
    """Weights, optimizer and position from the run's checkpoint; later rows of the log are dropped."""
    stored, card = load_checkpoint(run.checkpoint)
    if (stored.experts, stored.frl, card.classes) != (run.config.experts, run.config.frl, run.card.classes):
        raise CheckpointError(
            f"{run.checkpoint}: was trained with other experts, FRL or classes; resume with its config"
        )
    load_weights(run.checkpoint, run.trainer.model)
    state = load_trainer_state(run.checkpoint)
    run.trainer.restore(state)
    run.start_epoch = state.epoch
    log = run.folder / "metrics.jsonl"
    if log.exists():
        rows = [line for line in log.read_text().splitlines() if json.loads(line)["epoch"] <= state.epoch]
        partial = log.with_suffix(".partial")
        partial.write_text("".join(row + "\n" for row in rows))
        os.replace(partial, log)

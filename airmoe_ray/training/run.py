"""A training run from configuration to checkpoint, in one process: data, features, warm start, epochs, validation.

DIR/config.yaml  DIR/metrics.jsonl  DIR/summary.json (once finished)  DIR/checkpoint/  DIR/checkpoint-best/
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from airmoe_ray.config import Config
from airmoe_ray.config_file import to_yaml
from airmoe_ray.data import SegmentationDataset
from airmoe_ray.data.base import ClassTable
from airmoe_ray.data.mix import Mix
from airmoe_ray.errors import UserError
from airmoe_ray.features.backbone import Backbone, load_training_backbone
from airmoe_ray.features.cache_builder import cache_bytes, cached_features, cached_views
from airmoe_ray.features.cache_reader import FeatureCache
from airmoe_ray.features.sources import CachedSource, OnlineSource, Source, ahead, loop_seconds
from airmoe_ray.inference.knowledge import Knowledge
from airmoe_ray.inference.scores import balancedness
from airmoe_ray.inference.validate import validate
from airmoe_ray.model.experts import dilations_for
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.device import pick_device
from airmoe_ray.runtime.progress import Reporter, Silent
from airmoe_ray.runtime.rng import training_index
from airmoe_ray.runtime.workers import OneWorker, Workers, first_then_others
from airmoe_ray.storage.checkpoint import ModelCard
from airmoe_ray.training.batches import Schedule, labelling_of
from airmoe_ray.training.epoch_log import TensorBoard, describe, describe_saving
from airmoe_ray.training.losses import LossTerms
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.preflight import Data, check_run, check_space, open_data
from airmoe_ray.training.run_folder import (
    Best,
    append_row,
    begin_folder,
    reopen,
    restore,
    save_epoch,
    stored_summary,
    summarise,
    write_summary,
)
from airmoe_ray.training.trainer import Learning, Trainer
from airmoe_ray.training.warm_start import client_data

# a trainer whose clients live elsewhere, for (model, card, total steps, labelling)
Federation = Callable[[AirMoE, ModelCard, int, Labelling], Learning]
_LOOK_EVERY = {"cuda": 10}  # steps between looks at the loss, each of which a GPU has to be waited for


Validation = tuple[FeatureCache, SegmentationDataset]


@dataclass
class Run:
    """Everything a loop over epochs needs."""

    config: Config
    folder: Path
    card: ModelCard
    trainer: Learning
    schedule: Schedule
    validation: Validation | None
    device: torch.device
    knowledge: Knowledge  # what clients are routed for
    start_epoch: int = 0
    best: Best | None = None
    loop_s: float | None = None  # what the backbone in the loop would add, per image; None where it is in the loop


def train_run(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    report: Reporter | None = None,
    checked: bool = False,
    workers: Workers | None = None,
    device: torch.device | None = None,
    federation: Federation | None = None,
    weights: bytes | None = None,
    after_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Train to the end and return the summary that is also written to `summary.json`.

    Each of several workers calls this; the first one writes files and reports. `checked`: see `open_run`. `device`
    where the configured `auto` is not this worker's. `federation` makes the trainer where clients learn elsewhere.
    `weights` are those of the backbone, where the file that is configured is on another machine.
    """
    workers = workers or OneWorker()
    report = (report if workers.rank == 0 else None) or Silent()
    started = time.monotonic()
    run = open_run(
        config,
        folder,
        resume=resume,
        report=report,
        checked=checked,
        workers=workers,
        device=device,
        federation=federation,
        weights=weights,
    )
    try:
        if run.start_epoch == config.train.epochs:
            report.line(f"{folder}: all {run.start_epoch} epochs are trained, nothing is left to do")
            summary = stored_summary(folder)
        else:
            row = _train_epochs(run, report, after_epoch)
            summary = summarise(row, run.best, seconds=time.monotonic() - started)
    finally:
        run.trainer.close()
    if workers.rank == 0:
        write_summary(folder, summary)
    return summary


def _train_epochs(run: Run, report: Reporter, after_epoch: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All epochs that are left; the last row."""
    epochs, first = run.config.train.epochs, run.trainer.workers.rank == 0
    board = None
    if run.config.train.tensorboard and first:
        board = TensorBoard(run.folder / "tensorboard", epochs_done=run.start_epoch)
    row: dict[str, Any] = {}
    begun = time.monotonic()
    report.stage(f"training {epochs - run.start_epoch} epochs of {run.schedule.steps_per_epoch()} steps")
    for epoch in range(run.start_epoch, epochs):
        row = train_epoch(run, epoch, report)
        if run.loop_s is not None and epoch == run.start_epoch:
            report.line(describe_saving(row, run.loop_s / run.trainer.workers.size))
        per_epoch_s = (time.monotonic() - begun) / (epoch + 1 - run.start_epoch)
        report.line(describe(row, epochs, per_epoch_s * (epochs - epoch - 1)))
        if first:
            _keep(run, row)
            if board is not None:
                board.add(row)
        after_epoch(row)
    return row


def open_run(
    config: Config,
    folder: Path,
    *,
    resume: bool,
    report: Reporter,
    checked: bool = False,
    workers: Workers | None = None,
    device: torch.device | None = None,
    federation: Federation | None = None,
    weights: bytes | None = None,
) -> Run:
    """Build or restore everything that a loop over epochs needs.

    `checked`: the process that was given the command has found its settings sound, and room for the run.
    """
    workers = workers or OneWorker()
    assert config.model == "airmoe", "single models have a loop of their own, in baselines/networks"
    data = _open_data(config, folder, resume=resume, checked=checked, workers=workers)
    device = device or pick_device(config.train.device, threads=config.train.threads)
    backbone = load_training_backbone(config, weights=weights).to(device)
    if not checked:
        check_space(folder, config, feature_dim=backbone.dim, classes=len(data.train.classes.names))
    with first_then_others(workers):
        source = _open_source(data.train, backbone, config, report)
        validation = _open_validation(data, backbone, config, report)
    card = _make_card(data.train.classes, backbone, source, config)
    schedule = _make_schedule(data.train, source, config, workers)
    trainer = _make_trainer(config, card, data.train.classes, schedule, device=device, federation=federation)
    knowledge = Knowledge(data.train, clients=config.experts.count)
    run = Run(config, folder, card, trainer, schedule, validation, device, knowledge)
    if resume:
        _resume(run)
    else:
        _begin(run, data.train, report)
    if workers.rank == 0:
        (folder / "config.yaml").write_text(to_yaml(config))
        if config.train.cache:
            run.loop_s = loop_seconds(OnlineSource(data.train, backbone, config), source)
    return run


def _open_data(config: Config, folder: Path, *, resume: bool, checked: bool, workers: Workers) -> Data:
    """The data, after all checks where nobody has made them; the first worker prepares the folder either way."""
    if workers.rank == 0 and not checked:
        return check_run(config, folder, resume=resume)
    data = open_data(config)
    if workers.rank == 0:
        begin_folder(folder, config, resume=resume)
    return data


def _make_card(table: ClassTable, backbone: Backbone, source: Source, config: Config) -> ModelCard:
    """The card of a model whose dilations fit the largest grid of the data."""
    dilations = dilations_for(config.experts, max(max(grid) for grid in source.grids))
    return model_card(table, backbone, dilations, refiner=config.experts.refiner)


def _make_schedule(dataset: SegmentationDataset, source: Source, config: Config, workers: Workers) -> Schedule:
    """Which images each step sees, with their domains, and by part where the dataset is a mix."""
    domains_S = np.array([dataset.domain_of(i) for i in range(len(dataset))])
    return Schedule(source, config, workers, **_mixture(dataset), domains_S=domains_S)


def _mixture(dataset: SegmentationDataset) -> dict[str, Any]:
    """How a schedule visits the parts of a mix; nothing where the dataset is none."""
    if not isinstance(dataset, Mix):
        return {}
    parts_S = np.array([dataset.part_of(i) for i in range(len(dataset))])
    return {"parts_S": parts_S, "shares": [part.share for part in dataset.parts]}


def _open_validation(data: Data, backbone: Backbone, config: Config, report: Reporter) -> Validation | None:
    if data.held_out is None:
        report.line("no held-out images, so no validation during training; data.val_fraction holds some out")
        return None
    bar = report.progress("features (validation)")
    return cached_features(data.held_out, backbone, config, "identity", progress=bar), data.held_out


def _make_trainer(
    config: Config,
    card: ModelCard,
    table: ClassTable,
    schedule: Schedule,
    *,
    device: torch.device,
    federation: Federation | None,
) -> Learning:
    """A new model with its optimizers, in this process or with clients that learn elsewhere."""
    classes = len(card.classes)
    model = AirMoE(
        config,
        feature_dim=card.feature_dim,
        classes=classes,
        dilations=card.dilation_rates,
        fine_dims=card.fine_dims,
    ).to(device)
    labelling = labelling_of(schedule.source, table, config.train.class_balance).to(device)
    total_steps = schedule.steps_per_epoch() * config.train.epochs
    if federation is not None:
        return federation(model, card, total_steps, labelling)
    return Trainer(model, config, total_steps=total_steps, labelling=labelling, workers=schedule.workers)


def _resume(run: Run) -> None:
    """Go on from the run's checkpoint."""
    run.start_epoch = restore(run.folder, run.trainer, run.card)
    if run.trainer.workers.rank == 0 and run.start_epoch < run.config.train.epochs:
        run.best = reopen(run.folder, epoch=run.start_epoch)


def _begin(run: Run, dataset: SegmentationDataset, report: Reporter) -> None:
    """Start from the beginning; the first worker's warm start is everybody's."""
    trainer, config = run.trainer, run.config
    trainer.begin()
    if config.train.warm_start.enabled and trainer.workers.rank == 0:
        report.stage(f"warm start of {config.experts.count} clients, each from its own data")
        domains = [dataset.domain_of(i) for i in range(len(dataset))]
        trainer.warm_start(run.schedule.source, client_data(domains, config))
    trainer.workers.follow_first(v for v in trainer.model.state_dict().values() if v.is_floating_point())


def model_card(classes: ClassTable, backbone: Backbone, dilations: Sequence[int], *, refiner: int = 0) -> ModelCard:
    """`model.json` of a model on these classes and features."""
    return ModelCard(
        classes=list(classes.names),
        palette=[list(colour) for colour in classes.palette],
        feature_dim=backbone.dim,
        dilations=list(dilations),
        backbone_name=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
        fine_dims=[channels for channels, _ in backbone.fine_maps(refiner)],
    )


def _open_source(dataset: SegmentationDataset, backbone: Backbone, config: Config, report: Reporter) -> Source:
    if not config.train.cache:
        report.line(f"{len(dataset)} training images, {backbone.name} in the loop, augmented")
        return OnlineSource(dataset, backbone, config)
    size = cache_bytes(dataset, backbone, config) * len(config.data.views) / 1e6
    report.line(f"{len(dataset)} training images, {backbone.name} features of {size:.0f} MB in {config.data.cache_dir}")
    return CachedSource(cached_views(dataset, backbone, config, report.progress), config)


def train_epoch(run: Run, epoch: int, report: Reporter) -> dict[str, Any]:
    """One pass over the data and one validation; the row for `metrics.jsonl`."""
    begun, steps = time.monotonic(), run.schedule.steps_per_epoch()
    workers, images = run.trainer.workers, len(run.schedule.source.shape_of)
    bar = report.progress(f"epoch {epoch + 1}/{run.config.train.epochs}")
    # summed where the model is: a GPU need not wait for the log
    selected_N = torch.zeros(run.config.experts.count, dtype=torch.int64, device=run.device)
    terms = torch.zeros(len(LossTerms._fields), device=run.device)
    batches = run.schedule.batches(epoch, device=run.device)
    for step, batch in enumerate(ahead(batches) if run.config.train.cache else batches, start=1):
        result = run.trainer.step(batch)
        terms += torch.stack(result.loss)
        selected_N += torch.bincount(result.selected_BK.flatten(), minlength=len(selected_N))
        run.knowledge.add([training_index(i) for i in batch.ids_B], result.selected_BK)
        if step % _LOOK_EVERY.get(run.device.type, 1) == 0 or step == steps:
            _check_finite(terms, step, epoch)
            rate = images * step / steps / (time.monotonic() - begun)
            report.note(f"loss {float(terms[0]) / step:.3f}  {rate:.1f} images/s")
        bar(step, steps)
    run.trainer.end_epoch()
    run.card = replace(run.card, clients=run.knowledge.words(workers) or run.card.clients)
    routed_N = workers.total(selected_N).cpu().numpy()
    seconds = time.monotonic() - begun
    row: dict[str, Any] = {"epoch": epoch + 1, **dict(zip(LossTerms._fields, (terms / steps).tolist(), strict=True))}
    row["loss"] = row.pop("total")
    row |= {"images_per_s": images / seconds, "seconds": seconds}
    if routed_N.any():  # else one expert learned for all, and nobody was routed
        row |= {"balancedness": balancedness(routed_N), "load": (routed_N / routed_N.mean()).round(3).tolist()}
    row |= run.trainer.account()
    if run.validation is not None:
        scores = validate(run.trainer.model, *run.validation, workers, ask_clients=run.trainer.ask_clients)
        row |= {name: scores[name] for name in ("miou", "miou_ideal", "mf1", "mf1_ideal")}
        row |= {"nmi": scores["routing"]["nmi_domain_expert"], "validation_seconds": time.monotonic() - begun - seconds}
    return row


def _check_finite(terms: torch.Tensor, step: int, epoch: int) -> None:
    """All workers see the same sums, so all of them stop."""
    if not terms[0].isfinite():
        raise UserError(
            f"the loss is not finite by step {step} of epoch {epoch + 1}; lower train.lr or set train.grad_clip"
        )


def _keep(run: Run, row: dict[str, Any]) -> None:
    """The row, then the checkpoints: a resumed run drops rows that it will write again."""
    epoch, train = row["epoch"], run.config.train
    append_row(run.folder, row)
    better = "miou" in row and (run.best is None or row["miou"] > run.best.miou)
    if better:
        run.best = Best(epoch, row["miou"])
    due = epoch % train.checkpoint_every == 0 or epoch == train.epochs
    save_epoch(run.folder, run.trainer, run.card, epoch=epoch, best=better, last=due)

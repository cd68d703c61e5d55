"""One run of a comparison, from training to record; goes on where an earlier try stopped."""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from airmoe_ray import __version__
from airmoe_ray.baselines.networks.checkpoint import load_network
from airmoe_ray.baselines.networks.score import TrainedNetwork, evaluate_network
from airmoe_ray.baselines.networks.train import train_network
from airmoe_ray.config_file import parse_config, read_yaml
from airmoe_ray.data import open_dataset
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.channels import scored_channels
from airmoe_ray.experiments.compare.plan import SPLIT, Cell, data_facts, method_of
from airmoe_ray.experiments.compare.records import (
    Record,
    current_commit,
    pack,
    settings_hash,
    told_settings,
    write_record,
)
from airmoe_ray.experiments.compare.size import flops_of, model_size, network_size, parameters
from airmoe_ray.inference.evaluate import Evaluation, evaluate_on
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.runtime.rng import evaluation_id
from airmoe_ray.storage.folder_swap import recover
from airmoe_ray.storage.shipped import LAST
from airmoe_ray.training.run import train_run

_CURVE = ("epoch", "miou", "miou_ideal", "mf1", "mf1_ideal", "loss", "seconds")
_KEPT = ("miou", "mf1", "mpre", "mrec", "per_class", "per_domain", "routing", "communication", "images", "draws")


def run_cell(
    cell: Cell,
    out: Path,
    *,
    draws: int,
    report: Reporter | None = None,
    after_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Record:
    """Train; score on the exact sum and, where outputs cross a channel, on 20 dB air and its own; write the record."""
    folder = cell.folder(out)
    recover(folder / LAST)
    resume = (folder / LAST).exists()
    if resume:
        _check_same(cell, folder)
    train = train_run if cell.config.model == "airmoe" else train_network
    summary = train(cell.config, folder, resume=resume, report=report, after_epoch=after_epoch)
    begun = time.monotonic()
    scored = _score_network(cell, folder) if cell.config.model != "airmoe" else _score(cell, folder, draws=draws)
    record = _record(cell, folder, scored)
    record.seconds.update(total=summary["seconds"], score=time.monotonic() - begun)
    write_record(out / "records", record)
    return record


class _Scored(NamedTuple):
    """A trained model's evaluations by channel, and its size."""

    found: dict[str, Evaluation]
    size: dict[str, float]
    prototypes: dict[str, float]


def _score(cell: Cell, folder: Path, *, draws: int) -> _Scored:
    segmenter = Segmenter.load(folder / LAST)
    channels = scored_channels(cell.config.channel, crosses=method_of(cell).air)
    dataset = open_dataset(cell.config.data, SPLIT)
    found = evaluate_on(segmenter, dataset, list(channels.values()), draws=draws)
    size = model_size(segmenter.model) | {"frozen": parameters(segmenter.backbone)}
    size["flops"] = flops_of(lambda: _answer(segmenter, dataset[0].image))
    frl = segmenter.model.clients.frl
    norm = float(frl.prototypes_NMd.detach().norm(dim=-1)[frl.valid_NM].mean())
    return _Scored(dict(zip(channels, found, strict=True)), size, {"norm": norm})


def _score_network(cell: Cell, folder: Path) -> _Scored:
    trained = TrainedNetwork(cell.config, load_network(folder / LAST)[-1])
    dataset = open_dataset(cell.config.data, SPLIT)
    prepared = trained.prepare(dataset[0].image)
    return _Scored(
        {"ideal": evaluate_network(trained, dataset)},
        network_size(trained.network) | {"flops": flops_of(lambda: trained.logits([prepared]))},
        {},
    )


def _check_same(cell: Cell, folder: Path) -> None:
    """A run that was begun with other settings would be finished as something else."""
    stored = parse_config(read_yaml(folder / LAST / "config.yaml"))
    if settings_hash(stored) != settings_hash(cell.config) or stored.seed != cell.config.seed:
        raise UserError(f"{folder}: was begun with other settings; remove it, or choose another --out")


def _record(cell: Cell, folder: Path, scored: _Scored) -> Record:
    method, config = method_of(cell), cell.config
    dataset = open_dataset(config.data, SPLIT)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Record(
        method=method.key,
        seed=config.seed,
        settings=settings_hash(config),
        commit=current_commit(),
        label=method.label,
        group=method.group,
        told=told_settings(config),
        held_out=list(config.data.hold_out),
        data={
            "name": config.data.name,
            "split": SPLIT,
            **data_facts(config.data),
            "sequences": [len(list(run)) for _, run in groupby(map(dataset.domain_of, range(len(dataset))))],
        },
        size=scored.size,
        seconds={"train": sum(row["seconds"] for row in rows)},
        curve=[{name: row[name] for name in _CURVE if name in row} for row in rows],
        scores={name: _kept(each.scores, air=method.air) for name, each in scored.found.items()},
        per_image={name: pack(each.per_image_S3C) for name, each in scored.found.items()},
        prototypes=scored.prototypes,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"airmoe": __version__, "torch": str(torch.__version__)},
    )


def _kept(scores: dict[str, Any], *, air: bool) -> dict[str, Any]:
    """What a record keeps of an evaluation; nothing crosses where a method stays at the cloud."""
    kept = {name: scores[name] for name in _KEPT if name in scores}
    if not air:
        kept["communication"] = dict.fromkeys(scores["communication"], 0.0)
        kept.pop("routing", None)
    return kept


def _answer(segmenter: Segmenter, image: Any) -> None:
    """One image, for counting: its domain is the first one."""
    prepared = [segmenter.prepare(image)]
    maps = segmenter.maps(prepared)
    domains_B = torch.zeros(1, dtype=torch.int64, device=maps.features_BDhw.device)
    channel = segmenter.config.channel.model_copy(update={"kind": "ideal"})
    with torch.inference_mode():
        segmenter.model(maps.features_BDhw, [evaluation_id(0)], fine=maps.fine, channel=channel, domains_B=domains_B)

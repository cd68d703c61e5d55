"""What a page about a run shows: its log, its scores on a split, examples of each domain, and tokens beside prototypes.

Suffixes: D features, h w grid.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config, parse_config
from airmoe_ray.data import adopt, open_dataset
from airmoe_ray.data.base import SegmentationDataset, UInt8Array
from airmoe_ray.data.mix import not_scored
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.report.tokens import TokenMap, token_map
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.evaluate import evaluate
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.inference.pictures import colour_mask, overlay
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.radio.ledger import check_budget
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.runtime.rng import evaluation_id
from airmoe_ray.storage.checkpoint import ModelCard, load_checkpoint

MOST_DOMAINS = 8  # that get an example; Cityscapes alone has 18 cities


@dataclass(frozen=True)
class Example:
    """One image of a domain, what it shows and what was seen."""

    domain: str
    name: str
    image: UInt8Array
    truth: UInt8Array  # colours
    prediction: UInt8Array
    overlay: UInt8Array
    routed: list[int]  # clients, best first
    tokens: TokenMap


@dataclass(frozen=True)
class RunFacts:
    """All that a page of a run says."""

    config: Config
    card: ModelCard
    split: str
    domains: tuple[str, ...]
    log: list[dict[str, Any]]  # rows of metrics.jsonl; empty where the training's log is not here
    scores: dict[str, Any]  # what `airmoe eval --json` prints
    examples: list[Example]


def measure(
    checkpoint: Path,
    *,
    split: str,
    config: str | None,
    overrides: Sequence[str],
    report: Reporter,
) -> RunFacts:
    """Score a checkpoint on a split and look at one image of each domain; settings as of `airmoe eval`."""
    stored, card = load_checkpoint(checkpoint)
    own = stored.model_dump(mode="json")
    settings = parse_config(own, overrides) if config is None else load_config(config, overrides)
    check_budget(settings)
    log = read_log(checkpoint.parent)
    dataset = open_dataset(settings.data, split)
    if list(dataset.classes.names) != card.classes:
        dataset = adopt(dataset, card.table, given=settings.data.map, source=settings.data.name)
    if line := not_scored(dataset):
        report.line(line)
    report.stage(f"evaluating {len(dataset)} images of {settings.data.name}")
    segmenter = Segmenter.load(checkpoint, settings)
    scores = evaluate(segmenter, dataset, progress=report.progress("evaluated"))
    report.stage("examples and tokens of each domain")
    examples = [_example(segmenter, dataset, index) for index in _first_of_domains(dataset)]
    return RunFacts(settings, card, split, dataset.domains, log, scores, examples)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's `metrics.jsonl`, one per epoch; a half row at the end, which a kill may leave, is not one."""
    path = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            float(row["epoch"]), float(row["loss"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise UserError(
                f"{path}: line {number} is not a row of a training log; restore or remove the file"
            ) from None
        rows.append(row)
    return rows


def _first_of_domains(dataset: SegmentationDataset) -> list[int]:
    """The first sample of each of the first few domains that have one."""
    first: dict[int, int] = {}
    for index in range(len(dataset)):
        first.setdefault(dataset.domain_of(index), index)
    return [first[domain] for domain in sorted(first)[:MOST_DOMAINS]]


def _example(segmenter: Segmenter, dataset: SegmentationDataset, index: int) -> Example:
    sample = dataset[index]
    image = segmenter.prepare(sample.image)
    output = segmenter.run([image], [evaluation_id(index)])
    mask = mask_of(output.logits_BChw[0], image)
    images_B3HW = to_tensor([image.padded], segmenter.backbone.mean.device)
    features_Dhw = segmenter.backbone.maps(images_B3HW, fine=False).features_BDhw[0]
    routed = output.routing.selected_BK[0].tolist()
    return Example(
        dataset.domains[sample.domain],
        sample.name,
        sample.image,
        colour_mask(sample.label, dataset.classes),
        colour_mask(mask, segmenter.card.table),
        overlay(sample.image, mask, segmenter.card.table),
        routed,
        token_map(segmenter.model, features_Dhw, routed[0], seed=segmenter.config.seed),
    )

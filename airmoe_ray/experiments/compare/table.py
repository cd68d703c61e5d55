"""The table of a comparison: scores with intervals, what each method costs, and the paper's figures beside ours."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from airmoe_ray.baselines.method import Method
from airmoe_ray.experiments.compare.channels import OWN
from airmoe_ray.experiments.compare.records import Record
from airmoe_ray.experiments.compare.statistics import (
    METRICS,
    Counts,
    Estimate,
    block_sizes,
    estimate,
    holm,
    paired,
)
from airmoe_ray.experiments.paper_figures import DATASETS, main_row

Seeds = Sequence[Sequence[Record]]  # a list per seed, of one record per fold


@dataclass(frozen=True)
class TableRow:
    """One method on one channel."""

    method: str
    label: str
    group: str
    channel: str
    scores: dict[str, Estimate]
    costs: dict[str, float]
    paper: dict[str, float | None]
    commits: list[str]


def counts_of(seeds: Seeds, channel: str) -> list[Counts]:
    """Each seed's counts per image, its folds one after another."""
    return [np.concatenate([record.counts(channel) for record in folds]) for folds in seeds]


def blocks_of(seeds: Seeds) -> list[int]:
    """How many images in a row are drawn together; all seeds have the same images."""
    return [size for record in seeds[0] for size in block_sizes(record.data["name"], record.sequences)]


def table_rows(methods: Sequence[Method], rows: Mapping[str, Seeds]) -> list[TableRow]:
    """In the order of the methods; a method that crosses the channel has two rows."""
    return [
        _row(method, rows[method.key], channel)
        for method in methods
        if method.key in rows
        for channel in rows[method.key][0][0].scores
    ]


def _row(method: Method, seeds: Seeds, channel: str) -> TableRow:
    records = [record for folds in seeds for record in folds]
    counts, blocks = counts_of(seeds, channel), blocks_of(seeds)
    # no row of the paper has a head at the cloud
    printed = main_row(None if method.head else method.in_paper, records[0].data["name"]) or (None,) * len(METRICS)
    return TableRow(
        method.key,
        method.label,
        method.group,
        channel if method.air else "none",
        {metric: estimate(counts, metric, blocks=blocks) for metric in METRICS},
        _costs(records, channel),
        dict(zip(METRICS, printed, strict=True)),
        sorted({record.commit for record in records}),
    )


def _costs(records: Sequence[Record], channel: str) -> dict[str, float]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    links = [record.scores[channel]["communication"] for record in records]
    up, down = ("uplink_routing_bits", "uplink_report_bits"), ("downlink_routed_bits", "downlink_weights_bits")
    nmse = [record.scores[channel].get("routing", {}).get("nmse_db") for record in records]
    heard = [value for value in nmse if value is not None]
    return {
        "parameters": mean([record.size["trained"] for record in records]),
        "active": mean([record.size["active"] for record in records]),
        "frozen": mean([record.size["frozen"] for record in records]),
        "gflops": mean([record.size["flops"] for record in records]) / 1e9,
        "train_s": mean([record.seconds["train"] for record in records]),
        "uplink_bits": mean([sum(link[name] for name in up) for link in links]),
        "downlink_bits": mean([sum(link[name] for name in down) for link in links]),
        "broadcast_bits": mean([link["downlink_broadcast_bits"] for link in links]),
        "channel_uses": mean([link["air_channel_uses"] for link in links]),
        "nmse_db": mean(heard) if heard else math.nan,
    }


_GAP = ("difference", "low", "high", "p", "p_holm", "of", "seeds", "images", "blocks")
PAIRED = ("reference", "method", "channel", *_GAP)
METHODS, TWO_MODELS = "methods", "these two models only"  # what a difference speaks of


def paired_rows(methods: Sequence[Method], rows: Mapping[str, Seeds]) -> list[dict[str, Any]]:
    """Every method less each of AirMoE's own rows, or less the first method where there is none of them.

    A method that does not cross the channel is compared by the one score that it has. p is corrected for the number of
    methods that a reference is compared with on a channel.
    """
    here = [method for method in methods if method.key in rows]
    references = [method for method in here if method.name == "airmoe"] or here[:1]
    found = [
        gap
        for reference in references
        for method in here
        if method.key != reference.key
        for gap in _against(reference, method, rows)
    ]
    for family in {(gap["reference"], gap["channel"]) for gap in found}:
        own = [gap for gap in found if (gap["reference"], gap["channel"]) == family]
        for gap, corrected in zip(own, holm([gap["p"] for gap in own]), strict=True):
            gap["p_holm"] = corrected
    return found


def _against(reference: Method, method: Method, rows: Mapping[str, Seeds]) -> Iterator[dict[str, Any]]:
    common = {folds[0].seed for folds in rows[reference.key]} & {folds[0].seed for folds in rows[method.key]}
    ours, theirs = ([f for f in rows[key] if f[0].seed in common] for key in (reference.key, method.key))
    if not common:
        return
    for channel in ours[0][0].scores:
        other = channel if channel in theirs[0][0].scores else "ideal"
        gap = paired(counts_of(ours, channel), counts_of(theirs, other), blocks=blocks_of(ours))
        about = METHODS if gap.seeds > 1 else TWO_MODELS
        sizes = (gap.seeds, gap.images, gap.blocks)
        values = (gap.mean, gap.low, gap.high, gap.p, math.nan, about, *sizes)
        yield dict(zip(PAIRED, (reference.key, method.key, channel, *values), strict=True))


def as_csv(rows: Sequence[TableRow]) -> str:
    """One line per method and channel."""
    stream = io.StringIO()
    names = ["method", "label", "group", "channel", "seeds", "interval_over"]
    names += [f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high", "_paper")]
    writer = csv.writer(stream)
    writer.writerow([*names, *rows[0].costs, "commits"])
    for row in rows:
        first = row.scores[METRICS[0]]
        cells: list[Any] = [row.method, row.label, row.group, row.channel, first.seeds, first.by]
        for metric in METRICS:
            found = row.scores[metric]
            cells += [f"{found.mean:.3f}", f"{found.low:.3f}", f"{found.high:.3f}", row.paper[metric]]
        writer.writerow([*cells, *(f"{value:.6g}" for value in row.costs.values()), " ".join(row.commits)])
    return stream.getvalue()


def paired_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One line per pair and channel."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, PAIRED)
    writer.writeheader()
    writer.writerows({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return stream.getvalue()


def as_markdown(rows: Sequence[TableRow], gaps: Sequence[dict[str, Any]], *, title: str, notes: Sequence[str]) -> str:
    """The page of a comparison."""
    lines = [f"# {title}", "", *(f"{note}  " for note in notes), ""]
    lines += ["| method | channel | mIoU | mF1 | paper, mIoU / mF1 | parameters | active | GFLOP | training | "]
    lines[-1] += "up [bit] | down [bit] | channel uses |"
    lines.append("|---" * 12 + "|")
    for row in rows:
        costs = row.costs
        printed = " / ".join("-" if row.paper[m] is None else f"{row.paper[m]:.2f}" for m in ("miou", "mf1"))
        cells = [row.label, row.channel, told(row.scores["miou"]), told(row.scores["mf1"])]
        cells += [printed if printed != "- / -" else "", millions(costs["parameters"]), millions(costs["active"])]
        cells += [f"{costs['gflops']:.2f}", f"{costs['train_s']:.0f} s"]
        cells += [f"{costs[name]:.0f}" for name in ("uplink_bits", "downlink_bits", "channel_uses")]
        lines.append("| " + " | ".join(cells) + " |")
    if gaps:
        heads = "| method | less | channel | difference | 95 % interval | p | p, Holm | seeds | images (blocks) |"
        lines += ["", "## Paired differences, mIoU", "", heads, "|---" * 9 + "|"]
        lines += [
            f"| {g['method']} | {g['reference']} | {g['channel']} | {g['difference']:+.2f} | {g['low']:+.2f} to "
            f"{g['high']:+.2f} | {p_value(g['p'])}{mark(g)} | {p_value(g['p_holm'])}{mark(g)} | {g['seeds']} | "
            f"{g['images']} ({g['blocks']}) |"
            for g in gaps
        ]
        lines += ["", "A positive difference: the method is better than what it is compared with. p is two-sided, over"]
        lines += ["seeds and blocks of neighbouring images; Holm's is corrected for the methods that a reference is"]
        lines += ["compared with on a channel."]
        if any(mark(gap) for gap in gaps):
            lines += [f"† one seed: of {TWO_MODELS}, on other images; another seed may turn it."]
    return "\n".join(lines) + "\n"


def mark(gap: Mapping[str, Any]) -> str:
    """A dagger where a difference speaks of two models and not of two methods."""
    return "†" if gap["of"] == TWO_MODELS else ""


def p_value(p: float) -> str:
    """p, short."""
    if math.isnan(p):
        return "-"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def told(found: Estimate) -> str:
    """A mean with its interval."""
    if math.isnan(found.low):
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]{'' if found.by == 'seeds' else '*'}"


def millions(count: float) -> str:
    """Parameters, short."""
    return f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count / 1e3:.1f} k"


def table_notes(rows: Sequence[TableRow], records: Sequence[Record]) -> list[str]:
    """What a reader must know to read the table."""
    first = records[0]
    data = first.data
    notes = [
        f"{data['name']}, {data['train_images']} images to train on, {data['images']} scored"
        + (", sequences left out in turn and pooled" if first.held_out else "")
        + "; the last epoch is scored, at the images' own size.",
        "Intervals are 95 %: Student's t over seeds, and, with a *, a bootstrap over images, by blocks, of one seed.",
        "Parameters are those that are trained; a frozen backbone of "
        f"{millions(max(row.costs['frozen'] for row in rows))} stands before all but single models. Bits, per image, "
        "are those of routing and weights; the broadcast of features comes on top "
        f"({max(row.costs['broadcast_bits'] for row in rows):.0f} bit where experts are at clients).",
        f"Commits: {', '.join(sorted({record.commit for record in records}))}.",
    ]
    if own := next((row for row in rows if row.channel == OWN), None):
        settings = next(record.told.get("channel", {}) for record in records if record.method == own.method)
        told = ", ".join(f"{name} {value}" for name, value in settings.items())
        notes.append(f"air is 20 dB with Rayleigh fading; own is the channel of the configuration ({told}).")
    if data["name"] in DATASETS and any(row.paper["miou"] is not None for row in rows):
        notes.append(f"The paper's figures are of its {DATASETS[data['name']]} setting, which is not this one.")
    return notes

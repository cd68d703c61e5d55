"""Fills the tables of `results.md` from the records below `results/`: `python docs/results.py`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; its figures come from `results/NAME/records` and from
nowhere else. `costs` in the place of `table`: what each method costs; `ledger`: AirMoE's radio beside others.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airmoe_ray.baselines.method import Method
from airmoe_ray.baselines.registry import find_method, groups
from airmoe_ray.config_file import parse_config
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.records import Record, read_records
from airmoe_ray.experiments.compare.table import TableRow, mark, millions, p_value, paired_rows, table_rows, told
from airmoe_ray.experiments.report.channel_section import amount
from airmoe_ray.radio.ledger import alternatives, label_entropy

HERE = Path(__file__).parent
PAGE = HERE / "results.md"
PLACE = re.compile(r"(<!-- (?P<kind>table|costs|ledger) (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.S)
HEADINGS = ("method", "channel", "seeds", "mIoU", "mF1", "trained", "active", "less AirMoE (p)", "less its + head (p)")
COSTS = {
    "gflops": "GFLOP",
    "train_s": "training [s]",
    "uplink_bits": "up [bit]",
    "downlink_bits": "down [bit]",
    "broadcast_bits": "broadcast [bit]",
    "channel_uses": "channel uses",
}
REFERENCES = ("airmoe", "airmoe+head")


def grouped(records: Sequence[Record]) -> dict[str, list[list[Record]]]:
    """Runs by method: a list per seed, of one record per sequence left out; seeds that lack one are left out.

    A row is of one configuration: runs of two must not be averaged.
    """
    settings: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for record in records:
        settings.setdefault((record.method, tuple(record.held_out)), set()).add(record.settings)
    for (method, _), own in settings.items():
        if len(own) > 1:
            raise UserError(f"{method}: runs of {len(own)} configurations ({', '.join(sorted(own))}); keep one of them")
    folds = {tuple(record.held_out) for record in records}
    found: dict[str, dict[int, list[Record]]] = {}
    for record in sorted(records, key=lambda record: (record.seed, record.held_out)):
        found.setdefault(record.method, {}).setdefault(record.seed, []).append(record)
    whole = {
        method: [own for own in seeds.values() if {tuple(record.held_out) for record in own} == folds]
        for method, seeds in found.items()
    }
    return {method: seeds for method, seeds in whole.items() if seeds}


def in_order(names: Sequence[str]) -> list[Method]:
    """As comparisons list them; others behind."""
    known = {method.key: place for place, method in enumerate(groups()["all"])}
    return [find_method(name) for name in sorted(names, key=lambda name: (known.get(name, len(known)), name))]


def runs_of(name: str) -> dict[str, list[list[Record]]]:
    """All runs of a comparison."""
    return grouped(list(read_records(HERE / "results" / name).values()))


def table(name: str) -> str:
    """One comparison in Markdown: a line per method and channel, and how far it is from AirMoE's own lines."""
    runs = runs_of(name)
    methods = in_order(list(runs))
    gaps = {(gap["reference"], gap["method"], gap["channel"]): gap for gap in paired_rows(methods, runs)}
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for row in table_rows(methods, runs):
        scores = row.scores["miou"], row.scores["mf1"]
        cells = [row.label, row.channel, str(scores[0].seeds), *map(told, scores)]
        cells += [millions(row.costs[which]) for which in ("parameters", "active")]
        lines.append("| " + " | ".join([*cells, *(_gap(gaps, reference, row) for reference in REFERENCES)]) + " |")
    return "\n".join(lines) + "\n"


def _gap(gaps: dict[tuple[str, str, str], dict[str, Any]], reference: str, row: TableRow) -> str:
    """What does not cross the channel is compared with AirMoE on air."""
    gap = gaps.get((reference, row.method, "air" if row.channel == "none" else row.channel))
    return "" if gap is None else f"{gap['difference']:+.2f} ({p_value(gap['p_holm'])}){mark(gap)}"


def costs(name: str) -> str:
    """What each method costs, per image but for the training: on air where it crosses the channel."""
    runs = runs_of(name)
    lines = ["| method | " + " | ".join(COSTS.values()) + " |", "|---" * (len(COSTS) + 1) + "|"]
    for row in table_rows(in_order(list(runs)), runs):
        if row.channel in {"air", "none"}:
            figures = [f"{row.costs[key]:.2f}" if key == "gflops" else amount(row.costs[key]) for key in COSTS]
            lines.append("| " + " | ".join([row.label, *figures]) + " |")
    return "\n".join(lines) + "\n"


def ledger(name: str) -> str:
    """What one image costs on AirMoE's links, beside what others would cost: means over its runs on air."""
    records = [record for folds in runs_of(name)["airmoe"] for record in folds]
    config, classes = parse_config({**records[0].told}), len(records[0].data["classes"])
    links = [record.scores["air"]["communication"] for record in records]
    spent = {key: sum(link[key] for link in links) / len(links) for key in links[0]}
    entropy = label_entropy(sum(record.counts("air")[:, 2].sum(axis=0) for record in records).tolist())
    other = alternatives(config, spent, classes=classes, entropy=entropy)
    clients, top_k, dim = config.experts.count, config.routing.top_k, config.frl.dim
    rows = [
        ("features and query to all, whoever routes", "down", spent["downlink_broadcast_bits"], None),
        (
            f"statistics, C_route: {clients} clients, {dim} numbers and a fade bit",
            "up",
            spent["uplink_routing_bits"],
            None,
        ),
        ("instead: a gate at the cloud (LinearMoE), fade bits alone", "up", other.gate_uplink_bits, None),
        (
            f"instead: FRLs mirrored once, as much as {other.mirrored_inputs:.0f} images' C_route",
            "up, once",
            other.mirrored_frl_bits,
            None,
        ),
        ("reports of the routed", "up", spent["uplink_report_bits"], None),
        ("who is routed, weights", "down", spent["downlink_routed_bits"] + spent["downlink_weights_bits"], None),
        (f"outputs over the air, K {top_k} at once; pilots come on top", "up", None, spent["air_channel_uses"]),
        (
            f"instead: logits of {config.channel.digital_bits} bits in turn",
            "up",
            spent["tdma_bits"],
            spent["tdma_channel_uses"],
        ),
        (
            f"instead: argmax labels in turn, entropy-coded, H = {entropy:.2f} bit per cell",
            "up",
            other.label_bits,
            other.label_channel_uses,
        ),
    ]
    lines = ["| what | link | bits per image | complex channel uses |", "|---" * 4 + "|"]
    lines += [f"| {what} | {link} | {_cell(bits)} | {_cell(uses)} |" for what, link, bits, uses in rows]
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else amount(value)


MAKERS = {"table": table, "costs": costs, "ledger": ledger}


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: place[1] + MAKERS[place["kind"]](place["name"]) + place["end"], page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

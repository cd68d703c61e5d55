"""The page of a comparison: its table, its paired differences and its curves, as `airmoe compare` wrote them."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.plan import kind_of
from airmoe_ray.experiments.report.page import figure, image_tag, page, paragraph, row, section, table
from airmoe_ray.experiments.report.svg import SERIES, Line, interval_chart, line_chart

TABLE, PAIRED, CURVES, RECORDS = "table.csv", "paired.csv", "curves.png", "records"
SWEEPS = "sweeps.md"  # of `airmoe ablate`
_COSTS = {
    "parameters": "parameters",
    "active": "active",
    "gflops": "GFLOP",
    "train_s": "train, s",
    "uplink_bits": "up, bit",
    "downlink_bits": "down, bit",
    "broadcast_bits": "broadcast, bit",
    "channel_uses": "channel uses",
}
_CURVES = {"miou": "mIoU, %", "mf1": "mF1, %"}


def is_comparison(folder: Path) -> bool:
    """Whether a folder is what `airmoe compare --out` makes."""
    return (folder / TABLE).is_file() or (folder / RECORDS).is_dir()


def compare_page(folder: Path, *, name: str, command: str) -> str:
    """A page about a comparison; whatever part of it is there."""
    if not (folder / TABLE).is_file() and (kind_of(folder) == "sweeps" or (folder / SWEEPS).is_file()):
        raise UserError(f"{folder}: holds sweeps, which have a page of their own; read {folder / SWEEPS}")
    records = _records(folder / RECORDS)
    if not (folder / TABLE).is_file() and not records:
        raise UserError(f"{folder}: a comparison without any finished run; let `airmoe compare` go on first")
    head = f"<header><h1>Comparison {escape(name)}</h1>{paragraph(_about(records))}</header>"
    sections = (
        head,
        _table(folder / TABLE),
        _paired(folder / PAIRED),
        _curves(folder, records),
        _made(records, command),
    )
    return page(f"AirMoE comparison {name}", sections)


def _about(records: list[dict[str, Any]]) -> str:
    methods = {record["method"] for record in records}
    seeds = {record["seed"] for record in records}
    data = sorted(
        {
            f"{record['data']['name']} ({record['data']['split']}, {record['data']['images']} images)"
            for record in records
        }
    )
    where = ", ".join(data) or "data that no record names"
    return f"{len(records)} runs; methods: {len(methods)}, seeds: {len(seeds)}; scored on {where}."


def _records(folder: Path) -> list[dict[str, Any]]:
    records = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            record = json.loads(path.read_text())
            record["method"], record["seed"], record["data"]["name"], record["data"]["split"], record["data"]["images"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: not a record of a comparison; remove it, or let `airmoe compare` make it again"
            ) from None
        records.append(record)
    return records


def _table(path: Path) -> str:
    rows = []
    for cells in _csv(path, ("label", "channel", "seeds", "interval_over", "miou", "miou_low", "miou_high", "mf1")):
        interval = f"[{float(cells['miou_low']):.1f}, {float(cells['miou_high']):.1f}]"
        paper = cells.get("miou_paper") or "-"
        figures = (f"{float(cells['miou']):.1f}", interval, f"{float(cells['mf1']):.1f}", paper)
        costs = (_number(cells.get(name, "")) for name in _COSTS)
        rows.append((cells["label"], cells["channel"], cells["seeds"], *figures, *costs))
    if not rows:
        return section("Table", paragraph(f"{path.name} is not there yet.", "quiet"))
    head = ("method", "channel", "seeds", "mIoU, %", "95 %", "mF1, %", "paper's mIoU", *_COSTS.values())
    words = (
        "Intervals are over seeds, or over images where there is one seed. The paper's figures are of its own data and "
        "settings. Parameters are those that learn; active ones work on an image. Bits and channel uses are per image."
    )
    return section("Table", table(head, rows, kind="dense"), paragraph(words, "quiet"))


def _paired(path: Path) -> str:
    found = _csv(path, ("reference", "method", "channel", "difference", "low", "high", "p"))
    if not found:
        return section("Paired differences", paragraph(f"{path.name} is not there yet.", "quiet"))
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for cells in found:
        groups[cells["reference"], cells["channel"]].append(cells)
    charts = []
    for (reference, channel), rows in groups.items():
        numbers = [(r["method"], float(r["difference"]), float(r["low"]), float(r["high"])) for r in rows]
        spans = [span for span in numbers if not math.isnan(span[2])]  # one seed and a few frames have no interval
        if not spans:
            continue
        title = f"mIoU less that of {reference}, {channel} channel"
        charts.append(figure(interval_chart(spans, title=title, x_label="difference in mIoU, points; 95 % interval")))
    keys = tuple(found[0])
    cells_of = [tuple(cells[key] for key in keys) for cells in found]
    words = (
        "Each method's mIoU less that of the one in the title, on the same images and seeds: right of the dashed line "
        "the method is better, left of it the one in the title is. p is two-sided, over seeds and blocks of "
        "neighbouring images; p_holm is corrected for the methods of a chart. With one seed both speak of these two "
        "models only."
    )
    return section(
        "Paired differences", row(*charts, kind="stack"), paragraph(words, "quiet"), table(keys, cells_of, kind="pairs")
    )


def _csv(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a table; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in needed if rows and name not in rows[0]]
    if missing:
        raise UserError(f"{path}: has no column {missing[0]}; let `airmoe compare` write it again")
    return rows


def _number(cell: str) -> str:
    """Thousands and millions in words, small numbers to three digits."""
    try:
        value = float(cell)
    except ValueError:
        return cell or "-"
    if math.isnan(value):
        return "-"
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _curves(folder: Path, records: list[dict[str, Any]]) -> str:
    if (folder / CURVES).is_file():
        picture = image_tag(
            (folder / CURVES).read_bytes(), "png", alt="mIoU and mF1 per epoch of each method", css="whole"
        )
        return section(
            "Convergence",
            figure(picture, "Scores on the validation images after each epoch, as in the paper's Fig. 4."),
        )
    charts = [figure(chart) for key, label in _CURVES.items() for chart in _charts(records, key, label)]
    return section("Convergence", row(*charts)) if charts else ""


def _charts(records: list[dict[str, Any]], key: str, label: str) -> list[str]:
    """Charts of one score, a few methods each; the band is the range over seeds."""
    curves: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for record in records:
        if record.get("curve") and all(key in point for point in record["curve"]):
            curves[record.get("label", record["method"])].append(record["curve"])
    lines = []
    for method, runs in sorted(curves.items()):
        length = min(map(len, runs))
        values = np.array([[point[key] for point in run[:length]] for run in runs])
        epochs = [point["epoch"] for point in runs[0][:length]]
        lines.append(Line(method, epochs, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()))
    groups = [lines[start : start + SERIES] for start in range(0, len(lines), SERIES)]
    return [
        line_chart(group, title=label.split(",", maxsplit=1)[0], x_label="epoch", y_label=label) for group in groups
    ]


def _made(records: list[dict[str, Any]], command: str) -> str:
    keys = ("method", "seed", "settings", "commit")
    rows = [tuple(str(record.get(key, "")) for key in keys) for record in records]
    return section(
        "How it was made",
        f"<pre>{escape(command)}</pre>",
        table(("method", "seed", "settings", "commit"), rows, kind="words"),
    )

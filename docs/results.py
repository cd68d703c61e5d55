"""Fills the tables of `results.md` from the records below `results/`: `python docs/results.py`.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; its figures come from `results/NAME/records` and from
nowhere else.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airmoe_ray.baselines.method import Method
from airmoe_ray.baselines.registry import find_method, groups
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.records import Record, read_records
from airmoe_ray.experiments.compare.table import TableRow, mark, millions, p_value, paired_rows, table_rows, told

HERE = Path(__file__).parent
PAGE = HERE / "results.md"
PLACE = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)
HEADINGS = ("method", "channel", "seeds", "mIoU", "mF1", "trained", "active", "less AirMoE (p)", "less its + head (p)")
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


def table(name: str) -> str:
    """One comparison in Markdown: a line per method and channel, and how far it is from AirMoE's own lines."""
    runs = grouped(list(read_records(HERE / "results" / name).values()))
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


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return PLACE.sub(lambda place: place[1] + table(place["name"]) + place[3], page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

"""What a comparison leaves in its folder: table.md, table.csv, paired.csv and curves.png."""

from pathlib import Path

from airmoe_ray.experiments.compare.curves import draw_curves
from airmoe_ray.experiments.compare.plan import Plan
from airmoe_ray.experiments.compare.records import Record
from airmoe_ray.experiments.compare.table import (
    TableRow,
    as_csv,
    as_markdown,
    paired_csv,
    paired_rows,
    table_notes,
    table_rows,
)

TABLE, TABLE_CSV, PAIRED_CSV, CURVES = "table.md", "table.csv", "paired.csv", "curves.png"


def write_outputs(plan: Plan, done: dict[tuple[str, int, str], Record], out: Path, *, title: str) -> list[TableRow]:
    """All files, from the runs that are done; the rows of the table."""
    seeds = plan.rows(done)
    rows = table_rows(plan.methods, seeds)
    if not rows:
        return []
    gaps = paired_rows(plan.methods, seeds)
    records = [record for own in seeds.values() for folds in own for record in folds]
    notes = table_notes(rows, records)
    notes += [f"Left out: {name}, {reason}." for name, reason in plan.left_out.items()]
    (out / TABLE).write_text(as_markdown(rows, gaps, title=title, notes=notes))
    (out / TABLE_CSV).write_text(as_csv(rows))
    (out / PAIRED_CSV).write_text(paired_csv(gaps))
    draw_curves(plan.methods, seeds, out / CURVES)
    return rows

"""`airmoe compare`: methods, baselines and controls under one protocol, with statistics."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from api.cli.common import AddressOption, ConfigOption, JsonOption, SetOption, print_json, sigterm_like_ctrl_c, stdout
from api.cli.experiments.options import (
    RESULTS,
    DrawsOption,
    OutOption,
    ParallelOption,
    RecordsOption,
    SeedsOption,
)
from api.cli.reporters import reporting

if TYPE_CHECKING:
    from airmoe_ray.experiments.compare.records import Record
    from airmoe_ray.experiments.compare.table import TableRow


def compare(
    config: ConfigOption = "quickstart",
    overrides: SetOption = [],  # noqa: B006  typer copies it
    methods: Annotated[
        str,
        typer.Option(help="all, single, rules, controls, heads, names (airmoe,linear-moe+head), package.module:Class."),
    ] = "rules",
    seeds: SeedsOption = 1,
    out: OutOption = None,
    records: RecordsOption = RESULTS,
    draws: DrawsOption = 3,
    parallel: ParallelOption = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Train nothing; write tables from the runs that are done.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train and score methods under one protocol; writes OUT/{table.md,table.csv,paired.csv,curves.png,records/,runs/}.

    Interrupted or killed, the same command goes on where it stopped.
    """
    from airmoe_ray.baselines.registry import find_methods
    from airmoe_ray.experiments.compare.outputs import CURVES, PAIRED_CSV, TABLE, TABLE_CSV, write_outputs
    from airmoe_ray.experiments.compare.plan import begin_comparison, make_plan, usable
    from airmoe_ray.experiments.compare.records import read_records
    from airmoe_ray.experiments.plotting import require_matplotlib

    require_matplotlib()
    name = Path(config or "quickstart").stem
    out = out or Path("runs") / f"compare-{name}"
    base = load_config(config, ["train.threads=1", *overrides])
    chosen = find_methods(methods)
    with reporting() as report, sigterm_like_ctrl_c() as received:
        report.stage("checking methods, settings and data")
        plan = make_plan(base, chosen, seeds=seeds)
        begin_comparison(out, base, name)
        for method, reason in plan.left_out.items():
            report.line(f"{method} is left out: {reason}")
        stored = read_records(records, out / "records")
        done = usable(stored, plan.cells, draws=draws)
        if others := sum(cell.key in stored for cell in plan.cells) - len(done):
            report.line(f"{others} stored runs are of other images, classes, channels or draws, and are made again")
        todo = [] if table_only else [cell for cell in plan.cells if cell.key not in done]
        finished = sum(cell.key in done for cell in plan.cells)
        report.line(f"{len(plan.cells)} runs of {len(plan.methods)} methods; {finished} are done already")
        failed: dict[str, str] = {}
        try:
            if todo:
                report.stage("starting Ray" if address is None else f"joining the Ray cluster at {address}")
                from actors.cluster.connection import cluster
                from actors.experiments.runs import run_cells

                def arrived(cell: "object", record: "Record") -> None:
                    done[record.key] = record
                    report.line(_told(record))

                with cluster(address):
                    failed = run_cells(todo, out, draws=draws, parallel=parallel, report=report, arrived=arrived)
        except KeyboardInterrupt:
            report.line("airmoe: interrupted; the same command goes on from here")
            raise typer.Exit(128 + (signal.SIGTERM if received else signal.SIGINT)) from None
        finally:
            rows = write_outputs(plan, done, out, title=f"{name}, {seeds} seed{'s' if seeds > 1 else ''}")
    if as_json:
        print_json({"rows": [_json(row) for row in rows], "failed": failed})
    elif rows:
        _print_table(rows)
        stdout.print(f"{out}: {TABLE}, {TABLE_CSV}, {PAIRED_CSV}, {CURVES}", markup=False)
    if not rows:
        raise UserError(f"{out}: no run is done yet; leave --table-only away" if table_only else "no run was finished")
    if failed:
        raise typer.Exit(1)


def _told(record: "Record") -> str:
    scores = ", ".join(f"{channel} {found['miou']:.2f}" for channel, found in record.scores.items())
    fold = f" without {'+'.join(record.held_out)}" if record.held_out else ""
    return f"{record.method}, seed {record.seed}{fold}: mIoU {scores} ({record.seconds['total']:.0f} s)"


def _json(row: "TableRow") -> dict[str, object]:
    scores = {name: found._asdict() for name, found in row.scores.items()}
    return {"method": row.method, "channel": row.channel, "scores": scores, "costs": row.costs, "paper": row.paper}


def _print_table(rows: list["TableRow"]) -> None:
    from airmoe_ray.experiments.compare.table import millions, told

    table = Table("method", "channel", "mIoU", "mF1", "parameters", "active", "up [bit]", box=None)
    for row in rows:
        costs = row.costs
        scores = (told(row.scores["miou"]), told(row.scores["mf1"]))
        sizes = (millions(costs["parameters"]), millions(costs["active"]), f"{costs['uplink_bits']:.0f}")
        table.add_row(escape(row.label), row.channel, *map(escape, scores), *sizes)
    stdout.print(table)

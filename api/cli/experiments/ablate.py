"""`airmoe ablate`: one setting at a time, beside the paper's five tables."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from airmoe_ray.config import Config
    from airmoe_ray.experiments.ablate.sweeps import Sweep
    from airmoe_ray.experiments.ablate.table import Point
    from airmoe_ray.experiments.compare.plan import Cell
    from airmoe_ray.experiments.compare.records import Record

TABLE, TABLE_CSV, PICTURE = "sweeps.md", "sweeps.csv", "sweeps.png"


def ablate(
    config: ConfigOption = "quickstart",
    overrides: SetOption = [],  # noqa: B006  typer copies it
    sweep: Annotated[
        str | None,
        typer.Option(help="all, none, or some of N,K,M,lambda_lb,lambda_frl; default all, or none beside lists."),
    ] = None,
    seeds: SeedsOption = 1,
    out: OutOption = None,
    records: RecordsOption = RESULTS,
    draws: DrawsOption = 3,
    parallel: ParallelOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sweep settings of AirMoE on Ray Tune: the paper's five, or `--set key=a,b,c`; writes OUT/sweeps.{md,csv,png}.

    Interrupted or killed, the same command goes on where it stopped.
    """
    from airmoe_ray.experiments.ablate.sweeps import parse_sweeps, split_overrides
    from airmoe_ray.experiments.compare.plan import begin_comparison, usable
    from airmoe_ray.experiments.compare.records import read_records
    from airmoe_ray.experiments.plotting import require_matplotlib

    require_matplotlib()
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: expected 1 or more")
    fixed, swept = split_overrides(overrides)
    name = Path(config or "quickstart").stem
    base = load_config(config, ["train.threads=1", *fixed])
    sweeps = parse_sweeps(base, sweep or ("none" if swept else "all"), swept)
    cells = [(each, each.cells(base, seeds=seeds)) for each in sweeps]
    out = out or Path("runs") / f"ablate-{name}"
    begin_comparison(out, base, name, kind="sweeps")

    def stored() -> dict[tuple[str, int, str], "Record"]:
        found = usable(
            read_records(records, out / "records"), [cell for _, own in cells for _, cell in own], draws=draws
        )
        return {key: record for key, record in found.items() if record.prototypes}

    done = stored()
    todo = {cell.key: cell for _, own in cells for _, cell in own if cell.key not in done}
    failed: dict[str, str] = {}
    with reporting() as report, sigterm_like_ctrl_c() as received:
        report.line(f"{sum(len(own) for _, own in cells)} runs of {len(sweeps)} sweeps; {len(todo)} are to be made")
        try:
            if todo:
                report.stage("starting Ray" if address is None else f"joining the Ray cluster at {address}")
                from actors.cluster.connection import cluster
                from actors.experiments.tuning import tune_cells

                with cluster(address):
                    failed = tune_cells(list(todo.values()), out, draws=draws, parallel=parallel, report=report)
        except KeyboardInterrupt:
            report.line("airmoe: interrupted; the same command goes on from here")
            raise typer.Exit(128 + (signal.SIGTERM if received else signal.SIGINT)) from None
    title = f"{name}, {seeds} seed{'s' if seeds > 1 else ''}"
    found = _write(base, cells, stored(), out, title=title)
    if as_json:
        print_json(
            {"sweeps": {each.key: [_json(point) for point in points] for each, points in found}, "failed": failed}
        )
    else:
        stdout.print((out / TABLE).read_text(), markup=False)
        stdout.print(f"{out}: {TABLE}, {TABLE_CSV}, {PICTURE}", markup=False)
    if failed:
        raise typer.Exit(1)


def _write(
    base: "Config",
    cells: list[tuple["Sweep", list[tuple[Any, "Cell"]]]],
    done: dict[tuple[str, int, str], "Record"],
    out: Path,
    *,
    title: str,
) -> list[tuple["Sweep", list["Point"]]]:
    from airmoe_ray.experiments.ablate.plot import draw_sweeps
    from airmoe_ray.experiments.ablate.table import as_csv, as_markdown, points_of
    from airmoe_ray.experiments.ablate.words import about_model, remarks_of

    found = []
    for sweep, own in cells:
        runs: dict[Any, list[Record]] = {}
        for value, cell in own:
            if cell.key in done:
                runs.setdefault(value, []).append(done[cell.key])
        if points := points_of(sweep, runs):
            found.append((sweep, points))
    if not found:
        raise UserError(f"{out}: no run was finished")
    images = next(record.data["train_images"] for record in done.values())
    about = about_model(base, [sweep for sweep, _ in found])
    (out / TABLE).write_text(as_markdown(found, title=title, about=about, remarks=remarks_of(cells, images)))
    (out / TABLE_CSV).write_text(as_csv(found))
    draw_sweeps(found, out / PICTURE)
    return found


def _json(point: "Point") -> dict[str, Any]:
    figures = {name: found._asdict() for name, found in {**point.scores, **point.moved}.items()}
    gap = None if point.against_first is None else point.against_first._asdict()
    return {"value": point.value, "figures": figures, "against_first": gap, "paper": point.paper}

"""`airmoe bench`: measures speed as ratios of two things by turns in one run."""

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from airmoe_ray.errors import UserError
from airmoe_ray.storage.shipped import find_model
from api.cli.common import JsonOption, RunOption, print_json, stdout
from api.cli.reporters import reporting


class Part(StrEnum):
    """The parts that can be measured alone."""

    SERVE = "serve"
    TRAIN = "train"
    PACKED = "packed"


def bench(
    run: RunOption = "runs/quickstart",
    only: Annotated[
        Part | None, typer.Option(help="Measure this part alone; packed (1000 clients, needs no run) only so.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Time of each measurement in a round [s].")] = 8.0,
    as_json: JsonOption = False,
) -> None:
    """Measure what distribution, HTTP, routing and channel cost: figures are ratios of two things measured by turns.

    Exit code 1 if a figure misses its target.
    """
    model = None if only is Part.PACKED else find_model(run)
    from airmoe_ray.storage.checkpoint import load_checkpoint
    from api.bench.figures import Figure
    from api.bench.packed import packed_figures
    from api.bench.serving import serving_figures
    from api.bench.training import training_figures

    figures: dict[str, Figure] = {}
    with reporting() as report, tempfile.TemporaryDirectory(prefix="airmoe-bench-") as place:
        folder = Path(place)
        try:
            if model is None:
                figures = packed_figures(folder, rounds=rounds, seconds=seconds, note=report.line)
            else:
                config, _ = load_checkpoint(model.checkpoint)
            if only in (None, Part.SERVE):
                figures |= serving_figures(run, folder / "serve", rounds=rounds, seconds=seconds, note=report.line)
            if only in (None, Part.TRAIN):
                figures |= training_figures(config, folder / "train", rounds=rounds, seconds=seconds, note=report.line)
        except RuntimeError as error:
            raise UserError(str(error)) from None
    results = {name: figure.as_dict() for name, figure in figures.items()}
    if as_json:
        print_json(results)
    else:
        _print(results)
    if not all(result["pass"] for result in results.values()):
        raise typer.Exit(1)


def _print(results: dict[str, Any]) -> None:
    table = Table("figure", "value", "spread", "unit", "target", "", "detail")
    for name, result in results.items():
        spread = "-".join(f"{end:.3g}" for end in result["spread"] or [])
        detail = {k: v for k, v in result.items() if k not in {"value", "unit", "target", "pass", "spread"}}
        told = ", ".join(f"{k} {v}" for k, v in detail.items())
        verdict = "[green]met[/green]" if result["pass"] else "[red]missed[/red]"
        table.add_row(name, f"{result['value']:.3g}", spread, result["unit"], result["target"], verdict, told)
    stdout.print(table)

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

Part = StrEnum(
    "Part",
    [
        "serve",
        "overhead",
        "photo",
        "mixed",
        "overload",
        "model",
        "life",
        "train",
        "packed",
        "peer_serve",
        "peer_flower",
    ],
)


def bench(
    run: RunOption = "runs/quickstart",
    only: Annotated[
        list[Part] | None,
        typer.Option(help="Measure these parts alone; packed (1000 clients) and peers (installed first) only so."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Time of each measurement in a round [s].")] = 8.0,
    as_json: JsonOption = False,
) -> None:
    """Measure what distribution, HTTP, routing and channel cost: figures are ratios of two things measured by turns.

    Exit code 1 if a figure misses its target.
    """
    from api.bench.figures import Figure
    from api.bench.parts import ALONE, NEED_NO_RUN, PARTS, measure

    parts = [str(part) for part in only] if only else [part for part in PARTS if part not in ALONE]
    if not NEED_NO_RUN.issuperset(parts):
        find_model(run)  # before minutes have gone into the others
    figures: dict[str, Figure] = {}
    with reporting() as report, tempfile.TemporaryDirectory(prefix="airmoe-bench-") as place:
        try:
            for part in parts:
                figures |= measure(part, run, Path(place), rounds=rounds, seconds=seconds, note=report.line)
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

"""`airmoe bench`: speed as ratios, measured side by side in one run."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from airmoe_ray.errors import UserError
from api.cli.common import JsonOption, print_json, stdout, terminal


def bench(
    run: Annotated[Path, typer.Option(help="Folder of a trained run.")] = Path("runs/quickstart"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Time of each measurement in a round [s].")] = 8.0,
    packed: Annotated[
        bool, typer.Option("--packed", help="Measure 1000 clients packed into two actors instead of the run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what distribution and HTTP cost: every figure is a ratio of two things measured by turns.

    Exit code 1 if a figure misses its target.
    """
    from airmoe_ray.checkpoint import load_checkpoint
    from api.bench.packed import packed_figures
    from api.bench.serving import serving_figures

    if not packed:
        load_checkpoint(run / "checkpoint")
    with terminal() as report, tempfile.TemporaryDirectory(prefix="airmoe-bench-") as folder:
        try:
            if packed:
                figures = packed_figures(Path(folder), rounds=rounds, seconds=seconds, note=report.line)
            else:
                figures = serving_figures(run, Path(folder), rounds=rounds, seconds=seconds, note=report.line)
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

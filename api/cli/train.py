"""`airmoe train`: end-to-end training through the channel."""

from pathlib import Path
from typing import Annotated

import typer

from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from api.cli.common import ConfigOption, JsonOption, SetOption, print_json, terminal


def train(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    run: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/NAME of the configuration.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last checkpoint, with the learning rate of its new epochs."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train on Ray with this many workers that share each batch; the curve is that of one."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model; writes DIR/{config.yaml,metrics.jsonl,summary.json,checkpoint/}."""
    run = run or Path("runs") / Path(config or "quickstart").stem
    if resume and config is None:
        stored = run / "config.yaml"
        if not stored.is_file():
            raise UserError(f"{run}: no run to resume here (no config.yaml); leave --resume away to start one")
        config = str(stored)
    settings = load_config(config, overrides)
    from airmoe_ray.run import train_run  # late: torch and timm take seconds, a mistake in the settings is told at once

    with terminal() as report:
        try:
            if workers is None:
                summary = train_run(settings, run, resume=resume, report=report)
            else:
                from actors.cluster import cluster
                from actors.trainer import train_on_ray

                with cluster():
                    summary = train_on_ray(settings, run, workers=workers, resume=resume, report=report)
        except KeyboardInterrupt:
            saved = (run / "checkpoint").exists()
            how = f"`airmoe train --resume --run {run}` goes on" if saved else "no checkpoint yet, start again"
            report.line(f"airmoe: interrupted; {how}")
            raise typer.Exit(130) from None
        report.line(f"trained in {summary['seconds']:.0f} s; the model is in {run / 'checkpoint'}")
    if as_json:
        print_json(summary)

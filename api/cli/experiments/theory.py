"""`airmoe theory`: the bounds of the paper's convergence theory, their six panels, and what the channel does to SGD."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.shipped import find_model
from api.cli.common import (
    Checkpoint,
    CheckpointOption,
    ConfigOption,
    JsonOption,
    SetOption,
    print_json,
    stdout,
)
from api.cli.reporters import reporting

PICTURE, PANELS_JSON, PANELS_CSV, FIGURES = "theory.png", "panels.json", "panels.csv", "figures.json"


def theory(
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for {PICTURE}, {PANELS_JSON}, {PANELS_CSV} and {FIGURES}.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a trained run whose constants are measured as well.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    checkpoint: CheckpointOption = Checkpoint.LAST,
    as_json: JsonOption = False,
) -> None:
    """Compute the convergence bounds under channel noise, and measure noise, gradients and SGD on the real channel.

    --set takes constants of the bounds (theory.eps=0.01, theory.outputs=640, theory.noise_power=0.3, …) and settings of
    the configuration (channel.fading=none). Exit code 1 if a measured figure misses its target.
    """
    from airmoe_ray.experiments.plotting import require_matplotlib
    from airmoe_ray.experiments.theory.figures import misses
    from airmoe_ray.experiments.theory.measured import check_channel
    from airmoe_ray.experiments.theory.settings import parse_settings, split_overrides

    own, others = split_overrides(overrides)
    settings = parse_settings(own)
    folder = None if run is None else find_model(run, best=checkpoint is Checkpoint.BEST).checkpoint
    resolved = _configuration(folder, config, others)
    check_channel(resolved.channel)
    if out is not None:  # before the work, not after it
        require_matplotlib()
        _prepare(out)
    figures = _measure(settings, resolved, folder, out)
    if out is not None:
        (out / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
    if as_json:
        print_json(figures)
    else:
        _print_table(figures, out)
    if misses(figures):
        raise typer.Exit(1)


def _configuration(folder: Path | None, config: str | None, overrides: list[str]) -> Config:
    """The run's own settings or a file's, with --set on top."""
    from airmoe_ray.config_file import load_config, parse_config
    from airmoe_ray.storage.checkpoint import load_checkpoint

    if folder is None or config is not None:
        return load_config(config, overrides)
    stored, _ = load_checkpoint(folder)
    return parse_config(stored.model_dump(mode="json"), overrides)


def _prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {out}: cannot write here ({error.strerror}); choose another folder") from None


def _measure(settings: Any, config: Config, checkpoint: Path | None, out: Path | None) -> dict[str, Any]:
    """All figures; panels are written on the way."""
    from airmoe_ray.experiments.theory import figures as figures_of
    from airmoe_ray.experiments.theory.measured import (
        measure_floor,
        measure_gradient_noise,
        measure_noise,
        measure_noise_slope,
    )
    from airmoe_ray.experiments.theory.panels import as_csv, as_json, six_panels
    from airmoe_ray.experiments.theory.plot import draw
    from airmoe_ray.experiments.theory.run_constants import measure_run
    from airmoe_ray.runtime.device import pick_device

    pick_device("cpu", threads=config.train.threads)
    channel, seed = config.channel, config.seed
    found = figures_of.formula_figures(settings)
    with reporting() as report:
        report.stage("noise variance and gradients on the channel")
        found |= figures_of.noise_figures(measure_noise(channel, seed=seed))
        found |= figures_of.gradient_figures(measure_gradient_noise(channel, seed=seed))
        found |= figures_of.noise_slope_figures(measure_noise_slope(channel, seeds=settings.seeds, seed=seed))
        report.stage(f"SGD through the channel, {settings.steps} steps of {settings.seeds} seeds at each SNR")
        floor = measure_floor(
            channel, seeds=settings.seeds, steps=settings.steps, seed=seed, progress=report.progress("SNRs")
        )
        found |= figures_of.floor_figures(floor, steps=settings.steps)
        if checkpoint is not None:
            report.stage(f"constants of {checkpoint.parent}")
            bar = report.progress("images")
            found |= figures_of.run_figures(measure_run(checkpoint, config, images=settings.images, progress=bar))
    if out is not None:
        panels = six_panels(settings, floor)
        (out / PANELS_JSON).write_text(json.dumps(as_json(panels)) + "\n")
        (out / PANELS_CSV).write_text(as_csv(panels))
        draw(panels, out / PICTURE)
    return found


def _print_table(figures: dict[str, Any], out: Path | None) -> None:
    table = Table(
        Column("figure", no_wrap=True), Column("value", no_wrap=True), "", "unit, and what is known of it", box=None
    )
    for name, each in figures.items():
        value = "none" if each["value"] is None else f"{each['value']:.4g}"
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[each.get("pass")]
        table.add_row(name, value, verdict, escape(_about(each)))
    stdout.print(table)
    if out is None:
        stdout.print("add --out DIR for the six panels", markup=False)
    else:
        stdout.print(f"{out / PICTURE}, {PANELS_CSV}, {PANELS_JSON}, {FIGURES}", markup=False)


def _about(each: dict[str, Any]) -> str:
    parts = [each[key] for key in ("unit", "equation", "reason", "says") if each.get(key)]
    if "target" in each:
        parts.append(f"target {each['target']}")
    if "interval_95" in each:
        parts.append("95 % {:.3f} to {:.3f}".format(*each["interval_95"]))
    if each.get("everywhere") is not None:
        parts.append(f"everywhere at most {each['everywhere']:.4g}")
    if "images" in each:
        parts.append(f"{each['images']} images")
    return "; ".join(parts)

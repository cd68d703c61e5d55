"""`airmoe report`: one self-contained HTML page of a run or of a comparison."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from airmoe_ray.errors import UserError
from airmoe_ray.storage.shipped import find_model
from api.cli.common import Checkpoint, CheckpointOption, ConfigOption, RunOption, SetOption, stdout
from api.cli.reporters import reporting

FILE = "report.html"


def report(
    run: RunOption = "runs/quickstart",
    out: Annotated[
        Path | None,
        typer.Option(help=f"The page; {FILE} in the run's folder unless given, beside you for a shipped model."),
    ] = None,
    config: ConfigOption = None,
    split: Annotated[str, typer.Option(help="train, val, test or all.")] = "test",
    overrides: SetOption = [],  # noqa: B006  typer copies it
    checkpoint: CheckpointOption = Checkpoint.LAST,
) -> None:
    """Write one HTML page of a run (or of a folder of `airmoe compare`) that opens anywhere, without a network.

    Curves, scores per class and domain, confusion matrix, overlays, routing, tokens beside prototypes, channel and
    ledger, settings, versions, commands. Settings are the run's own, with --set on top, as of `airmoe eval`.
    """
    from airmoe_ray.experiments.report.compare_page import compare_page, is_comparison
    from airmoe_ray.experiments.report.measure import measure
    from airmoe_ray.experiments.report.run_page import run_page

    folder = Path(run).expanduser()
    command = shlex.join(["airmoe", *sys.argv[1:]])
    if is_comparison(folder):
        target = _target(out, folder)
        text = compare_page(folder, name=folder.name, command=command)
    else:
        found = find_model(run, best=checkpoint is Checkpoint.BEST).checkpoint
        target = _target(out, folder)
        with reporting() as progress:
            facts = measure(found, split=split, config=config, overrides=overrides, report=progress)
        text = run_page(facts, name=run, command=command)
    partial = target.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, target)
    stdout.print(f"{target} ({len(text) / 1e6:.1f} MB)", markup=False)


def _target(out: Path | None, folder: Path) -> Path:
    """Where the page goes; found to be writable before the work, not after it."""
    target = out or (folder / FILE if folder.is_dir() else Path(f"{folder.name}-{FILE}"))
    if target.is_dir():
        raise UserError(f"--out {target}: is a folder; name a file, such as {target / FILE}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        probe = target.with_suffix(".partial")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {target}: cannot write here ({error.strerror}); choose another file") from None
    return target

"""`airmoe pretrain`: makes the embedded backbone's weights again."""

from pathlib import Path
from typing import Annotated

import typer

from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from api.cli.common import ConfigOption, JsonOption, SetOption, print_json
from api.cli.reporters import reporting


def pretrain(
    out: Annotated[Path, typer.Option(help="Weights file to write (safetensors).")] = Path("embedded_vit.safetensors"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Time budget.")] = 30.0,
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    as_json: JsonOption = False,
) -> None:
    """Distil EfficientNet-Lite0's features into the embedded ViT on procedural scenes; no labels are used.

    Of the settings only `seed` matters.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out}: expected a file in an existing folder")
    from airmoe_ray.features.pretrain import pretrain as recipe

    with reporting() as report:
        bar = report.progress("pretraining")

        def show(figures: dict[str, float]) -> None:
            bar(round(100 * figures["share"]), 100)
            report.note(f"step {figures['step']:.0f}, loss {figures['loss']:.4f}")

        summary = recipe(out=out, minutes=minutes, seed=load_config(config, overrides).seed, progress=show)
        report.line(f"wrote {out}")
    if as_json:
        print_json(summary)

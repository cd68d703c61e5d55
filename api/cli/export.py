"""`airmoe export`: makes the small copy of a trained model that is given to others."""

from pathlib import Path
from typing import Annotated

import typer

from airmoe_ray.storage.shipped import find_model
from api.cli.common import Checkpoint, JsonOption, RunOption, print_json, stdout


def export(
    out: Annotated[Path, typer.Option(help="Folder to write; an older copy there is replaced.")],
    run: RunOption = "runs/quickstart",
    name: Annotated[str | None, typer.Option(help="What the model is called; default: the folder's name.")] = None,
    terms: Annotated[str | None, typer.Option(help="On which the weights may be used, in a sentence.")] = None,
    scores: Annotated[
        list[str],
        typer.Option(metavar="[TITLE=]FILE", help="What `airmoe eval --json` printed, for the card; repeatable."),
    ] = [],  # noqa: B006  typer copies it
    command: Annotated[str | None, typer.Option(help="The command that made the model, for the card.")] = None,
    checkpoint: Annotated[
        Checkpoint | None, typer.Option(help="Which checkpoint; default: the best one, where there is one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a small copy of a model: float16 weights, settings without paths and keys, and a card in words."""
    place = find_model(run, best=None if checkpoint is None else checkpoint is Checkpoint.BEST)
    from airmoe_ray.storage.card_text import read_scores  # imported late: they bring torch
    from airmoe_ray.storage.export import export_model

    found = [read_scores(text) for text in scores]
    card = export_model(place.checkpoint, out, name=name, terms=terms, scores=found, command=command)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if as_json:
        print_json({"name": card.name, "folder": str(out), "bytes": size})
    else:
        stdout.print(f"{out}: {card.name}, {size / 1e6:.1f} MB; read CARD.md there", markup=False)

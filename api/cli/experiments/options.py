"""Options that `airmoe compare` and `airmoe ablate` share."""

from pathlib import Path
from typing import Annotated

import typer

RESULTS = Path("docs/results")

SeedsOption = Annotated[int, typer.Option(help="Runs of each, with seeds 0, 1, …")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder; goes on with what is there. Default: runs/COMMAND-NAME of the config.")
]
RecordsOption = Annotated[Path, typer.Option(help="Folder of records of earlier experiments, which are taken as done.")]
DrawsOption = Annotated[int, typer.Option(min=1, help="Times each scored image crosses the channel.")]
ParallelOption = Annotated[
    int | None, typer.Option(min=1, help="Runs at a time, one thread each; default: as many as there are cores.")
]

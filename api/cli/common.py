"""What all verbs share: options, where their output goes, and what interrupts them."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

ConfigOption = Annotated[
    str | None, typer.Option("--config", "-c", help="YAML file, or the name of a shipped configuration.")
]
SetOption = Annotated[
    list[str], typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one setting; repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")]


class Checkpoint(StrEnum):
    """Which of a run's checkpoints."""

    LAST = "last"
    BEST = "best"


CheckpointOption = Annotated[
    Checkpoint, typer.Option(help="The last epoch, or the one that scored best on the validation images.")
]

RunOption = Annotated[
    str, typer.Option(help="Folder or URL (s3://, gs://, …) of a run, name of a shipped model, or hub id (org/name).")
]

AddressOption = Annotated[
    str | None, typer.Option(help="Join this Ray cluster (auto, host:port) instead of starting one here.")
]

DEFAULT_PORT = 8000

# People's output of long work goes to stderr, so that stdout holds the result and nothing else.
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Plain JSON on stdout."""
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM interrupts as well; gives the list in which it will be noted."""
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:  # another one must not interrupt the tidying up
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)

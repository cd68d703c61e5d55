"""What all verbs share: options, progress on the terminal, tables or JSON, and errors as one line."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from airmoe_ray.errors import UserError

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

DEFAULT_PORT = 8000

# People's output of long work goes to stderr, so that stdout holds the result and nothing else.
stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True)


class TerminalReporter:
    """Progress bars with ETA that vanish when done, and lines that stay."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.current: TaskID | None = None

    def line(self, text: str) -> None:
        """One line that stays."""
        encoding = self.bars.console.encoding  # not every terminal knows the blocks of the expert load
        text = text.encode(encoding, "replace").decode(encoding)
        self.bars.console.print(text, soft_wrap=True, markup=False)

    def progress(self, title: str) -> Callable[[int, int], None]:
        """A bar; it shows up with its first step, so work found in a cache shows nothing."""
        self.finish()

        def move(done: int, total: int) -> None:
            if self.current is None:
                self.current = self.bars.add_task(title, total=total, note="")
            self.bars.update(self.current, completed=done)
            if done >= total:
                self.finish()

        return move

    def note(self, text: str) -> None:
        """A live note beside the bar."""
        if self.current is not None:
            self.bars.update(self.current, note=text)

    def finish(self) -> None:
        """Take the current bar away."""
        if self.current is not None:
            self.bars.remove_task(self.current)
            self.current = None


@contextmanager
def terminal() -> Iterator[TerminalReporter]:
    """Progress on stderr for the duration of a command."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=stderr, transient=True) as bars:
        yield TerminalReporter(bars)


def checkpoint_of(run: Path, which: Checkpoint) -> Path:
    """Folder of one of a run's checkpoints."""
    folder = run / ("checkpoint" if which is Checkpoint.LAST else "checkpoint-best")
    if which is Checkpoint.BEST and (run / "checkpoint").is_dir() and not folder.is_dir():
        raise UserError(f"{run}: has no best checkpoint, as it was trained without validation; use --checkpoint last")
    return folder


def print_json(value: Any) -> None:
    """Plain JSON on stdout."""
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")

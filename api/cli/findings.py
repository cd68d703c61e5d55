"""What a check found: a line for people, the same for programs, and what to do about it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer
from rich.markup import escape

from airmoe_ray.errors import UserError
from api.cli.common import print_json, stdout


@dataclass(frozen=True)
class Finding:
    """One check."""

    check: str
    ok: bool
    message: str  # what was found, and where it failed what to do
    command: str | None = None  # that failed, and what it printed
    output: str | None = None


class CommandError(UserError):
    """A command that failed: what it means, how it was called, what it printed."""

    def __init__(self, message: str, command: str, output: str) -> None:
        super().__init__(message)
        self.command, self.output = command, output


def examine(name: str, check: Callable[[], str]) -> Finding:
    """Run a check; what it raises is what is wrong."""
    try:
        return Finding(name, True, check())
    except CommandError as error:
        return Finding(name, False, str(error), error.command, error.output)
    except (UserError, OSError, ImportError) as error:
        return Finding(name, False, str(error))


def report(findings: list[Finding], *, as_json: bool) -> None:
    """Print all; exit code 1 if one needs attention."""
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        width = max(15, *(len(finding.check) for finding in findings))
        for finding in findings:
            mark = "[green]ok  [/green]" if finding.ok else "[red]fail[/red]"
            stdout.print(f"{mark} {finding.check:<{width}} {escape(finding.message)}")
            if finding.command is not None:
                told = [f"$ {finding.command}", *(finding.output or "(printed nothing)").strip().splitlines()]
                stdout.print("\n".join(f"       {line}" for line in told), markup=False)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)

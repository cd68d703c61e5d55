"""Running checks, and printing what they found: a line each for people, the same as JSON for programs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer
from rich.markup import escape

from airmoe_ray.errors import UserError
from api.cli.common import print_json, stdout


@dataclass(frozen=True)
class CheckResult:
    """What one check found."""

    check: str
    ok: bool
    message: str  # what was found; where it failed, what to do
    command: str | None = None  # the command that failed
    output: str | None = None  # what that printed


class CommandError(UserError):
    """A command that failed: what it means, how it was called, what it printed."""

    def __init__(self, message: str, command: str, output: str) -> None:
        super().__init__(message)
        self.command, self.output = command, output


def run_check(name: str, check: Callable[[], str]) -> CheckResult:
    """Run a check, which returns what it found or raises what is wrong."""
    try:
        return CheckResult(name, True, check())
    except CommandError as error:
        return CheckResult(name, False, str(error), error.command, error.output)
    except (UserError, OSError, ImportError) as error:
        return CheckResult(name, False, str(error))


def print_results(results: list[CheckResult], *, as_json: bool) -> None:
    """Print all results; exit with code 1 if a check failed."""
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        width = max(15, *(len(result.check) for result in results))
        for result in results:
            mark = "[green]ok  [/green]" if result.ok else "[red]fail[/red]"
            stdout.print(f"{mark} {result.check:<{width}} {escape(result.message)}")
            if result.command is not None:
                shown = [f"$ {result.command}", *(result.output or "(printed nothing)").strip().splitlines()]
                stdout.print("\n".join(f"       {line}" for line in shown), markup=False)
    if not all(result.ok for result in results):
        raise typer.Exit(1)

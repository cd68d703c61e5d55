"""The `airmoe` command: the table of its verbs, and errors of users as one line."""

import sys

import typer

from airmoe_ray.errors import UserError, disk_trouble
from api.cli.bench import bench
from api.cli.cache import cache
from api.cli.common import stderr
from api.cli.config import config_
from api.cli.doctor.verb import doctor
from api.cli.evaluate import eval_
from api.cli.experiments.ablate import ablate
from api.cli.experiments.compare import compare
from api.cli.experiments.report import report
from api.cli.experiments.theory import theory
from api.cli.export import export
from api.cli.pretrain import pretrain
from api.cli.remote.chaos import chaos
from api.cli.remote.scale import scale
from api.cli.remote.segment import segment
from api.cli.remote.status import status
from api.cli.serve import serve
from api.cli.train import train

app = typer.Typer(
    name="airmoe",
    help="Statistic-augmented over-the-air mixture of experts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train)
app.command("eval")(eval_)
app.command("serve")(serve)
app.command("export")(export)
app.command("segment")(segment)
app.command("status")(status)
app.command("scale")(scale)
app.command("compare")(compare)
app.command("ablate")(ablate)
app.command("theory")(theory)
app.command("report")(report)
app.command("bench")(bench)
app.command("chaos")(chaos)
app.command("cache")(cache)
app.command("config")(config_)
app.command("pretrain")(pretrain)
app.command("doctor")(doctor)


def run() -> None:
    """Run the command; a user's mistake ends as one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        stderr.print(f"airmoe: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        told = disk_trouble(error)
        if told is None:
            raise
        stderr.print(f"airmoe: {told}", markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    run()

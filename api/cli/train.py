"""`airmoe train`: end-to-end training through the channel."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airmoe_ray.config import SECRETS, Config
from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from api.cli.common import ConfigOption, JsonOption, SetOption, print_json
from api.cli.reporters import reporting

if TYPE_CHECKING:
    from airmoe_ray.runtime.progress import Reporter


def train(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    run: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/NAME of the configuration.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last checkpoint, with the learning rate of its new epochs."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers that share each batch; the curve is that of one. Default: one per GPU, or one."
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster (auto, host:port) instead of starting one here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model; writes DIR/{config.yaml,metrics.jsonl,summary.json,checkpoint/,checkpoint-best/}."""
    run = run or Path("runs") / Path(config or "quickstart").stem
    if resume and config is None:
        stored = run / "config.yaml"
        if not stored.is_file():
            raise UserError(f"{run}: no run to resume here (no config.yaml); leave --resume away to start one")
        config = str(stored)
    settings = load_config(config, overrides)
    for option, value in (("--workers", workers), ("--address", address)):
        if value is not None and settings.train.engine == "local":
            raise UserError(
                f"{option} {value}: train.engine = local is one process; leave {option} out, or set train.engine=ray"
            )
    if workers is not None and settings.train.mode == "federated":
        raise UserError(
            f"--workers {workers}: with train.mode = federated every client is a worker; leave --workers out"
        )
    with reporting() as report, _sigterm_like_ctrl_c() as received:
        for key in sorted(SECRETS["serve"]):
            if getattr(settings.serve, key):
                report.line(f"serve.{key} is not kept with the run; give it to `airmoe serve`")
        report.stage(f"{run}: checking settings, data and folder")
        try:
            summary = _train(settings, run, workers=workers, resume=resume, address=address, report=report)
        except KeyboardInterrupt:
            saved = (run / "checkpoint").exists()
            how = f"`airmoe train --resume --run {run}` goes on" if saved else "no checkpoint yet, start again"
            report.line(f"airmoe: interrupted; {how}")
            raise typer.Exit(128 + (signal.SIGTERM if received else signal.SIGINT)) from None
        report.line(f"trained in {summary['seconds']:.0f} s; the model is in {run / 'checkpoint'}{_best(summary)}")
    if as_json:
        print_json(summary)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[list[int]]:
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


def _train(
    config: Config, run: Path, *, workers: int | None, resume: bool, address: str | None, report: "Reporter"
) -> dict[str, Any]:
    """By the configured engine. Imported late: torch takes seconds, a mistake in the settings is told at once."""
    if config.train.engine == "local":
        from airmoe_ray.training.run import train_run

        return train_run(config, run, resume=resume, report=report)
    from airmoe_ray.training.preflight import check_run

    check_run(config, run, resume=resume)
    report.stage("starting Ray" if address is None else f"joining the Ray cluster at {address}")
    from actors.cluster.connection import cluster

    if config.train.mode == "federated":
        from actors.training.federated import train_federated

        with cluster(address):
            return train_federated(config, run, resume=resume, report=report)
    from actors.training.ray_train import train_on_ray

    with cluster(address):
        return train_on_ray(config, run, workers=workers, resume=resume, report=report)


def _best(summary: dict[str, Any]) -> str:
    best = summary.get("best")
    if best is None or best["epoch"] == summary["epochs"]:
        return ""
    return f", the best one, of epoch {best['epoch']} with mIoU {best['miou']:.1f}, in checkpoint-best"

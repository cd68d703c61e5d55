"""`airmoe train`: end-to-end training through the channel."""

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airmoe_ray.config import SECRETS, Config
from airmoe_ray.config_file import load_config
from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import is_url
from airmoe_ray.storage.shipped import LAST
from api.cli.common import AddressOption, ConfigOption, JsonOption, SetOption, print_json, sigterm_like_ctrl_c
from api.cli.reporters import reporting

if TYPE_CHECKING:
    from airmoe_ray.runtime.progress import Reporter
    from airmoe_ray.storage.remote_run import RemoteRun


def train(
    config: ConfigOption = None,
    overrides: SetOption = [],  # noqa: B006  typer copies it
    run: Annotated[
        str | None,
        typer.Option(help="Folder or URL (s3://, gs://, …) of the run; default runs/NAME of the configuration."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last checkpoint, with the learning rate of its new epochs."),
    ] = False,
    resume_or_begin: Annotated[
        bool,
        typer.Option(
            "--resume-or-begin", help="Continue where there is a checkpoint, begin where there is none: for jobs."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers that share each batch; the curve is that of one. Default: one per GPU, or one."
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model; writes DIR/{config.yaml,metrics.jsonl,summary.json,checkpoint/,checkpoint-best/}."""
    place = _place(run or f"runs/{Path(config or 'quickstart').stem}")
    resume = resume or (resume_or_begin and _has_checkpoint(place))
    settings = load_config(config, overrides) if config or not resume else _stored_config(place, overrides)
    for option, value in (("--workers", workers), ("--address", address)):
        if value is not None and settings.train.engine == "local":
            raise UserError(
                f"{option} {value}: train.engine = local is one process; leave {option} out, or set train.engine=ray"
            )
    if workers is not None and settings.train.mode == "federated":
        raise UserError(
            f"--workers {workers}: with train.mode = federated every client is a worker; leave --workers out"
        )
    with reporting() as report, sigterm_like_ctrl_c() as received:
        for key in sorted(SECRETS["serve"]):
            if getattr(settings.serve, key):
                report.line(f"serve.{key} is not kept with the run; give it to `airmoe serve`")
        shown = place if isinstance(place, Path) else place.shown
        report.stage(f"{shown}: checking settings, data and folder")
        try:
            summary = _train(settings, place, workers=workers, resume=resume, address=address, report=report)
        except KeyboardInterrupt:
            saved = _has_checkpoint(place)
            how = f"`airmoe train --resume --run {shown}` goes on" if saved else "no checkpoint yet, start again"
            report.line(f"airmoe: interrupted; {how}")
            raise typer.Exit(128 + (signal.SIGTERM if received else signal.SIGINT)) from None
        report.line(f"trained in {summary['seconds']:.0f} s; the model is in {shown}/checkpoint{_best(summary)}")
    if as_json:
        print_json(summary)


def _place(run: str) -> "Path | RemoteRun":
    """The run's folder, or the run at a URL."""
    if not is_url(run):
        return Path(run)
    from airmoe_ray.storage.remote_run import RemoteRun

    return RemoteRun(run)


def _has_checkpoint(run: "Path | RemoteRun") -> bool:
    """Whether there is something to go on from; a checkpoint that was being replaced counts."""
    if not isinstance(run, Path):
        return run.holds(LAST)
    from airmoe_ray.storage.folder_swap import recover

    recover(run / LAST)
    return (run / LAST).exists()


def _stored_config(run: "Path | RemoteRun", overrides: list[str]) -> Config:
    """The settings that a run was begun with."""
    if not isinstance(run, Path):
        with tempfile.TemporaryDirectory() as folder:
            return load_config(str(run.fetch_config(Path(folder))), overrides)
    stored = run / "config.yaml"
    if not stored.is_file():
        raise UserError(f"{run}: no run to resume here (no config.yaml); leave --resume away to start one")
    return load_config(str(stored), overrides)


def _train(
    config: Config,
    run: "Path | RemoteRun",
    *,
    workers: int | None,
    resume: bool,
    address: str | None,
    report: "Reporter",
) -> dict[str, Any]:
    """By the configured engine. Imported late: torch takes seconds, a mistake in the settings is told at once."""
    if config.model != "airmoe":
        from airmoe_ray.baselines.networks.train import train_network

        if not isinstance(run, Path):
            raise UserError(f"--run {run.shown}: model = {config.model} trains into a folder; give one")
        return train_network(config, run, resume=resume, report=report)
    if config.train.engine == "local":
        from airmoe_ray.storage.staged_run import train_staged
        from airmoe_ray.training.run import train_run

        if not isinstance(run, Path):
            run.check(resume=resume)
        return train_staged(
            run,
            lambda folder, after: train_run(config, folder, resume=resume, report=report, after_epoch=after),
            resume=resume,
        )
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

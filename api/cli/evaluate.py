"""`airmoe eval`: scores a run on a split of its dataset, and draws examples."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from airmoe_ray.errors import UserError
from airmoe_ray.storage.bucket import shown
from airmoe_ray.storage.shipped import find_model
from api.cli.common import (
    Checkpoint,
    CheckpointOption,
    ConfigOption,
    JsonOption,
    RunOption,
    SetOption,
    print_json,
    stdout,
)
from api.cli.reporters import reporting


def eval_(
    run: RunOption = "runs/quickstart",
    config: ConfigOption = None,
    split: Annotated[
        str, typer.Option(help="train, val, test or all; of a mix, val and test are what it holds out.")
    ] = "test",
    overrides: SetOption = [],  # noqa: B006  typer copies it
    checkpoint: CheckpointOption = Checkpoint.LAST,
    pictures: Annotated[Path | None, typer.Option(help="Also draw one example per domain into this PNG.")] = None,
    refiner_alone: Annotated[
        bool, typer.Option("--refiner-alone", help="A control: the cloud's refiner gets logits of zero.")
    ] = False,
    draws: Annotated[int, typer.Option(min=1, help="Times each image crosses the channel, with its own fading.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Score a run on a split: mIoU, mF1, mPre, mRec, per class and per domain, and the router's health.

    Settings are the run's own, with --set on top; --config takes another file instead of them.
    """
    folder = find_model(run, best=checkpoint is Checkpoint.BEST).checkpoint
    # imported late: torch and timm take seconds, and other verbs need neither
    from airmoe_ray.config_file import load_config, parse_config
    from airmoe_ray.data import adopt, open_dataset
    from airmoe_ray.data.mix import not_scored
    from airmoe_ray.inference.evaluate import evaluate, leave_refiner_alone
    from airmoe_ray.inference.example_sheet import example_sheet
    from airmoe_ray.inference.segmenter import Segmenter
    from airmoe_ray.radio.ledger import check_budget
    from airmoe_ray.storage.checkpoint import load_checkpoint

    stored, card = load_checkpoint(folder, network=True)
    own = stored.model_dump(mode="json")
    settings = parse_config(own, overrides) if config is None else load_config(config, overrides)
    check_budget(settings)
    dataset = open_dataset(settings.data, split)
    if list(dataset.classes.names) != card.classes:
        dataset = adopt(dataset, card.table, given=settings.data.map, source=settings.data.name)
    with reporting() as report:
        if line := not_scored(dataset):
            report.line(line)
        report.stage(f"evaluating {len(dataset)} images of {settings.data.name}")
        if settings.model != "airmoe":
            from airmoe_ray.baselines.networks.checkpoint import load_network
            from airmoe_ray.baselines.networks.score import TrainedNetwork, evaluate_network

            if refiner_alone or pictures is not None:
                raise UserError(f"{shown(run)}: is a single model, {settings.model}; it has no refiner and no pictures")
            trained = TrainedNetwork(settings, load_network(folder)[-1])
            result = evaluate_network(trained, dataset, progress=report.progress("evaluated")).scores
        else:
            segmenter = Segmenter.load(folder, settings)
            if refiner_alone:
                leave_refiner_alone(segmenter)
            result = evaluate(segmenter, dataset, draws=draws, progress=report.progress("evaluated"))
    if as_json:
        print_json(result)
    else:
        _print_tables(result)
    if pictures is not None:  # after the scores, so that a bad path does not lose them
        pictures.parent.mkdir(parents=True, exist_ok=True)
        example_sheet(segmenter, dataset).save(pictures, format="PNG")


def _crossings(result: dict[str, Any]) -> str:
    return f", {result['draws']} draws of the channel each" if result["draws"] > 1 else ""


def _print_tables(result: dict[str, Any]) -> None:
    score_names = ("miou", "mf1", "mpre", "mrec")
    headline = "   ".join(f"{name} {result[name]:.2f}" for name in score_names)
    stdout.print(f"\n[bold]{headline}[/bold]   ({result['images']} images{_crossings(result)})\n")
    by_class = Table("class", *(("IoU", "F1", "precision", "recall")), title="per class", title_justify="left")
    for name, row in result["per_class"].items():
        by_class.add_row(escape(name), *("absent" if v is None else f"{v:.1f}" for v in row.values()))
    stdout.print(by_class)
    by_domain = Table("domain", "mIoU", title="per domain", title_justify="left")
    for name, row in result["per_domain"].items():
        by_domain.add_row(escape(name), f"{row['miou']:.1f}")
    stdout.print(by_domain)
    if "routing" in result:
        _print_routing(result)


def _print_routing(result: dict[str, Any]) -> None:
    routing = result["routing"]
    nmse = "no channel error" if routing["nmse_db"] is None else f"channel NMSE {routing['nmse_db']:.1f} dB"
    stdout.print(
        f"routing: balancedness {routing['balancedness']:.2f} (1 is even), least-used expert at "
        f"{routing['least_load']:.2f} of its fair load, NMI(domain, top expert) {routing['nmi_domain_expert']:.2f}, "
        f"{routing['effective_prototypes']:.1f} effective prototypes; {nmse}"
    )
    bits = result["communication"]
    stdout.print(
        f"per image, mean over all images: {bits['downlink_broadcast_bits']:.0f} bits of features and query down, "
        f"{bits['uplink_routing_bits']:.0f} bits of statistics up (raw client features would be "
        f"{bits['uplink_raw_feature_bits']:.0f}); {bits['air_channel_uses']:.0f} channel uses of payload in the air"
    )

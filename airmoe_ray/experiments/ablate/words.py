"""What the page of a sweep says besides its figures: which model, on which channel, what a setting does by itself."""

from collections.abc import Sequence
from typing import Any

from airmoe_ray.baselines.registry import find_method
from airmoe_ray.config import Config
from airmoe_ray.experiments.ablate.sweeps import Sweep, shrinkage, swept_method
from airmoe_ray.experiments.compare.channels import channel_words
from airmoe_ray.experiments.compare.plan import Cell


def about_model(base: Config, sweeps: Sequence[Sweep]) -> list[str]:
    """The model that is swept, and what it is scored on."""
    head = "with a head at the cloud, which the paper does not have" if base.experts.shared else "as in the paper"
    lines = [f"Swept: {find_method(swept_method(base)).label} ({head}; `experts.shared`)."]
    if any(not sweep.key.startswith("channel.") for sweep in sweeps):
        lines.append(f"Scored on {channel_words(base.channel)}.")
    if any(sweep.key.startswith("channel.") for sweep in sweeps):
        lines.append("Where the channel is swept, each value is trained and scored on its own channel.")
    return lines


def remarks_of(cells: Sequence[tuple[Sweep, Sequence[tuple[Any, Cell]]]], train_images: int) -> dict[str, str]:
    """By the key of a sweep, what follows from its values without a run."""
    found = {}
    for sweep, own in cells:
        if sweep.key == "train.lambda_frl":
            shares = {value: shrinkage(cell.config, train_images) for value, cell in own}
            told = ", ".join(f"{100 * share:.2g} % at {value:g}" for value, share in shares.items())
            found[sweep.key] = f"By itself, L_FRL shrinks p over such a run, 1 - (1 - 2 lambda lr)^steps, by {told}."
    return found

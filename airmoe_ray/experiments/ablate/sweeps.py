"""Sweeps: which setting, which values, what it is meant to move, and why it may not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from airmoe_ray.baselines.method import changed
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.compare.plan import Cell
from airmoe_ray.experiments.paper_figures import SWEEPS, PaperSweep


@dataclass(frozen=True)
class Sweep:
    """One setting and its values."""

    key: str
    values: list[Any]
    short: str  # what it is called on an axis
    moves: tuple[str, ...] = ()  # figures, named in `MOVED`, that it is meant to move
    also: tuple[tuple[str, Any], ...] = ()  # settings that follow from it
    if_flat: str = ""  # why scores may not move, and what would make them

    @property
    def paper(self) -> PaperSweep | None:
        """The paper's table of it."""
        return SWEEPS.get(self.key)

    def cells(self, base: Config, *, seeds: int) -> list[tuple[Any, Cell]]:
        """A run for each value and seed, all values once before any gets its next seed."""
        method = swept_method(base)
        return [(value, self._cell(base, method, value, seed)) for seed in range(seeds) for value in self.values]

    def _cell(self, base: Config, method: str, value: Any, seed: int) -> Cell:
        own = {**dict(self.also), self.key: value, "seed": base.seed + seed}
        return Cell(method, changed(base, own), f"{self.key}={value}")


def swept_method(base: Config) -> str:
    """Which model is swept: the configured one, with or without a head at the cloud."""
    return "airmoe+head" if base.experts.shared else "airmoe"


MOVED = {
    "nmse_db": "NMSE [dB]",
    "balancedness": "balancedness",
    "least_load": "least load, of fair",
    "nmi_domain_expert": "NMI(domain, expert)",
    "effective_prototypes": "exp H(alpha)",
    "prototype_norm": "mean norm of p",
}


def paper_sweeps(base: Config) -> dict[str, Sweep]:
    """The paper's five, by the names that the command line has for them."""

    def values(key: str) -> list[Any]:
        return list(SWEEPS[key].rows)

    return {
        "N": Sweep(
            "experts.count",
            values("experts.count"),
            "clients N",
            ("balancedness", "nmi_domain_expert"),
            if_flat="K stays the same, so every image is answered by as many experts; with more clients each learns "
            "from fewer images. A head at the cloud, where there is one, answers beside them whatever N is.",
        ),
        "K": Sweep(
            "routing.top_k",
            values("routing.top_k"),
            "routed clients K",
            ("nmse_db",),
            also=(("train.top_k", None),),
            if_flat="By Eq. (22) noise falls with K (see NMSE); whether it costs pixels shows at a lower "
            "`channel.snr_db`. A larger K also averages more experts, each trained on more images.",
        ),
        "M": Sweep(
            "frl.prototypes",
            values("frl.prototypes"),
            "prototypes M",
            ("effective_prototypes",),
            if_flat="Prototypes only choose and weigh experts; exp H(alpha) says how many of them answer a read. Where "
            "routing matters little, so does M.",
        ),
        "lambda_lb": Sweep(
            "train.lambda_lb",
            values("train.lambda_lb"),
            "lambda_LB",
            ("balancedness", "least_load"),
            if_flat="L_LB has no gradient by the experts, in Algorithm 1 by nothing at all; here it reaches "
            f"the prototypes (plain SGD, frl.lr {base.frl.lr:g}) and phi, which learns at train.query_lr_factor "
            f"({base.train.query_lr_factor:g}) of the rate. A larger train.query_lr_factor or lambda_LB, or "
            "train.warm_start.enabled=false, give it more to do.",
        ),
        "lambda_frl": Sweep(
            "train.lambda_frl",
            values("train.lambda_frl"),
            "lambda_FRL",
            ("prototype_norm",),
            if_flat="L_FRL has no gradient by the experts; here each step shrinks p by the factor 1 - 2 lambda frl.lr "
            f"({base.frl.lr:g}), and renewal pulls back. A larger frl.lr or lambda_FRL gives it more to do.",
        ),
    }


def shrinkage(config: Config, train_images: int) -> float:
    """Share of a prototype's length that L_FRL by itself takes in a run, 1 - (1 - 2 lambda lr)^steps."""
    if config.frl.learn == "renewal":
        return 0.0
    epochs = config.train.epochs - config.train.warm_start.shared_epochs
    steps = epochs * math.ceil(train_images / config.train.batch_size)
    return 1 - (1 - 2 * config.train.lambda_frl * config.frl.lr) ** steps


def parse_sweeps(base: Config, names: str, overrides: Sequence[str]) -> list[Sweep]:
    """Those of `--sweep`, and one for each `--set` of several values."""
    known = paper_sweeps(base)
    wanted = [] if names == "none" else list(known) if names == "all" else [n.strip() for n in names.split(",")]
    for name in wanted:
        if name not in known:
            raise UserError(f"--sweep {name}: expected all, none, or some of {', '.join(known)}")
    found = [known[name] for name in wanted]
    for override in overrides:
        key, _, text = override.partition("=")
        paper = next((sweep for sweep in known.values() if sweep.key == key), None)
        also = dict(paper.also) if paper else {}
        values = [_as_configured(base, {**also, key: yaml.safe_load(part)}, key) for part in text.split(",")]
        found.append(replace(paper, values=values) if paper else Sweep(key, values, key, tuple(MOVED)))
    if not found:
        raise UserError("nothing to sweep; give --sweep all, or --set KEY=A,B,C")
    return found


def _as_configured(base: Config, settings: dict[str, Any], key: str) -> Any:
    """A value as the configuration has it: YAML takes 1e-4 for text, the setting is a number."""
    value: Any = changed(base, settings)
    for part in key.split("."):
        value = getattr(value, part)
    return value


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of all runs, and those of several values: `key=a,b,c`, but not lists in brackets."""
    swept = [o for o in overrides if "," in o.partition("=")[2] and o.partition("=")[2].strip()[:1] not in "[{\"'"]
    return [o for o in overrides if o not in swept], swept

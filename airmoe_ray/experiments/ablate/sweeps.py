"""Sweeps: which setting, which values, what it is meant to move, and why it may not."""

from collections.abc import Sequence
from dataclasses import dataclass
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
        method = "airmoe+head" if base.experts.shared else "airmoe"
        return [(value, self._cell(base, method, value, seed)) for seed in range(seeds) for value in self.values]

    def _cell(self, base: Config, method: str, value: Any, seed: int) -> Cell:
        own = {**dict(self.also), self.key: value, "seed": base.seed + seed}
        return Cell(method, changed(base, own), f"{self.key}={value}")


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

    steps = "each step shrinks p by the factor 1 - 2 lambda frl.lr"
    return {
        "N": Sweep("experts.count", values("experts.count"), "clients N", ("balancedness", "nmi_domain_expert")),
        "K": Sweep(
            "routing.top_k",
            values("routing.top_k"),
            "routed clients K",
            ("nmse_db",),
            also=(("train.top_k", None),),
            if_flat="by Eq. (22) noise falls with K, and at 20 dB it is too small to cost pixels; more experts are "
            "averaged, each trained on more images; `channel.snr_db=0` shows the noise",
        ),
        "M": Sweep("frl.prototypes", values("frl.prototypes"), "prototypes M", ("effective_prototypes",)),
        "lambda_lb": Sweep(
            "train.lambda_lb",
            values("train.lambda_lb"),
            "lambda_LB",
            ("balancedness", "least_load"),
            if_flat="L_LB has no gradient by the experts, in Algorithm 1 by nothing at all; here it reaches "
            "the prototypes (plain SGD, frl.lr) and phi, which learns at train.query_lr_factor "
            f"({base.train.query_lr_factor:g}) of the rate, and clients start balanced; train.query_lr_factor=1, "
            "train.warm_start.enabled=false and lambda_LB 0.2 make it act",
        ),
        "lambda_frl": Sweep(
            "train.lambda_frl",
            values("train.lambda_frl"),
            "lambda_FRL",
            ("prototype_norm",),
            if_flat=f"L_FRL has no gradient by the experts; here {steps} ({base.frl.lr:g}), a few percent over a run, "
            "and renewal pulls back; frl.lr=1 or lambda_FRL 1e-2 make it act",
        ),
    }


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
        values = [yaml.safe_load(part) for part in text.split(",")]
        paper = next((sweep for sweep in known.values() if sweep.key == key), None)
        found.append(Sweep(key, values, paper.short if paper else key, paper.moves if paper else tuple(MOVED)))
    if not found:
        raise UserError("nothing to sweep; give --sweep all, or --set KEY=A,B,C")
    return found


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of all runs, and those of several values: `key=a,b,c`, but not lists in brackets."""
    swept = [o for o in overrides if "," in o.partition("=")[2] and o.partition("=")[2].strip()[:1] not in "[{\"'"]
    return [o for o in overrides if o not in swept], swept

"""What the cloud trains: its query, and a head, a refiner and a gate of its own where the configuration has them.

A gate is another way to choose clients than by their statistics, named by its dotted path in `routing.rule`.
The rules that AirMoE is compared with are such gates.
Suffixes: B inputs, N clients, C classes, D features, d statistic, h w grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.model.experts import Head
from airmoe_ray.model.query import Query
from airmoe_ray.model.refiner import Refiner
from airmoe_ray.runtime.imports import load_class
from airmoe_ray.runtime.rng import torch_generator


class GateInput(NamedTuple):
    """What a gate may look at."""

    features_BDhw: Tensor
    query_dist_Bd: Tensor  # Q, Eq. (8)
    stat_BNd: Tensor  # P_j, Eq. (13)
    domains_B: Tensor | None = None  # known in training and scoring, never when serving


class Gate(nn.Module, ABC):
    """Scores clients for an input, larger is better; S = TopK of them. Its parameters learn with the experts."""

    fusion: ClassVar[Literal["gate", "divergence", "equal"]] = "gate"  # of a method that is this gate and no more
    needs_statistics: ClassVar[bool] = False  # whether clients have to send P_j
    needs_domains: ClassVar[bool] = False  # whether it can only answer where the input's domain is known

    def __init__(self, config: Config, *, feature_dim: int, generator: torch.Generator) -> None:
        """Initial weights come from the generator, so that a seed is a seed."""
        super().__init__()

    @abstractmethod
    def forward(self, seen: GateInput) -> Tensor:
        """Scores (B, N)."""


class CloudParts(NamedTuple):
    """The cloud's modules, in the in-process model and in the cloud's own process alike."""

    query: Query
    shared: Head | None  # `experts.shared`
    refiner: Refiner | None  # `experts.refiner`
    gate: Gate | None = None  # `routing.rule`, where it names one

    def refine(self, fine: Sequence[Tensor], *, apart: bool = False) -> Callable[[Tensor], Tensor] | None:
        """Fused logits to sharper ones, with the finer maps of the same images; None without a refiner.

        `apart`: what the refiner learns does not reach the experts.
        """
        refiner = self.refiner
        if refiner is None:
            return None
        return lambda logits_BChw: refiner(logits_BChw.detach() if apart else logits_BChw, fine)


def cloud_parts(
    config: Config,
    *,
    feature_dim: int,
    classes: int,
    dilations: tuple[int, int, int],
    fine_dims: Sequence[int] = (),
) -> CloudParts:
    """The untrained parts; their initial weights follow from the seed. `fine_dims`: channels that a refiner sees."""
    query = Query(
        feature_dim,
        config.frl.dim,
        temperature=config.routing.norm_temperature,
        generator=torch_generator(config.seed, "init/query"),
    )
    shared = refiner = None
    if config.experts.shared:
        shared = Head(
            config.experts,
            feature_dim=feature_dim,
            classes=classes,
            dilations=dilations,
            generator=torch_generator(config.seed, "init/shared"),
        )
    if width := config.experts.refiner:
        generator = torch_generator(config.seed, "init/refiner")
        refiner = Refiner(fine_dims, classes=classes, width=width, generator=generator)
    return CloudParts(query, shared, refiner, make_gate(config, feature_dim=feature_dim))


def make_gate(config: Config, *, feature_dim: int) -> Gate | None:
    """The gate that `routing.rule` names; None where there is none."""
    if not config.routing.gated:
        return None
    kind = load_class(config.routing.rule, Gate, "routing.rule")  # type: ignore[type-abstract]
    return kind(config, feature_dim=feature_dim, generator=torch_generator(config.seed, "init/gate"))


def check_servable(config: Config) -> None:
    """Refuse a gate that asks for what only datasets know."""
    if config.routing.gated and load_class(config.routing.rule, Gate, "routing.rule").needs_domains:  # type: ignore[type-abstract]
        raise UserError(f"routing.rule = {config.routing.rule} needs the domain of every image; it cannot be served")


def gate_scores(gate: Gate, seen: GateInput) -> Tensor:
    """What the gate says, checked."""
    if gate.needs_domains and seen.domains_B is None:
        raise UserError(f"{type(gate).__name__} needs the domain of every image, which only datasets know")
    score_BN: Tensor = gate(seen)
    wanted = tuple(seen.stat_BNd.shape[:2])
    if tuple(score_BN.shape) != wanted:
        found = tuple(score_BN.shape)
        raise UserError(f"the gate gave {found}; expected a number per input and client, {wanted}")
    return score_BN

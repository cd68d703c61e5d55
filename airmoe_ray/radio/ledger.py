"""Communication ledger: what one input costs on each link, and what the alternatives would cost.

It counts what the routing rule and the fusion weights need to cross, so that methods compare: P_j where the rule reads
it, delta_j where it weighs. The processes send both whatever the rule is.
b bits per real number (32 by default); the analog air is counted in complex channel uses, not bits.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airmoe_ray.config import Config, RoutingConfig
from airmoe_ray.errors import ConfigError
from airmoe_ray.runtime.imports import load_class

BITS_PER_REAL = 32


@dataclass(frozen=True)
class Ledger:
    """Bits and channel uses of one input."""

    downlink_broadcast_bits: int  # features and query, counted once whoever listens
    uplink_routing_bits: int  # C_route: every client's statistic, where the rule reads it, and fade bit
    downlink_routed_bits: int  # one bit per client: you are routed
    uplink_report_bits: int  # c_j of the routed, and delta_j where it weighs them
    downlink_weights_bits: int  # beta_j each, rho once
    air_channel_uses: int  # d_y of payload, whatever K is; pilots come on top; 0 where nobody transmits
    uplink_raw_feature_bits: int  # instead of statistics: every client's hidden features
    tdma_bits: int  # instead of the air: every routed client's quantised output in turn
    tdma_channel_uses: int | None  # the same in channel uses at capacity, log2(1 + SNR |gamma|^2); None without gains


def routing_uplink_bits(clients: int, dim: int, bits: int = BITS_PER_REAL) -> int:
    """C_route of one input, Eq. (3): N (d b + 1)."""
    return clients * (dim * bits + 1)


def account(
    config: Config,
    *,
    feature_dim: int,
    classes: int,
    grid: tuple[int, int],
    top_k: int,
    gains_K: Sequence[float] | None = None,
    snr_db: float | None = None,
    clients: int | None = None,
    routing: RoutingConfig | None = None,
    bits: int = BITS_PER_REAL,
) -> Ledger:
    """The ledger of one input with `top_k` transmitting clients whose |gamma_j|^2 are `gains_K`; C_route is Eq. (3).

    `snr_db`, `clients` and `routing` take the place of the configured SNR, N and rule: those of the request.
    """
    routing = routing or config.routing
    cells = grid[0] * grid[1]
    n, d, d_y = clients or config.experts.count, config.frl.dim, classes * cells
    digital_bits = config.channel.digital_bits
    tdma_uses = None
    if gains_K is not None:
        snr = 10 ** ((config.channel.snr_db if snr_db is None else snr_db) / 10)
        tdma_uses = sum(math.ceil(d_y * digital_bits / math.log2(1 + snr * gain)) for gain in gains_K)
    return Ledger(
        downlink_broadcast_bits=feature_dim * cells * bits + d * bits,
        uplink_routing_bits=routing_uplink_bits(n, d if _reads_statistics(routing, n) else 0, bits),
        downlink_routed_bits=n,
        uplink_report_bits=(2 if routing.fusion == "divergence" else 1) * bits * top_k,
        downlink_weights_bits=(top_k + 1) * bits if top_k else 0,
        air_channel_uses=d_y if top_k else 0,
        uplink_raw_feature_bits=raw_feature_bits(config, cells, clients=n, bits=bits),
        tdma_bits=top_k * d_y * digital_bits,
        tdma_channel_uses=tdma_uses,
    )


def _reads_statistics(routing: RoutingConfig, clients: int) -> bool:
    """Whether clients are chosen by what they send: most gates, a random choice, or a choice of all need nothing."""
    if routing.gated:
        return bool(getattr(load_class(routing.rule, object, "routing.rule"), "needs_statistics", False))
    return routing.rule == "js" and routing.top_k < clients


def raw_feature_bits(config: Config, cells: int, *, clients: int, bits: int = BITS_PER_REAL) -> int:
    """Uplink if all clients sent their hidden features instead, for `cells` cells of the feature grid."""
    return clients * config.experts.hidden * cells * bits


def mean_ledger(ledgers: Sequence[Ledger]) -> dict[str, float | None]:
    """Each figure's mean over inputs; None where an input lacks it."""
    columns = {name: [getattr(ledger, name) for ledger in ledgers] for name in Ledger.__dataclass_fields__}
    return {name: None if None in values else sum(values) / len(values) for name, values in columns.items()}


@dataclass(frozen=True)
class Alternatives:
    """Other ways to the same answer, per input unless it says otherwise: what statistics and air have to be beside."""

    gate_uplink_bits: int  # a gate at the cloud instead of statistics: a fade bit per client is left
    mirrored_frl_bits: int  # FRLs mirrored at the cloud instead of statistics: N M d b, once for all inputs
    mirrored_inputs: float  # inputs whose C_route costs as much as that
    broadcast_bits: float  # features to the clients, which every way that has experts at clients needs
    label_bits: float | None  # instead of the air: the routed clients' argmax labels, entropy-coded
    label_channel_uses: float | None  # the same at the capacity of each link; None without channel gains


def label_entropy(labels_C: Sequence[float]) -> float:
    """H [bits] of one label, given how often each class is predicted: what a coder that knows no neighbours needs."""
    total = sum(labels_C)
    shares = [count / total for count in labels_C if count > 0]
    return -sum(share * math.log2(share) for share in shares) if total > 0 else 0.0


def alternatives(
    config: Config,
    spent: Mapping[str, float | None],
    *,
    classes: int,
    entropy: float | None,
    bits: int = BITS_PER_REAL,
) -> Alternatives:
    """Given a mean ledger and H of a label: a client that sends labels needs H h w bits.

    A coder that looks at neighbouring cells needs less. Labels can be voted on, but not weighed and added as logits
    are: this is the price, not the same answer.
    """
    clients = config.experts.count
    mirrored = sum(config.frl.counts(clients)) * config.frl.dim * bits
    label, uses = None, None
    tdma, tdma_uses = spent.get("tdma_bits"), spent.get("tdma_channel_uses")
    if entropy is not None and tdma is not None:
        sent_cells = tdma / (classes * config.channel.digital_bits)  # K h w, K being those who transmit
        label = entropy * sent_cells
        uses = label * tdma_uses / tdma if tdma_uses is not None and tdma else None
    return Alternatives(
        gate_uplink_bits=clients,
        mirrored_frl_bits=mirrored,
        mirrored_inputs=mirrored / routing_uplink_bits(clients, config.frl.dim, bits),
        broadcast_bits=spent.get("downlink_broadcast_bits") or 0.0,
        label_bits=label,
        label_channel_uses=uses,
    )


@dataclass
class Traffic:
    """Bits that crossed in training, by what they carried, as they are sent; the air is counted in channel uses."""

    uplink: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    channel_uses: int = 0
    images: int = 0
    warm_start_bits: int = 0  # down, once, before the first step
    fedavg_bits: int = 0  # up, instead: every client's weights once per epoch
    raw_feature_bits: int = 0  # up, instead: every client's hidden features

    def up(self, kind: str, *, reals: int = 0, bits: int = 0) -> None:
        """From clients to the cloud."""
        self.uplink[kind] += reals * BITS_PER_REAL + bits

    def down(self, kind: str, *, reals: int = 0, bits: int = 0) -> None:
        """From the cloud to clients; a broadcast counts once."""
        self.downlink[kind] += reals * BITS_PER_REAL + bits

    def stored(self) -> dict[str, Any]:
        """For a checkpoint, as JSON has it."""
        return {**vars(self), "uplink": dict(self.uplink), "downlink": dict(self.downlink)}  # asdict spoils Counters

    @classmethod
    def from_stored(cls, stored: dict[str, Any]) -> "Traffic":
        """What was `stored`; nothing, where nothing was."""
        links = {name: Counter(stored.get(name, {})) for name in ("uplink", "downlink")}
        return cls(**{**stored, **links})

    def summary(self) -> dict[str, float]:
        """Per image of the steps, and the warm start as a whole."""
        images = max(self.images, 1)
        return {
            "uplink_bits": self.uplink.total() / images,
            "downlink_bits": self.downlink.total() / images,
            "channel_uses": self.channel_uses / images,
            "warm_start_bits": self.warm_start_bits,
            "fedavg_uplink_bits": self.fedavg_bits / images,
            "raw_features_uplink_bits": self.raw_feature_bits / images,
        }


def check_budget(config: Config) -> None:
    """Constraint (6c): refuse a configuration whose C_route exceeds C_max, before anything runs."""
    needed, budget = routing_uplink_bits(config.experts.count, config.frl.dim), config.routing.budget_bits
    if budget is not None and needed > budget:
        raise ConfigError(
            f"routing needs C_route = {needed} bits per input (N = {config.experts.count}, d = {config.frl.dim}), over "
            f"routing.budget_bits = {budget}; lower experts.count or frl.dim, or raise the budget"
        )

"""What travels between front end, cloud, clients and channel, as frozen dataclasses of plain values and arrays.

Suffixes: B inputs, N clients, K routed, d statistic, C classes, h w grid; P (input, client) pairs.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.policy import Fault
from actors.roster import sentence
from airmoe_ray.config import ChannelConfig, RoutingConfig
from airmoe_ray.ledger import Ledger

UInt8Array = NDArray[np.uint8]
FloatArray = NDArray[np.floating]
AnyArray = NDArray[Any]


@dataclass(frozen=True)
class Settings:
    """What a request may choose; only requests of equal settings share a batch."""

    routing: RoutingConfig
    channel: ChannelConfig
    renew: bool = False


@dataclass(frozen=True)
class ClientAccount:
    """One client's part in one image."""

    id: int
    js: float | None  # D_JS(Q || P_j) [nats]; None: it did not answer
    score: float | None
    probability: float | None
    selected: bool  # in S, before truncation
    weight: float  # beta_j, 0 where silent
    gamma: complex | None  # its channel estimate, where it transmitted
    version: int | None  # renewals its FRL had seen


@dataclass(frozen=True)
class Answer:
    """One image: the fused logits, and the full account of how they came about."""

    logits_Chw: FloatArray
    clients: tuple[ClientAccount, ...]
    channel: ChannelConfig
    seed: int  # from which fading and noise follow
    rho: float
    noise_power: float  # sigma_c^2 per complex symbol
    nmse: float  # against the noiseless sum
    truncated: tuple[int, ...]  # routed clients in deep fade
    skipped: dict[int, str]  # clients that could not take part, and why
    all_faded: bool
    ledger: Ledger
    batch_size: int
    timings_ms: dict[str, float] = field(default_factory=dict)  # queue, backbone, read, route, expert, channel

    @property
    def degraded(self) -> bool:
        """Whether a client was skipped, or all of S faded; ordinary truncation is not degradation."""
        return bool(self.skipped) or self.all_faded

    @property
    def reason(self) -> str | None:
        """Why the answer is degraded, in words."""
        alike: dict[str, list[int]] = {}
        for client, why in sorted(self.skipped.items()):
            alike.setdefault(why, []).append(client)
        reasons = [sentence(clients, why) for why, clients in alike.items()]
        if self.all_faded:
            reasons.append("all routed clients were in deep fade")
        return "; ".join(reasons) or None


@dataclass(frozen=True)
class BatchAnswer:
    """A batch of equal settings, as arrays; the front end turns it into one `Answer` per image."""

    logits_BChw: AnyArray
    js_BN: AnyArray
    score_BN: AnyArray
    prob_BN: AnyArray
    selected_BK: AnyArray
    transmit_BK: AnyArray
    beta_BK: AnyArray
    rho_B: AnyArray
    nmse_B: AnyArray
    faded_BN: AnyArray
    present_N: AnyArray
    all_faded_B: AnyArray
    skipped_B: list[dict[int, Fault]]
    versions: dict[int, int]
    faults: dict[str, Fault]  # by instance
    heard: tuple[str, ...]  # instances whose signal arrived
    sealed_gamma_BK: bytes  # of who transmitted, from the channel past the cloud
    timings_ms: dict[str, float]

"""What the system found out about one image, taken out of the batch that it travelled in.

Suffixes: B inputs, N clients, K routed, C classes, h w grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.errors import Fault
from actors.rounds.calls import unseal
from actors.rounds.messages import Array, BatchResult, FloatArray, Settings
from actors.rounds.roster import describe
from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.inference.result import account_of
from airmoe_ray.radio.ledger import Ledger


@dataclass(frozen=True)
class ClientAccount:
    """One client's part in one image."""

    id: int
    js: float | None  # D_JS(Q || P_j) [nats]; None: it did not answer
    score: float | None  # None: it did not answer, or was left out
    probability: float | None
    selected: bool  # in S, before truncation
    weight: float  # beta_j, 0 where silent
    gamma: complex | None  # its channel estimate, where it transmitted
    version: int | None  # renewals its FRL had seen


@dataclass(frozen=True)
class ImageResult:
    """One image: the fused logits, and the full account of how they came about."""

    logits_Chw: FloatArray
    clients: tuple[ClientAccount, ...]
    channel: ChannelConfig
    seed: int  # from which fading and noise follow
    rho: float
    noise_power: float  # sigma_c^2 per complex symbol
    nmse: float  # against the noiseless sum
    truncated: tuple[int, ...]  # routed clients in deep fade
    skipped: dict[int, Fault]  # clients that could not take part, or did not confirm a renewal, and why
    all_faded: bool
    ledger: Ledger
    batch_size: int
    renewed: tuple[int, ...] = ()  # clients that have renewed their FRL for it: it is on disk
    timings_ms: dict[str, float] = field(default_factory=dict)  # queue, backbone, read, route, expert, channel

    @property
    def degraded(self) -> bool:
        """Whether a client was skipped, or all of S faded; ordinary truncation is not degradation."""
        return bool(self.skipped) or self.all_faded

    @property
    def reason(self) -> str | None:
        """Why the result is degraded, as an English sentence; programs read `skipped` and `all_faded`."""
        alike: dict[Fault, list[int]] = {}
        for client, fault in sorted(self.skipped.items(), key=lambda item: item[0]):
            alike.setdefault(fault, []).append(client)
        reasons = [describe(clients, fault.value) for fault, clients in alike.items()]
        if self.all_faded:
            reasons.append("all routed clients were in deep fade")
        return "; ".join(reasons) or None


def results_of(
    batch: BatchResult,
    *,
    config: Config,
    feature_dim: int,
    settings_B: Sequence[Settings],
    seeds_B: Sequence[int],
    queued_ms_B: Sequence[float],
) -> list[ImageResult]:
    """The images of a batch in order; here the channel's seal on gamma is broken, for the account alone."""
    gamma_BK = unseal(batch.sealed_gamma_BK)
    return [
        _image_result(batch, row, gamma_BK[row], config, feature_dim, settings, seed, queued_ms)
        for row, (settings, seed, queued_ms) in enumerate(zip(settings_B, seeds_B, queued_ms_B, strict=True))
    ]


def _image_result(  # noqa: PLR0917
    batch: BatchResult,
    row: int,
    gamma_K: Array,
    config: Config,
    feature_dim: int,
    settings: Settings,
    seed: int,
    queued_ms: float,
) -> ImageResult:
    wanted = settings.participants.includes
    transmitting = [
        (int(c), float(b), complex(g))
        for c, b, g in zip(batch.transmit_BK[row], batch.beta_BK[row], gamma_K, strict=True)
        if b > 0
    ]
    weight = {client: beta for client, beta, _ in transmitting}
    gamma = {client: gain for client, _, gain in transmitting}
    selected = {int(c) for c in batch.selected_BK[row] if c >= 0}
    told = account_of(
        config,
        selected=selected,
        faded_N=batch.faded_BN[row].tolist(),
        gamma=gamma,
        channel=settings.channel,
        routing=settings.routing,
        feature_dim=feature_dim,
        classes=batch.logits_BChw.shape[1],
        grid=batch.grid,
    )
    return ImageResult(
        logits_Chw=batch.logits_BChw[row],
        clients=tuple(
            _client(
                batch,
                row,
                client,
                selected=client in selected,
                weight=weight.get(client, 0.0),
                gamma=gamma.get(client),
            )
            for client in range(len(batch.present_N))
        ),
        channel=settings.channel,
        seed=seed,
        rho=float(batch.rho_B[row]),
        noise_power=told.noise_power,
        nmse=float(batch.nmse_B[row]),
        truncated=told.truncated,
        skipped={client: fault for client, fault in batch.skipped_B[row].items() if wanted(client)},
        renewed=batch.renewed_B[row],
        all_faded=bool(batch.all_faded_B[row]),
        ledger=told.ledger,
        batch_size=len(batch.rho_B),
        timings_ms={"queue": queued_ms, **batch.timings_ms},
    )


def _client(
    batch: BatchResult, row: int, client: int, *, selected: bool, weight: float, gamma: complex | None
) -> ClientAccount:
    if not batch.present_N[client]:
        return ClientAccount(client, None, None, None, False, 0.0, None, None)
    return ClientAccount(
        id=client,
        js=float(batch.js_BN[row, client]),
        score=float(score) if np.isfinite(score := batch.score_BN[row, client]) else None,  # left out: -inf
        probability=float(batch.prob_BN[row, client]),
        selected=selected,
        weight=weight,
        gamma=gamma,
        version=batch.versions.get(client),
    )

"""From a batch of arrays to one `Answer` per image, with its full account.

Suffixes: B inputs, N clients, K routed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.messages import Answer, BatchAnswer, ClientAccount
from actors.wire import unseal
from airmoe_ray.channel import noise_power
from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.ledger import account


def answers_of(
    batch: BatchAnswer,
    *,
    config: Config,
    feature_dim: int,
    channel: ChannelConfig,
    seeds_B: Sequence[int],
    queued_ms_B: Sequence[float],
) -> list[Answer]:
    """The answers of a batch in order; here the channel's seal on gamma is broken, for the account alone."""
    gamma_BK = unseal(batch.sealed_gamma_BK)
    return [
        _answer(batch, row, gamma_BK[row], config, feature_dim, channel, seed, queued_ms)
        for row, (seed, queued_ms) in enumerate(zip(seeds_B, queued_ms_B, strict=True))
    ]


def _answer(  # noqa: PLR0917
    batch: BatchAnswer,
    row: int,
    gamma_K: NDArray[np.complex128],
    config: Config,
    feature_dim: int,
    channel: ChannelConfig,
    seed: int,
    queued_ms: float,
) -> Answer:
    transmitting = [
        (int(c), float(b), complex(g))
        for c, b, g in zip(batch.transmit_BK[row], batch.beta_BK[row], gamma_K, strict=True)
        if b > 0
    ]
    weight = {client: beta for client, beta, _ in transmitting}
    gamma = {client: gain for client, _, gain in transmitting}
    selected = {int(c) for c in batch.selected_BK[row]}
    grid = batch.logits_BChw.shape[2:]
    return Answer(
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
        channel=channel,
        seed=seed,
        rho=float(batch.rho_B[row]),
        noise_power=noise_power(channel) if channel.kind == "air" else 0.0,
        nmse=float(batch.nmse_B[row]),
        truncated=tuple(sorted(c for c in selected if batch.faded_BN[row, c] and c not in weight)),
        skipped={client: fault.value for client, fault in batch.skipped_B[row].items()},
        all_faded=bool(batch.all_faded_B[row]),
        ledger=account(
            config,
            feature_dim=feature_dim,
            classes=batch.logits_BChw.shape[1],
            grid=(grid[0], grid[1]),
            top_k=len(weight),
            gains_K=[abs(gain) ** 2 for gain in gamma.values()],
            snr_db=channel.snr_db,
            clients=len(batch.present_N),
        ),
        batch_size=len(batch.rho_B),
        timings_ms={"queue": queued_ms, **batch.timings_ms},
    )


def _client(
    batch: BatchAnswer, row: int, client: int, *, selected: bool, weight: float, gamma: complex | None
) -> ClientAccount:
    if not batch.present_N[client]:
        return ClientAccount(client, None, None, None, False, 0.0, None, None)
    return ClientAccount(
        id=client,
        js=float(batch.js_BN[row, client]),
        score=float(batch.score_BN[row, client]),
        probability=float(batch.prob_BN[row, client]),
        selected=selected,
        weight=weight,
        gamma=gamma,
        version=batch.versions.get(client),
    )

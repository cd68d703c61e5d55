"""The air as an actor: it draws and holds every client's gamma and the noise, and adds up what clients transmit.

All draws follow from the ids of the inputs, so a restarted channel gives the same answer as the one it replaces.
Suffixes: B inputs, N clients, K routed, n clients of one host, C classes, h w grid; P (input, rank) pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from actors.wire import Receiver, seal
from airmoe_ray.channel import draw_gamma, draw_noise, superpose, weighted_sum
from airmoe_ray.config import ChannelConfig
from airmoe_ray.device import pick_device

Array = NDArray[Any]


@dataclass(frozen=True)
class Arrival:
    """What reaches the receiver, and the simulator's knowledge of its error; see `airmoe_ray.channel.Received`."""

    signal_BChw: Array
    error_energy_B: Array
    clean_energy_B: Array
    sealed_gamma_BK: bytes  # of who transmitted: for the account, passed on by the cloud unopened
    invalid: tuple[int, ...] = ()  # which parts were nonsense; then there is no signal


class Channel(Receiver):
    """Fading, noise and superposition for all clients, Eq. (16)."""

    def __init__(self, seed: int) -> None:
        pick_device("cpu", threads=1)
        self._gamma = lru_cache(maxsize=64)(
            lambda ids_B, clients, config: draw_gamma(ids_B, clients, config=config, seed=seed)
        )
        self.seed = seed

    def sound(
        self, ids_B: tuple[int, ...], total: int, hosts: Sequence[Sequence[int]], config: ChannelConfig
    ) -> list[bytes] | bytes:
        """Pilots: each host gets gamma of its own clients (B, n) as a separate object, so nobody sees another's."""
        gamma_BN = self._gamma(ids_B, total, config).numpy()
        replies = [seal(np.ascontiguousarray(gamma_BN[:, list(clients)])) for clients in hosts]
        return replies if len(replies) > 1 else replies[0]

    def superpose(  # noqa: PLR0917  what comes by reference must be positional
        self,
        ids_B: tuple[int, ...],
        total: int,
        config: ChannelConfig,
        transmit_BK: Array,
        beta_BK: Array,
        places: Sequence[Array],
        shape: tuple[int, ...],
        *parts: Array,
    ) -> Arrival:
        """r = sum_j gamma_j x_j + n, Eq. (16); `places` says which (input, rank) each host's rows belong to.

        A part that is not finite or not of `shape` (C, h, w) never reaches the air: it is named and nothing is sent.
        """
        gamma_BN = self._gamma(ids_B, total, config)
        gamma_BK = gamma_BN.gather(1, torch.from_numpy(transmit_BK))
        invalid = [
            number
            for number, (place_P, part) in enumerate(zip(places, parts, strict=True))
            if part.shape != (len(place_P), *shape) or not np.isfinite(part).all()
        ]
        if invalid:
            nothing = np.zeros(0)
            return Arrival(nothing, nothing, nothing, b"", tuple(invalid))
        batch, k = transmit_BK.shape
        sent = np.zeros((batch * k, *shape), dtype=parts[0].dtype)
        for place_P, part in zip(places, parts, strict=True):
            sent[place_P] = part
        sent_BKChw = torch.from_numpy(sent.reshape(batch, k, *sent.shape[1:]))
        if config.kind == "air":
            noise = draw_noise(ids_B, sent_BKChw.shape[2:], config=config, seed=self.seed).to(sent_BKChw)
            received = superpose(sent_BKChw, gamma_BK.to(sent_BKChw), noise)
        else:
            bits = config.digital_bits if config.kind == "digital" else None
            received = weighted_sum(sent_BKChw, torch.from_numpy(beta_BK).to(sent_BKChw), bits=bits)
        return Arrival(
            received.signal_BChw.numpy(),
            received.error_energy_B.numpy(),
            received.clean_energy_B.numpy(),
            seal(gamma_BK.numpy()),
        )

    def ping(self) -> bool:
        """Alive."""
        return True


ChannelActor = ray.remote(Channel)

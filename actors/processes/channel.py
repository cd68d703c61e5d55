"""The air as an actor: it draws and holds every client's gamma and the noise, and adds up what clients transmit.

All draws follow from the ids of the inputs, so a restarted channel gives the same result as the one it replaces.
Suffixes: B inputs, N clients, K routed, n clients of one host, C classes, h w grid; P routed pairs of one host.
"""

from functools import lru_cache
from typing import Any, assert_never

import numpy as np
import ray
import torch

from actors.rounds.calls import Endpoint, seal
from actors.rounds.messages import Array, Arrival, Sound, Superpose
from airmoe_ray.radio.channel import deliver, draw_gamma
from airmoe_ray.runtime.device import pick_device

ChannelMessage = Sound | Superpose


class Channel(Endpoint):
    """Fading, noise and superposition for all clients, Eq. (4)."""

    def __init__(self, seed: int) -> None:
        pick_device("cpu", threads=1)
        self._gamma = lru_cache(maxsize=64)(
            lambda ids_B, clients, config: draw_gamma(ids_B, clients, config=config, seed=seed)
        )
        self.seed = seed

    def receive(self, message: ChannelMessage, *beside: Any) -> object:
        """Call the method for this type of message."""
        match message:
            case Sound():
                return self.sound(message)
            case Superpose():
                return self.superpose(message, *beside)
            case _:
                assert_never(message)

    def sound(self, message: Sound) -> list[Array]:
        """Pilots: gamma of each host's own clients (B, n), of which every host gets its own and no other."""
        gamma_BN = self._gamma(message.ids_B, message.clients, message.channel).numpy()
        return [np.ascontiguousarray(gamma_BN[:, list(clients)]) for clients in message.hosts]

    def superpose(self, message: Superpose, *symbols_PChw: Array) -> Arrival:
        """r = sum_j gamma_j x_j + n, Eq. (4).

        Symbols that are not finite or not of the right shape never reach the air: their hosts are named and nothing is
        sent.
        """
        parts = list(zip(message.places, symbols_PChw, strict=True))
        invalid = [
            number
            for number, (place_P, symbols) in enumerate(parts)
            if symbols.shape != (len(place_P), *message.shape) or not np.isfinite(symbols).all()
        ]
        if invalid:
            nothing = np.zeros(0)
            return Arrival(nothing, nothing, nothing, b"", tuple(invalid))
        batch, k = message.transmit_BK.shape
        sent = np.zeros((batch * k, *message.shape), dtype=symbols_PChw[0].dtype)
        for place_P, symbols in parts:
            sent[place_P] = symbols
        gamma_BN = self._gamma(message.ids_B, message.clients, message.channel)
        gamma_BK = gamma_BN.gather(1, torch.from_numpy(message.transmit_BK))
        received = deliver(
            torch.from_numpy(sent.reshape(batch, k, *message.shape)),
            gamma_BK,
            torch.from_numpy(message.beta_BK),
            ids_B=message.ids_B,
            config=message.channel,
            seed=self.seed,
        )
        return Arrival(
            received.signal_BChw.numpy(),
            received.error_energy_B.numpy(),
            received.clean_energy_B.numpy(),
            seal(gamma_BK.numpy()),
        )

    def ping(self) -> bool:
        """Whether it is alive."""
        return True


ChannelActor = ray.remote(Channel)

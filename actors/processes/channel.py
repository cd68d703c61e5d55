"""The air as an actor: it draws the fading of who transmits and the noise, and adds up what clients transmit.

All draws follow from the ids of the inputs, so a restarted channel gives the same result as the one it replaces.
Suffixes: B inputs, K routed, C classes, h w grid; P routed pairs of one host.
"""

from typing import Any

import numpy as np
import ray
import torch

from actors.errors import Fault
from actors.rounds.calls import Endpoint, seal
from actors.rounds.messages import Array, Arrival, Superpose
from airmoe_ray.radio.channel import deliver, draw_gamma
from airmoe_ray.runtime.device import pick_device


class Channel(Endpoint):
    """Fading, noise and superposition for all clients, Eq. (4)."""

    def __init__(self, seed: int) -> None:
        pick_device("cpu", threads=1)
        self.seed = seed

    def receive(self, message: Superpose, *beside: Any) -> object:
        """Add up a transmission: the one message that the channel takes."""
        return self.superpose(message, *beside)

    def superpose(self, message: Superpose, *symbols_PChw: Array | Fault) -> Arrival:
        """r = sum_j gamma_j x_j + n, Eq. (4).

        Symbols that are not finite or not of the right shape never reach the air: their hosts are named and nothing is
        sent.
        """
        fit, faults = {}, {}
        for number, (place_P, symbols) in enumerate(zip(message.places, symbols_PChw, strict=True)):
            if isinstance(symbols, Fault):
                faults[number] = symbols
            elif symbols.shape != (len(place_P), *message.shape) or not np.isfinite(symbols).all():
                faults[number] = Fault.INVALID
            else:
                fit[number] = symbols
        if faults:
            nothing = np.zeros(0)
            return Arrival(nothing, nothing, nothing, b"", faults)
        batch, k = message.transmit_BK.shape
        sent = np.zeros((batch * k, *message.shape), dtype=fit[0].dtype)
        for number, symbols in fit.items():
            sent[message.places[number]] = symbols
        gamma_BK = draw_gamma(message.ids_B, message.transmit_BK, config=message.channel, seed=self.seed)
        received = deliver(
            torch.from_numpy(sent.reshape(batch, k, *message.shape)),
            gamma_BK,
            torch.from_numpy(message.beta_BK),
            ids_B=message.ids_B,
            config=message.channel,
            seed=self.seed,
            snr_db_B=message.snr_db_B,
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

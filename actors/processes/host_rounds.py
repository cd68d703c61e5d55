"""What a host keeps of the rounds that are under way, between their exchanges.

Suffixes: B inputs, n clients of this host, M prototypes, d statistic, C classes, h w grid; P routed pairs;
A inputs that activated one client.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from actors.errors import UnknownRoundError
from actors.rounds.messages import Array, RenewalInput
from airmoe_ray.config import ChannelConfig

_ROUNDS_KEPT = 64  # rounds whose cloud vanished are forgotten after this many others


@dataclass
class HostRound:
    """One round: what clients know from its read, and what their experts made of its inputs."""

    channel: ChannelConfig
    query_dist_Bd: Tensor
    gamma_Bn: Tensor
    alpha_BnM: Tensor
    outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # (input, index): y_j, psi_j
    g_BChw: Tensor | None = None  # dL/dy^, on the way back

    @property
    def gain_Bn(self) -> Tensor:
        """|gamma_j|^2."""
        return self.gamma_Bn.abs().square()

    def collect(self, sample_P: Array, client_P: Array, index_of: Mapping[int, int]) -> dict[int, RenewalInput]:
        """Attention and psi of the inputs that activated each client, in input order."""
        collected = {}
        for client in np.unique(client_P).tolist():
            rows, index = np.sort(sample_P[client_P == client]).tolist(), index_of[client]
            psi_Ad = torch.stack([self.outputs[row, index][1] for row in rows]).detach()
            collected[client] = RenewalInput(self.alpha_BnM[rows, index].cpu().numpy(), psi_Ad.cpu().numpy())
        return collected


class HostRounds:
    """The rounds under way, by id."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, HostRound] = OrderedDict()

    def begin(self, round_id: str, round_: HostRound) -> None:
        """Add a round; where there are too many, the oldest are forgotten."""
        self._rounds[round_id] = round_
        while len(self._rounds) > _ROUNDS_KEPT:
            self._rounds.popitem(last=False)

    def end(self, round_ids: Iterable[str]) -> None:
        """Forget rounds that are over, known here or not."""
        for round_id in round_ids:
            self._rounds.pop(round_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._rounds.clear()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the rounds under way, oldest first."""
        return tuple(self._rounds)

    def __getitem__(self, round_id: str) -> HostRound:
        if round_id not in self._rounds:
            raise UnknownRoundError(f"round {round_id}: not begun here; the actor was restarted in between")
        return self._rounds[round_id]

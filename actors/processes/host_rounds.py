"""What a host keeps of the rounds that are under way, between their exchanges.

Suffixes: B inputs, n clients of this host, M prototypes, d statistic, C classes, h w grid; P routed pairs;
A inputs that activated one client.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
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

    def collect(
        self, sample_P: Array, client_P: Array, tickets_B: Sequence[int], index_of: Mapping[int, int]
    ) -> dict[int, RenewalInput]:
        """Attention and psi of the inputs that activated each client, in input order."""
        collected = {}
        for client in np.unique(client_P).tolist():
            rows, index = np.sort(sample_P[client_P == client]).tolist(), index_of[client]
            psi_Ad = torch.stack([self.outputs[row, index][1] for row in rows]).detach()
            tickets = tuple(tickets_B[row] for row in rows) if tickets_B else ()
            collected[client] = RenewalInput(self.alpha_BnM[rows, index].cpu().numpy(), psi_Ad.cpu().numpy(), tickets)
        return collected


class HostRounds:
    """The rounds under way, by id; exchanges of several may run at once."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[str, HostRound] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, round_id: str, round_: HostRound) -> None:
        """Add a round; where there are too many, the oldest are forgotten."""
        with self._lock:
            self._rounds[round_id] = round_
            while len(self._rounds) > _ROUNDS_KEPT:
                self._rounds.popitem(last=False)

    def end(self, round_ids: Iterable[str]) -> None:
        """Forget rounds that are over, known here or not."""
        with self._lock:
            for round_id in round_ids:
                self._rounds.pop(round_id, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._rounds.clear()

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the rounds under way, oldest first."""
        with self._lock:
            return tuple(self._rounds)

    def __getitem__(self, round_id: str) -> HostRound:
        with self._lock:
            round_ = self._rounds.get(round_id)
        if round_ is None:
            raise UnknownRoundError(f"round {round_id}: over, or begun in an earlier process of this host")
        return round_

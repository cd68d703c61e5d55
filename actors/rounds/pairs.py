"""Which (input, client) pairs each host works on, and at which rank of the routing they stand.

Suffixes: B inputs, K routed; P routed pairs of one host.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.rounds.roster import Host

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """The pairs of one host: `client_P[p]` is at place (`sample_P[p]`, `rank_P[p]`) of a (B, K) array."""

    sample_P: Indices
    rank_P: Indices
    client_P: Indices

    @property
    def places(self) -> tuple[Indices, Indices]:
        """As the index of a (B, K) array."""
        return self.sample_P, self.rank_P

    def __len__(self) -> int:
        return len(self.sample_P)


NO_PAIRS = Pairs(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


def pairs_by_host(transmit_BK: Tensor, wanted_BK: Tensor, serving: Mapping[int, Host]) -> dict[str, Pairs]:
    """The wanted places of `transmit_BK`, by the host that speaks for the client there."""
    transmit = transmit_BK.cpu().numpy()
    grouped: dict[str, list[tuple[int, int, int]]] = {}
    for row, rank in zip(*wanted_BK.cpu().numpy().nonzero(), strict=True):
        client = int(transmit[row, rank])
        grouped.setdefault(serving[client].key, []).append((int(row), int(rank), client))
    return {key: Pairs(*np.asarray(found, dtype=np.int64).T.copy()) for key, found in grouped.items()}

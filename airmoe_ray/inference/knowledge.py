"""What each client knows, in a few words: the domains of the inputs that were routed to it first.

Suffixes: B inputs, N clients, K routed, Z domains.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.data.base import SegmentationDataset
from airmoe_ray.data.mix import Mix
from airmoe_ray.runtime.workers import Workers

_ENOUGH = 0.6  # of a client's inputs: the domains that make them up are named
_MOST = 2  # domains in a name


class Knowledge:
    """Counts, over an epoch, which client was the first choice for the inputs of each domain."""

    def __init__(self, dataset: SegmentationDataset, *, clients: int) -> None:
        self.dataset, self.clients = dataset, clients
        self._domain_S = np.array([dataset.domain_of(i) for i in range(len(dataset))])
        self._seen: list[tuple[list[int], Tensor]] = []  # samples, and the first choice for each

    def add(self, indices_B: list[int], selected_BK: Tensor) -> None:
        """Note who was routed for some samples; a GPU is not waited for."""
        if selected_BK.numel():  # else one expert learned for all, and nobody was routed
            self._seen.append((indices_B, selected_BK[:, 0]))

    def words(self, workers: Workers) -> list[str]:
        """What every client knows, by all that was noted since the last time; empty where nobody was routed."""
        counts_ZN = np.zeros((len(self.dataset.domains), self.clients), dtype=np.int64)
        for indices, first_B in self._seen:
            np.add.at(counts_ZN, (self._domain_S[indices], first_B.cpu().numpy()), 1)
        self._seen = []
        counts_ZN = workers.total(torch.from_numpy(counts_ZN)).numpy()
        if not counts_ZN.any():
            return []
        return [self._name(counts_Z) for counts_Z in counts_ZN.T]

    def _name(self, counts_Z: NDArray[np.int64]) -> str:
        order = np.argsort(-counts_Z, kind="stable")[:_MOST]
        enough = np.cumsum(counts_Z[order]) >= _ENOUGH * counts_Z.sum()
        kept = order[: int(np.argmax(enough)) + 1] if enough.any() else order
        return in_words([_pattern_and_name(self.dataset, int(z)) for z in kept if counts_Z[z]])


def in_words(domains: Sequence[tuple[str, str]]) -> str:
    """Domains as (pattern, name): those of one pattern share its words, "night and rain drawings"."""
    by_pattern: dict[str, list[str]] = {}
    for pattern, name in domains:
        by_pattern.setdefault(pattern, []).append(name)
    return ", ".join(pattern.format(" and ".join(names)) for pattern, names in by_pattern.items())


def _pattern_and_name(dataset: SegmentationDataset, domain: int) -> tuple[str, str]:
    if isinstance(dataset, Mix):
        return dataset.words_for(domain)
    return "{}", dataset.domains[domain]

"""Routing load over a sliding window of images."""

from collections import deque

import numpy as np

from airmoe_ray.inference.scores import balancedness


class LoadWindow:
    """How often each client was in S (before truncation) during the last `size` images."""

    def __init__(self, clients: int, size: int) -> None:
        self.selected_N = np.zeros(clients, dtype=np.int64)
        self._recent: deque[tuple[int, ...]] = deque()
        self._size = size

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, selected: tuple[int, ...]) -> None:
        """Count one image."""
        self._recent.append(selected)
        self.selected_N[list(selected)] += 1
        if len(self._recent) > self._size:
            self.selected_N[list(self._recent.popleft())] -= 1

    def resize(self, clients: int) -> None:
        """Clients were added or removed at the end; what removed ones did is forgotten."""
        kept = self.selected_N[:clients]
        self.selected_N = np.concatenate([kept, np.zeros(clients - len(kept), dtype=np.int64)])
        self._recent = deque(tuple(c for c in selected if c < clients) for selected in self._recent)

    @property
    def ratio_N(self) -> list[float]:
        """Load over the fair share; 1 is even, 0 before the first image."""
        total = max(int(self.selected_N.sum()), 1)
        return [float(count) / total * len(self.selected_N) for count in self.selected_N]

    @property
    def balancedness(self) -> float | None:
        """Mean load over the largest; None before the first image."""
        return balancedness(self.selected_N) if self._recent else None

"""Labels, logits and fixtures' types that tests of training share."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.base import IGNORE
from airmoe_ray.model.moe import AirMoE

Configs, Model, Features = Callable[..., Config], Callable[..., AirMoE], Callable[..., Tensor]
SEEDS = st.integers(0, 10**6)


def random_labels(seed: int, batch: int = 2, height: int = 6, width: int = 8, void: float = 0.2) -> Tensor:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, size=(batch, height, width)).astype(np.uint8)
    labels[rng.random(labels.shape) < void] = IGNORE
    return torch.from_numpy(labels)


def random_logits(seed: int, batch: int = 2, grid: tuple[int, int] = (3, 4)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(batch, 3, *grid)) * 3)

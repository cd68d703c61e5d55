"""Random transmissions and their receive scale."""

import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.power import receive_scale, scale_limit

Model, Features = Callable[..., AirMoE], Callable[..., Tensor]
SEEDS = st.integers(0, 10**6)
B, K, SHAPE = 2, 3, (2, 2, 2)
D_Y = math.prod(SHAPE)


def random_transmission(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of very different size, fading, weights, and who is active."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(B, K, *SHAPE)) * 10 ** rng.uniform(-2, 2, size=(B, K, 1, 1, 1))
    gamma = rng.normal(size=(B, K)) + 1j * rng.normal(size=(B, K))
    active = rng.random((B, K)) < 0.7
    active[:, 0] = True
    beta = rng.uniform(0.1, 1, size=(B, K)) * active
    beta /= beta.sum(axis=1, keepdims=True)
    return torch.from_numpy(y), torch.from_numpy(gamma), torch.from_numpy(beta), torch.from_numpy(active)


def energies(y_BKChw: Tensor) -> Tensor:
    return y_BKChw.square().sum(dim=(2, 3, 4))


def scale_of(y: Tensor, gamma: Tensor, beta: Tensor, active: Tensor, power: float = 1.0) -> Tensor:
    return receive_scale(scale_limit(energies(y), gamma.abs() ** 2, power * D_Y), beta, active)

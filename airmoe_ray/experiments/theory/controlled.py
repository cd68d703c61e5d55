r"""A small non-convex problem with every constant known, whose outputs are fused by the real channel.

K clients, each with its own parameters theta_j (C x D), answer an input with C maps of logits,

.. math:: y_j = g(\theta_j) x,\quad g(\theta) = \theta + 0.15 \sin 2\theta,\quad \hat y = \sum_j \beta_j y_j

and the loss is the logistic one with soft targets t, a mean over the cells and a sum over the C maps:
f(y) = log(1 + e^y) - t y. As a function of theta it is smooth and not convex (g bends), and has no stationary points
but those of the logistic regression (g' >= 0.7).

Why it shows the floor: with y^ + e in place of y^, e of variance v, SGD settles where the gradient of the *smoothed*
loss is zero. There the gradient of the noiseless one is what smoothing took away, -(v / 2) J^T f'''(y^) + O(v^2). The
logistic loss has f''' = p (1 - p) (1 - 2 p); targets are mostly above 1/2, so that it has one sign in most cells and
adds up instead of cancelling. So ||grad||^2 = c v^2, and v = sigma_c^2 / (2 rho) gives -2 dB per dB. With a quadratic
loss, f''' = 0, there would be no floor at all. Every step takes all inputs, so that the channel is the only noise
(sigma^2 = 0): data noise would not move the point where SGD settles, but hide it behind a variance that takes many more
steps to average away.

Suffixes: B inputs, K routed (all of them), C classes (maps), D features, h w grid, S samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from airmoe_ray.config import ChannelConfig
from airmoe_ray.experiments.theory.bounds import smoothed
from airmoe_ray.model.client import precode
from airmoe_ray.radio.channel import deliver, draw_gamma, in_deep_fade, noise_power
from airmoe_ray.radio.power import energy_budget, receive, receive_scale, scale_limit
from airmoe_ray.runtime.rng import generator

Array = NDArray[np.float64]

WEIGHTS = (0.5, 0.3, 0.2)  # beta_j
MAPS, FEATURES, GRID, INPUTS = 2, 4, (32, 32), 2
CELLS = GRID[0] * GRID[1]
OUTPUTS = MAPS * CELLS  # d_y
# of f per cell: f'' = p (1 - p) <= 1/4, |f'''| = p (1 - p) |1 - 2 p| <= 1 / (6 sqrt(3)); the mean divides by the cells
LOSS_SMOOTHNESS = 1 / (4 * CELLS)
LOSS_HESSIAN = 1 / (6 * 3**0.5 * CELLS)


def bend(theta: Tensor) -> Tensor:
    """g: increasing, with a slope between 0.7 and 1.3."""
    return theta + 0.15 * torch.sin(2 * theta)


@dataclass(frozen=True)
class Data:
    """Inputs of several problems (seeds) in one batch: B = seeds x INPUTS, in order."""

    features_BDhw: Tensor
    targets_BChw: Tensor  # t, in (0, 1)

    def rows(self, index_B: Tensor) -> "Data":
        """Some of the inputs, in the given order."""
        return Data(self.features_BDhw[index_B], self.targets_BChw[index_B])


def make_data(seeds: Sequence[int]) -> Data:
    """A constant feature and normal ones; targets are a teacher's probabilities, so that minima are finite.

    Each input has a teacher near the common one: with one and the same, gradients of inputs would not differ.
    """
    features, targets = [], []
    for seed in seeds:
        draw = generator(seed, "theory/data")
        x = torch.from_numpy(draw.standard_normal((INPUTS, FEATURES, *GRID)))
        x[:, 0] = 1.0
        teacher = np.array([1.8, 0.4, 0.4, 0.4]) + 0.2 * draw.standard_normal((INPUTS, MAPS, FEATURES))
        features.append(x)
        targets.append(torch.einsum("bcd,bdhw->bchw", torch.from_numpy(teacher), x).sigmoid())
    return Data(torch.cat(features), torch.cat(targets))


def start(seeds: Sequence[int]) -> Tensor:
    """theta of every seed, (seeds, K, C, D), far from the minimum."""
    draws = [generator(seed, "theory/start").normal(0, 1.5, (len(WEIGHTS), MAPS, FEATURES)) for seed in seeds]
    return torch.from_numpy(np.stack(draws))


def outputs(theta: Tensor, data: Data) -> Tensor:
    """y_j of every client and input, (B, K, C, h, w)."""
    maps = bend(theta).repeat_interleave(len(data.features_BDhw) // len(theta), dim=0)
    return torch.einsum("bkcd,bdhw->bkchw", maps, data.features_BDhw)


def exact_sum(theta: Tensor, data: Data) -> Tensor:
    """y^ = sum_j beta_j y_j, (B, C, h, w)."""
    return torch.einsum("bkchw,k->bchw", outputs(theta, data), theta.new_tensor(WEIGHTS))


def loss(fused_BChw: Tensor, data: Data) -> Tensor:
    """Mean over cells, sum over maps: one number per input, (B,)."""
    return (softplus(fused_BChw) - data.targets_BChw * fused_BChw).sum(dim=(1, 2, 3)) / CELLS


@dataclass(frozen=True)
class OverTheAir:
    """What the cloud has after a round, and the variance of its error by Eq. (23)."""

    fused_BChw: Tensor  # y^_ota
    variance_B: Tensor  # sigma_c^2 / (2 rho)
    energy_BK: Tensor  # ||y_j||^2


def clear_ids(count: int, first: int, *, config: ChannelConfig, seed: int) -> list[int]:
    """The next ids from `first` on under which no client is in deep fade: the theorems hold for a fixed set S."""
    found: list[int] = []
    while len(found) < count:
        ids = range(first, first + 2 * count)
        faded_BN = in_deep_fade(draw_gamma(ids, len(WEIGHTS), config=config, seed=seed), config)
        found += [i for i, faded in zip(ids, faded_BN.any(dim=1).tolist(), strict=True) if not faded]
        first += 2 * count
    return found[:count]


def over_the_air(outputs_BKChw: Tensor, ids_B: Sequence[int], *, config: ChannelConfig, seed: int) -> OverTheAir:
    """Power control, superposition and receiver, Eq. (22), (4), (23), by the functions that the system itself uses."""
    beta_BK = outputs_BKChw.new_tensor(WEIGHTS).expand(len(ids_B), -1)
    gamma_BK = draw_gamma(ids_B, len(WEIGHTS), config=config, seed=seed)
    energy_BK = outputs_BKChw.detach().square().sum(dim=(2, 3, 4))
    budget = energy_budget(config, outputs_BKChw[0, 0].numel())
    limit_BK = scale_limit(energy_BK, gamma_BK.abs().square(), budget)
    rho_B = receive_scale(limit_BK, beta_BK, torch.ones_like(beta_BK, dtype=torch.bool))
    sent_BKChw = precode(outputs_BKChw, beta_BK, rho_B[:, None], gamma_BK, channel=config)
    received = deliver(sent_BKChw, gamma_BK, beta_BK, ids_B=ids_B, config=config, seed=seed)
    return OverTheAir(receive(received.signal_BChw, rho_B), noise_power(config) / (2 * rho_B), energy_BK)


def gradient(fused_BChw: Tensor, theta: Tensor, data: Data) -> Tensor:
    """Gradient of each seed's mean loss over its inputs, (seeds, K, C, D)."""
    total = loss(fused_BChw, data).sum() * (len(theta) / len(data.features_BDhw))
    return torch.autograd.grad(total, theta)[0]


def noiseless_gradient(theta: Tensor, data: Data) -> Tensor:
    """Gradient of the objective without any channel."""
    theta = theta.detach().requires_grad_()
    return gradient(exact_sum(theta, data), theta, data)


def smoothed_gradient(theta: Tensor, data: Data, variance_B: Tensor) -> Tensor:
    """Gradient of the smoothed objective with noise of the given variance at each input, by quadrature."""
    theta = theta.detach().requires_grad_()
    fused_BChw = exact_sum(theta, data)
    targets = data.targets_BChw.numpy()

    def slope(at: Array) -> Array:
        return 1 / (1 + np.exp(-at)) - targets

    pull = smoothed(slope, fused_BChw.detach().numpy(), variance_B.numpy()[:, None, None, None]) / CELLS
    scale = len(theta) / len(data.features_BDhw)
    return torch.autograd.grad(fused_BChw, theta, torch.from_numpy(pull) * scale)[0]


def jacobian_bound(data: Data) -> float:
    """G, everywhere: ||dy^/dtheta|| <= max g' ||beta|| ||x||, as each map depends on its own K x D parameters only."""
    largest = float(torch.linalg.matrix_norm(data.features_BDhw.flatten(2), ord=2).max())
    return 1.3 * float(np.linalg.norm(WEIGHTS)) * largest

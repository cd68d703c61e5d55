"""What the real channel does to outputs, to gradients and to SGD, beside what the bounds say.

Suffixes: B inputs, K routed, C classes (maps), h w grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import ChannelConfig
from airmoe_ray.errors import UserError
from airmoe_ray.experiments.student import student_quantile
from airmoe_ray.experiments.theory import controlled
from airmoe_ray.experiments.theory.bounds import worst_receive_scale
from airmoe_ray.experiments.theory.settings import Constants
from airmoe_ray.radio.channel import noise_power
from airmoe_ray.radio.power import energy_budget
from airmoe_ray.runtime.progress import Progress
from airmoe_ray.runtime.rng import generator

Array = NDArray[np.float64]

SNRS_DB = (12.0, 17.0, 22.0, 27.0, 32.0)  # of the measured floor: 20 dB in which v is small enough for c v^2
_FIRST_STEP, _DECAY = 5.0, 100.0  # alpha_t = 5 / (1 + t / 100): sums to infinity, its squares do not


def check_channel(config: ChannelConfig) -> None:
    """Refuse channels that the theorems do not speak of."""
    if config.kind != "air":
        raise UserError(f"channel.kind = {config.kind}: the theorems are about noise on the air; set channel.kind=air")
    if config.gamma_th == 0:
        raise UserError("channel.gamma_th = 0: without truncation rho_min is 0 and no bound exists; set it above 0")
    if math.exp(-config.gamma_th) < 0.05:
        raise UserError(
            f"channel.gamma_th = {config.gamma_th:g}: nearly every client would be in deep fade; set it below 3"
        )


class NoiseVariance(NamedTuple):
    """Error energy after the receiver over sigma_c^2 / (2 rho), and how many elements it was taken over."""

    ratio: float
    elements: int


def measure_noise(config: ChannelConfig, *, seed: int, inputs: int = 300) -> NoiseVariance:
    """Measured noise variance against the prediction of Eq. (23), each input with its own fading and rho."""
    draw = generator(seed, "theory/outputs")
    shape = (inputs, len(controlled.WEIGHTS), controlled.MAPS, *controlled.GRID)
    outputs_BKChw = torch.from_numpy(draw.standard_normal(shape) * draw.uniform(0.5, 2, (*shape[:2], 1, 1, 1)))
    ids_B = controlled.clear_ids(inputs, 0, config=config, seed=seed)
    air = controlled.over_the_air(outputs_BKChw, ids_B, config=config, seed=seed)
    exact_BChw = torch.einsum("bkchw,k->bchw", outputs_BKChw, outputs_BKChw.new_tensor(controlled.WEIGHTS))
    error_B = (air.fused_BChw - exact_BChw).square().mean(dim=(1, 2, 3))
    return NoiseVariance(float((error_B / air.variance_B).mean()), exact_BChw.numel())


class GradientNoise(NamedTuple):
    """Lemma 1 on gradients of single inputs drawn at random."""

    total: float  # E||g - grad of the smoothed objective||^2: data and channel
    channel: float  # its part from the channel
    constants: Constants  # with sigma^2 of these inputs and the rho_min of these outputs
    mean_variance: float  # of e, where rho is what it was
    to_smoothed: float  # squared distance of mean gradients over what n draws leave by chance: about 1 if unbiased
    to_noiseless: float


def measure_gradient_noise(config: ChannelConfig, *, seed: int, draws: int = 600) -> GradientNoise:
    r"""Mean and variance of over-the-air gradients at a fixed point, against Lemma 1.

    .. math:: E[g_t | \Theta_t] = \nabla \bar L(\Theta_t)

    is Eq. (28): given rho, the mean over the channel's noise is the gradient of the smoothed objective, which
    quadrature gives to rounding, and not that of the noiseless one.
    """
    data = controlled.make_data([seed])
    which_B = torch.from_numpy(generator(seed, "theory/choice").integers(controlled.INPUTS, size=draws))
    rows = data.rows(which_B)
    theta = controlled.start([seed]).expand(draws, -1, -1, -1).clone().requires_grad_()  # a copy per draw
    ids_B = controlled.clear_ids(draws, 1 << 40, config=config, seed=seed)
    air = controlled.over_the_air(controlled.outputs(theta, rows), ids_B, config=config, seed=seed)
    noisy = controlled.gradient(air.fused_BChw, theta, rows).flatten(1)
    expected = controlled.smoothed_gradient(theta, rows, air.variance_B).flatten(1)
    clean = controlled.noiseless_gradient(theta, rows).flatten(1)
    channel = float((noisy - expected).square().sum(dim=1).mean())
    total = float((noisy - expected.mean(dim=0)).square().sum(dim=1).mean())
    sigma2 = float((expected - expected.mean(dim=0)).square().sum(dim=1).mean())
    by_chance = channel / draws

    def apart(target: Tensor) -> float:
        return float((noisy - target).mean(dim=0).square().sum()) / by_chance

    constants = constants_of(data, config, largest_energy=float(air.energy_BK.max()))
    return GradientNoise(
        total,
        channel,
        constants.but(data_variance=sigma2),
        float(air.variance_B.mean()),
        apart(expected),
        apart(clean),
    )


class NoiseSlope(NamedTuple):
    """How the channel's part of the gradients' variance falls with SNR, at a start of each seed."""

    snr_db: tuple[float, ...]
    channel: Array  # rows x seeds

    def slopes(self) -> Array:
        """dB per dB of each seed, by least squares."""
        level_db = 10 * np.log10(self.channel)
        return np.array([np.polyfit(self.snr_db, column, 1)[0] for column in level_db.T])


def measure_noise_slope(
    config: ChannelConfig, *, seeds: int, seed: int, draws: int = 100, snrs_db: Sequence[float] = SNRS_DB
) -> NoiseSlope:
    """Gradient noise over SNRs: Eq. (29) has it proportional to sigma_c^2 / (2 rho), which is -1 dB per dB.

    Where v is not small the loss bends within the noise, and the noise grows a little slower than v.
    """
    rows = [
        [
            measure_gradient_noise(config.model_copy(update={"snr_db": snr_db}), seed=number, draws=draws).channel
            for number in range(seed, seed + seeds)
        ]
        for snr_db in snrs_db
    ]
    return NoiseSlope(tuple(snrs_db), np.array(rows))


def constants_of(data: controlled.Data, config: ChannelConfig, *, largest_energy: float) -> Constants:
    """What the bounds need of the controlled problem on this channel; L, Delta and sigma^2 stay at their defaults."""
    budget = energy_budget(config, controlled.OUTPUTS)
    rho_min = worst_receive_scale(
        budget, config.gamma_th, largest_energy=largest_energy, largest_weight=max(controlled.WEIGHTS)
    )
    return Constants(
        jacobian=controlled.jacobian_bound(data),
        loss_smoothness=controlled.LOSS_SMOOTHNESS,
        loss_hessian=controlled.LOSS_HESSIAN,
        outputs=controlled.OUTPUTS,
        noise_power=noise_power(config),
        rho_min=rho_min,
    )


@dataclass(frozen=True)
class MeasuredFloor:
    """Squared gradient norms of the noiseless objective where SGD settled, per SNR (rows) and seed (columns)."""

    snr_db: tuple[float, ...]  # `channel.snr_db`
    receive_snr_db: Array  # 10 log10(rho_min / sigma_c^2), rows x seeds
    squared_norm: Array  # rows x seeds
    predicted: Array  # the same where the smoothed gradient is zero, to first order in v
    constants: tuple[Constants, ...]  # of each seed, at the first SNR

    def slopes(self) -> Array:
        """dB per dB of each seed, by least squares."""
        level_db = 10 * np.log10(self.squared_norm)
        columns = zip(self.receive_snr_db.T, level_db.T, strict=True)
        return np.array([np.polyfit(x, y, 1)[0] for x, y in columns])


def measure_floor(
    config: ChannelConfig,
    *,
    seeds: int,
    steps: int,
    seed: int,
    snrs_db: Sequence[float] = SNRS_DB,
    progress: Progress | None = None,
) -> MeasuredFloor:
    """SGD through the channel from a far start, with decaying steps, at several SNRs.

    The gradient is taken at the mean of the second half of the iterates (Polyak-Ruppert), which averages most of the
    channel's noise away and leaves the bias.
    """
    numbers = range(seed, seed + seeds)
    data = controlled.make_data(numbers)
    norms, predicted, energies = [], [], []
    for row, snr_db in enumerate(snrs_db):
        at_snr = config.model_copy(update={"snr_db": snr_db})
        settled = _descend(data, numbers, at_snr, steps=steps, first_id=(row + 1) << 44, seed=seed)
        norms.append(_squared_norm(controlled.noiseless_gradient(settled.theta, data)))
        predicted.append(_squared_norm(_first_order_bias(settled, data)))
        energies.append(settled.largest_energy)
        if progress:
            progress(row + 1, len(snrs_db))
    largest = np.max(energies, axis=0)
    constants = tuple(
        constants_of(
            data.rows(torch.arange(i * controlled.INPUTS, (i + 1) * controlled.INPUTS)),
            config.model_copy(update={"snr_db": snrs_db[0]}),
            largest_energy=float(largest[i]),
        )
        for i in range(seeds)
    )
    first_db = np.array([10 * math.log10(each.rho_min / each.noise_power) for each in constants])
    receive_snr_db = first_db + (np.array(snrs_db) - snrs_db[0])[:, None]
    return MeasuredFloor(tuple(snrs_db), receive_snr_db, np.stack(norms), np.stack(predicted), constants)


class _Settled(NamedTuple):
    theta: Tensor  # mean of the second half of the iterates, (seeds, K, C, D)
    variance_B: Tensor  # mean of sigma_c^2 / (2 rho) there
    largest_energy: Array  # of any client, per seed


def _descend(
    data: controlled.Data, seeds: range, config: ChannelConfig, *, steps: int, first_id: int, seed: int
) -> _Settled:
    """All seeds at once; every step takes all of a seed's inputs, each with fading and noise of its own."""
    batch = len(data.features_BDhw)
    ids = controlled.clear_ids(steps * batch, first_id, config=config, seed=seed)
    theta = controlled.start(seeds)
    mean, variance_B = torch.zeros_like(theta), torch.zeros(batch, dtype=theta.dtype)
    energy_B, kept = torch.zeros(batch, dtype=theta.dtype), steps - steps // 2
    for step in range(steps):
        theta = theta.detach().requires_grad_()
        ids_B = ids[step * batch : (step + 1) * batch]
        air = controlled.over_the_air(controlled.outputs(theta, data), ids_B, config=config, seed=seed)
        slope = controlled.gradient(air.fused_BChw, theta, data)
        theta = theta.detach() - _FIRST_STEP / (1 + step / _DECAY) * slope
        energy_B = torch.maximum(energy_B, air.energy_BK.amax(dim=1))
        if step >= steps // 2:
            mean, variance_B = mean + theta / kept, variance_B + air.variance_B / kept
    return _Settled(mean, variance_B, energy_B.view(len(seeds), -1).amax(dim=1).numpy())


def _first_order_bias(settled: _Settled, data: controlled.Data) -> Tensor:
    """(v / 2) J^T f''' where SGD settled."""
    theta = settled.theta.detach().requires_grad_()
    fused_BChw = controlled.exact_sum(theta, data)
    p = fused_BChw.detach().sigmoid()
    pull = settled.variance_B[:, None, None, None] / 2 * p * (1 - p) * (1 - 2 * p) / controlled.CELLS
    return torch.autograd.grad(fused_BChw, theta, pull * (len(theta) / len(p)))[0]


def _squared_norm(gradients: Tensor) -> Array:
    squared: Array = gradients.square().sum(dim=(1, 2, 3)).numpy()
    return squared


def interval(values: Array) -> tuple[float, float]:
    """Two-sided 95 % interval of the mean by Student's t."""
    half = student_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half

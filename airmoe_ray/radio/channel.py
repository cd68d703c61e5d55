"""The air: block fading, noise and superposition, Eq. (4), and its digital alternative.

Complex baseband, one real output element per complex symbol; N0 = sigma_c^2 per complex symbol, half of it in each
real dimension. snr_db = 10 log10(P0 / (d_y sigma_c^2)) = 10 log10(power / sigma_c^2) with E|gamma|^2 = 1.
Suffixes: B inputs, N clients, K routed, C classes, h w grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from airmoe_ray.config import ChannelConfig
from airmoe_ray.runtime.rng import complex_normal_BN, generator


@dataclass(frozen=True)
class Received:
    """What arrives, and the simulator's knowledge of how much of it is noise."""

    signal_BChw: Tensor  # r, complex (air) or real (ideal, digital)
    error_energy_B: Tensor  # ||Re n||^2, or the quantisation error's energy
    clean_energy_B: Tensor  # ||Re(r - n)||^2, so that NMSE = error / clean
    lost_BK: Tensor | None = None  # who fell silent between report and transmission; None: nobody


def noise_power(config: ChannelConfig, snr_db: float | None = None) -> float:
    r"""sigma_c^2 per complex symbol; `snr_db` takes the place of the configured SNR."""
    return float(config.power * 10 ** (-(config.snr_db if snr_db is None else snr_db) / 10))


def draw_gamma(ids_B: Sequence[int], clients: int | ArrayLike, *, config: ChannelConfig, seed: int) -> Tensor:
    r"""gamma_j of every input and client, (B, N) complex128, E|gamma|^2 = 1.

    Rayleigh: CN(0, 1). Rician with factor k: a line of sight of power k/(k+1) and phase 0, plus CN scatter of power
    1/(k+1). `clients` is N, or the ids of some, (N) or (B, N): a client's fading does not depend on who else is drawn
    for, so that a client and the air draw the same number each on its own side.
    """
    if config.fading == "none" or config.kind == "ideal":
        count = clients if isinstance(clients, int) else np.shape(clients)[-1]
        return torch.ones(len(ids_B), count, dtype=torch.complex128)
    scatter = torch.from_numpy(complex_normal_BN(ids_B, clients, seed=seed, purpose="fading"))
    if config.fading == "rayleigh":
        return scatter
    k = config.rician_factor
    return (k / (k + 1)) ** 0.5 + scatter / (k + 1) ** 0.5


def in_deep_fade(gamma_BN: Tensor, config: ChannelConfig) -> Tensor:
    r"""The bit each client sends with its statistic: |gamma_j|^2 < gamma_th; an ideal channel never fades."""
    return (gamma_BN.abs() ** 2 < config.gamma_th) & (config.kind != "ideal")


def draw_noise(
    ids_B: Sequence[int],
    shape: Sequence[int],
    *,
    config: ChannelConfig,
    seed: int,
    snr_db_B: Sequence[float] | None = None,
) -> Tensor:
    r"""n ~ CN(0, sigma_c^2 I), one stream per input: (B, *shape) complex128; `snr_db_B` where each has its own SNR."""
    draws = np.empty((len(ids_B), 2, *shape))
    for row, request_id in enumerate(ids_B):
        generator(seed, "noise", request_id).standard_normal(out=draws[row])
        draws[row] *= (noise_power(config, None if snr_db_B is None else snr_db_B[row]) / 2) ** 0.5
    return torch.complex(torch.from_numpy(draws[:, 0]), torch.from_numpy(draws[:, 1]))


def superpose(sent_BKChw: Tensor, gamma_BK: Tensor, noise_BChw: Tensor) -> Received:
    r"""r = sum_j gamma_j x_j + n with x_j = b_j y_j, Eq. (4): all clients at once, one channel use per symbol."""
    clean_BChw = torch.einsum("bkchw,bk->bchw", sent_BKChw, gamma_BK)
    return Received(
        clean_BChw + noise_BChw, error_energy_B=_energy(noise_BChw.real), clean_energy_B=_energy(clean_BChw.real)
    )


def quantise(values_BKChw: Tensor, bits: int) -> Tensor:
    """Uniform quantisation of each client's output over its own [min, max]; the gradient passes straight through."""
    low = values_BKChw.detach().amin(dim=(2, 3, 4), keepdim=True)
    step = (values_BKChw.detach().amax(dim=(2, 3, 4), keepdim=True) - low) / (2**bits - 1)
    step = step.clamp_min(torch.finfo(values_BKChw.dtype).tiny)
    rounded = low + step * ((values_BKChw.detach() - low) / step).round()
    return values_BKChw + (rounded - values_BKChw.detach())


def weighted_sum(values_BKChw: Tensor, beta_BK: Tensor, *, bits: int | None) -> Received:
    r"""y^ = sum_j beta_j y_j without any air: exact (ideal), or of outputs quantised to `bits` (digital)."""
    exact_BChw = torch.einsum("bkchw,bk->bchw", values_BKChw, beta_BK)
    if bits is None:
        return Received(exact_BChw, torch.zeros_like(beta_BK[:, 0]), _energy(exact_BChw))
    sent_BChw = torch.einsum("bkchw,bk->bchw", quantise(values_BKChw, bits), beta_BK)
    return Received(sent_BChw, _energy(sent_BChw - exact_BChw), _energy(exact_BChw))


def deliver(
    sent_BKChw: Tensor,
    gamma_BK: Tensor,
    beta_BK: Tensor,
    *,
    ids_B: Sequence[int],
    config: ChannelConfig,
    seed: int,
    snr_db_B: Sequence[float] | None = None,
) -> Received:
    """What arrives of what the routed clients sent, on whichever kind of channel `config` names.

    On the `air`, symbols x_j are superposed under fading and noise, Eq. (4). Otherwise clients send y_j itself, and the
    fusion weights are applied to what arrives. `snr_db_B` takes the place of the configured SNR, input by input.
    """
    if config.kind == "air":
        noise_BChw = draw_noise(ids_B, sent_BKChw.shape[2:], config=config, seed=seed, snr_db_B=snr_db_B)
        return superpose(sent_BKChw, gamma_BK.to(sent_BKChw), noise_BChw.to(sent_BKChw))
    bits = config.digital_bits if config.kind == "digital" else None
    return weighted_sum(sent_BKChw, beta_BK.to(sent_BKChw), bits=bits)


def distortion(received: Received) -> Tensor:
    r"""NMSE of each input, (B,): the distortion ||y^_ota - y^||^2 of Eq. (5), over ||y^||^2.

    Of r and its noise, before the receiver divides both by sqrt(rho): the ratio is the same.
    """
    clean_B = received.clean_energy_B
    return received.error_energy_B / clean_B.clamp_min(torch.finfo(clean_B.dtype).tiny)


def _energy(values_BChw: Tensor) -> Tensor:
    return values_BChw.detach().square().sum(dim=(1, 2, 3))

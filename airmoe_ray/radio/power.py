"""Power control, Eq. (22), and the receiver that undoes it, Eq. (23).

Truncated channel inversion turns fusion weights into transmit amplitudes; one complex symbol per output element.
"""

import torch
from torch import Tensor

from airmoe_ray.config import ChannelConfig


def energy_budget(config: ChannelConfig, symbols: int) -> float:
    """P0, what one client may spend on a transmission of d_y `symbols`: power per complex symbol times their number."""
    return config.power * symbols


def scale_limit(energy_BK: Tensor, gain_BK: Tensor, budget: float) -> Tensor:
    r"""c_j = P0 |gamma_j|^2 / ||y_j||^2, the one number a client reports so that the cloud can find rho, Eq. (22).

    The largest rho that the client could afford with all of the weight.
    """
    return budget * gain_BK / energy_BK.clamp_min(torch.finfo(energy_BK.dtype).tiny)


def receive_scale(scale_limit_BK: Tensor, beta_BK: Tensor, active_BK: Tensor) -> Tensor:
    r"""rho = min_{j in S} c_j / beta_j^2, Eq. (22): the largest scaling every client can afford, (B,).

    `min`, not `amin`: its gradient goes to the bottleneck client alone, also on ties. Silent outputs (all zero) would
    allow any scaling; the bound keeps it finite.
    """
    bound = torch.finfo(beta_BK.dtype).eps ** -2
    limit_BK = scale_limit_BK / (beta_BK**2).clamp_min(torch.finfo(beta_BK.dtype).tiny)
    return limit_BK.masked_fill(~active_BK, torch.inf).min(dim=-1).values.clamp_max(bound)


def transmit_coefficient(beta: Tensor, rho: Tensor, gamma: Tensor) -> Tensor:
    r"""b_j = sqrt(rho) beta_j / gamma_j, Eq. (22), complex; 0 for silent clients, whose beta is 0.

    Any shape, say (B, K) with rho (B, 1).
    """
    silent = beta == 0
    return (rho.sqrt() * beta / gamma.masked_fill(silent, 1.0)).masked_fill(silent, 0.0)


def receive(signal_BChw: Tensor, rho_B: Tensor) -> Tensor:
    r"""y^_ota = Re{r} / sqrt(rho), Eq. (23); what came without air (a real sum) is y^ already."""
    return signal_BChw.real / rho_B.sqrt()[:, None, None, None] if signal_BChw.is_complex() else signal_BChw

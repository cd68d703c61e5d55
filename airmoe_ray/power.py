"""Power control: truncated channel inversion that turns fusion weights into transmit amplitudes, Eq. (17).

The energy budget of one transmission is P0 = power * d_y: `power` per complex symbol, one symbol per output element.
"""

import torch
from torch import Tensor


def capacity(energy_BK: Tensor, gain_BK: Tensor, energy_budget: float) -> Tensor:
    r"""c_j = P0 |gamma_j|^2 / ||y_j||^2, the one number a client reports so that the cloud can find rho."""
    return energy_budget * gain_BK / energy_BK.clamp_min(torch.finfo(energy_BK.dtype).tiny)


def receive_scale(capacity_BK: Tensor, beta_BK: Tensor, active_BK: Tensor) -> Tensor:
    r"""rho = min_{j in S} c_j / beta_j^2, Eq. (17): the largest scaling every client can afford, (B,).

    `min`, not `amin`: its gradient goes to the bottleneck client alone, also on ties. Silent outputs (all zero) would
    allow any scaling; the bound keeps it finite.
    """
    bound = torch.finfo(beta_BK.dtype).eps ** -2
    limit_BK = capacity_BK / (beta_BK**2).clamp_min(torch.finfo(beta_BK.dtype).tiny)
    return limit_BK.masked_fill(~active_BK, torch.inf).min(dim=-1).values.clamp_max(bound)


def transmit_coefficient(beta_BK: Tensor, rho_B: Tensor, gamma_BK: Tensor) -> Tensor:
    r"""b_j = sqrt(rho) beta_j / gamma_j, Eq. (17), complex; 0 for silent clients, whose beta is 0."""
    silent_BK = beta_BK == 0
    return (rho_B.sqrt()[:, None] * beta_BK / gamma_BK.masked_fill(silent_BK, 1.0)).masked_fill(silent_BK, 0.0)

r"""Distributions on d points and the divergence between them: Norm of Eq. (8), (13), (19) and JS of Eq. (14), (20)."""

import torch
from torch import Tensor

_TINY = 1e-30  # below any probability that matters; keeps log finite in float32


def norm(values: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Norm(v) = softmax(v / T_norm) along the last axis: from logit space onto the simplex."""
    return torch.softmax(values / temperature, dim=-1)


def clr(distribution: Tensor) -> Tensor:
    r"""Centred log-ratio log Q - mean(log Q): recovers v from Norm(v) up to a constant and the factor 1 / T_norm."""
    logs = distribution.clamp_min(_TINY).log()
    return logs - logs.mean(dim=-1, keepdim=True)


def entropy(distribution: Tensor) -> Tensor:
    """-sum p log p along the last axis [nats]; finite with a finite gradient where p is 0, unlike `special.entr`."""
    return -(distribution * distribution.clamp_min(_TINY).log()).sum(dim=-1)


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    r"""Jensen-Shannon divergence along the last axis [nats], Eq. (14).

    .. math:: D_{JS}(P\|Q) = \tfrac12 D_{KL}(P\|I) + \tfrac12 D_{KL}(Q\|I),\quad I = \tfrac12 (P + Q)

    Symmetric, finite on disjoint supports, in [0, ln 2]. Rounding below 0 is clamped; there the gradient is 0, as it
    is at P = Q.
    """
    log_middle = ((p + q) / 2).clamp_min(_TINY).log()
    kl_p = (p * (p.clamp_min(_TINY).log() - log_middle)).sum(dim=-1)
    kl_q = (q * (q.clamp_min(_TINY).log() - log_middle)).sum(dim=-1)
    return (0.5 * (kl_p + kl_q)).clamp_min(0.0)

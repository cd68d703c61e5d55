"""The clients' Feature Retrieval Libraries, Eq. (9)-(12), for any number of clients at once.

One expert actor holds a bank of one client, the in-process model a bank of all N: the same code.
Suffixes: B inputs, N clients of this bank, M prototypes (padded to the largest), d statistic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from airmoe_ray.config import FrlConfig
from airmoe_ray.model.statistics import clr

SHARP_POWER = 8  # renewal weights alpha^8, normalised: the winner takes nearly all


@dataclass(frozen=True)
class Read:
    """What a read leaves behind: the statistic's pre-image and the attention that a renewal must reuse."""

    value_BNd: Tensor  # p~, Eq. (10)
    alpha_BNM: Tensor  # Eq. (9), sums to 1 over M


class FeatureRetrievalLibrary(nn.Module):
    """Prototypes p (learned and renewed) and importance w (renewed) of each client."""

    importance_NM: Tensor
    valid_NM: Tensor

    def __init__(self, config: FrlConfig, counts: list[int], *, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        clients, most = len(counts), max(counts)
        start = torch.randn(clients, most, config.dim, generator=generator)
        self.prototypes_NMd = nn.Parameter(start, requires_grad=config.learn != "renewal")
        self.register_buffer("importance_NM", torch.zeros(clients, most))
        valid = torch.arange(most) < torch.tensor(counts)[:, None]
        self.register_buffer("valid_NM", valid, persistent=False)
        self.project()

    def read(self, query_dist_Bd: Tensor) -> Read:
        r"""alpha_jk = softmax_k sim(Q, p_jk), Eq. (9); p~_j = sum_k alpha_jk p_jk, Eq. (10).

        Prototypes live in logit space and Q on the simplex; `clr_cosine` compares them where they are comparable,
        sim = scale * cos(clr(Q), p - mean(p)).
        """
        similarity_BNM = self.config.sim_scale * self._similarity(query_dist_Bd)
        if self.config.importance_read:
            similarity_BNM = similarity_BNM + (self.importance_NM + 1e-3).log()
        alpha_BNM = similarity_BNM.masked_fill(~self.valid_NM, -torch.inf).softmax(dim=-1)
        return Read(torch.einsum("bnm,nmd->bnd", alpha_BNM, self.prototypes_NMd), alpha_BNM)

    def _similarity(self, query_dist_Bd: Tensor) -> Tensor:
        p_NMd: Tensor = self.prototypes_NMd
        if self.config.sim == "dot":
            return torch.einsum("bd,nmd->bnm", query_dist_Bd, p_NMd)
        query_Bd = query_dist_Bd
        if self.config.sim == "clr_cosine":
            query_Bd, p_NMd = clr(query_dist_Bd), p_NMd - p_NMd.mean(dim=-1, keepdim=True)
        return torch.einsum("bd,nmd->bnm", normalize(query_Bd, dim=-1), normalize(p_NMd, dim=-1))

    @torch.no_grad()
    def renew(self, alpha_BNM: Tensor, psi_BNd: Tensor, active_BN: Tensor, clients: slice = slice(None)) -> None:
        r"""Renew p and w of `clients` (all of them) for a batch in sample order, Eq. (11)-(12).

        With a_i = eta alpha^(i) for the samples that activated the client and 0 for the others,

        .. math:: p_B = p_0 \prod_i (1-a_i) + \sum_i a_i v_i \prod_{l>i} (1-a_l)

        by a reversed cumulative product: exact even where a = 1, which a division by prod(1-a) would not survive.
        `psi_BNd` may hold anything where `active_BN` is False. Under Theorem 1's premises ||p|| <= C_p stays true.
        """
        if self.config.learn == "gradient":
            return
        weight_BNM, valid_NM = alpha_BNM, self.valid_NM[clients]
        if self.config.renewal == "sharp":
            # on the log scale relative to the largest: alpha^8 itself underflows
            weight_BNM = (SHARP_POWER * alpha_BNM.clamp_min(1e-30).log()).masked_fill(~valid_NM, -torch.inf)
            weight_BNM = weight_BNM.softmax(dim=-1)
        a_BNM = self.config.eta * weight_BNM * active_BN[..., None]
        kept_BNM = (1 - a_BNM).flip(0).cumprod(0).flip(0)  # prod over l >= i
        later_BNM = torch.cat([kept_BNM[1:], torch.ones_like(kept_BNM[:1])])  # prod over l > i
        share_BNM = a_BNM * later_BNM
        psi_BNd = psi_BNd.masked_fill(~active_BN[..., None], 0.0)
        # in place: optimizers and shared snapshots hold on to these very tensors
        moved_NMd = torch.einsum("bnm,bnd->nmd", share_BNM, psi_BNd)
        self.prototypes_NMd[clients].mul_(kept_BNM[0][..., None]).add_(moved_NMd)
        self.importance_NM[clients].mul_(kept_BNM[0]).add_(share_BNM.sum(dim=0))

    @torch.no_grad()
    def project(self) -> None:
        """Pull every prototype back into the ball ||p|| <= C_p after a gradient step."""
        self.prototypes_NMd.copy_(clip_norm(self.prototypes_NMd, self.config.bound))


def clip_norm(values: Tensor, bound: float) -> Tensor:
    """Scale vectors longer than `bound` (along the last axis) down to it; leave the others untouched."""
    length = values.norm(dim=-1, keepdim=True)
    return values * (bound / length.clamp_min(bound))

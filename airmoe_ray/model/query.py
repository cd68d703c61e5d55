"""The cloud's compact query, Eq. (8)."""

import torch
from torch import Tensor, nn

from airmoe_ray.model.statistics import norm


class Query(nn.Module):
    r"""q = phi(F), Q = Norm(q), Eq. (8). phi = mean over the patch grid, LayerNorm, Linear(Df, d); trainable."""

    def __init__(self, feature_dim: int, dim: int, *, temperature: float, generator: torch.Generator) -> None:
        super().__init__()
        self.temperature = temperature
        self.layer_norm = nn.LayerNorm(feature_dim)
        self.linear = nn.Linear(feature_dim, dim)
        with torch.no_grad():
            self.linear.weight.normal_(std=feature_dim**-0.5, generator=generator)
            self.linear.bias.zero_()

    def forward(self, features_BDhw: Tensor) -> Tensor:
        """Query distribution Q, (B, d) on the simplex."""
        return norm(self.linear(self.layer_norm(features_BDhw.mean(dim=(2, 3)))), self.temperature)

    @torch.no_grad()
    def fit_projection(self, pooled_SD: Tensor, *, spread: float) -> None:
        """Set the linear map to the whitened principal axes of pooled features, so that queries differ.

        Pooled features of one dataset are nearly parallel: under a random projection all queries, and so all
        divergences, look alike. Axes are scaled by 1 / sqrt(variance + mean variance) rather than fully whitened,
        which would blow noise axes up to the size of the leading ones.
        """
        x = self.layer_norm(pooled_SD)
        mean, centred = x.mean(dim=0), x - x.mean(dim=0)
        _, singular, axes = torch.linalg.svd(centred.double(), full_matrices=False)
        rank = min(self.linear.out_features, len(singular))
        variance = singular[:rank] ** 2 / len(x)
        if variance.sum() < 1e-12:
            return  # one sample, or the same one over and over: there are no axes to find
        scale = spread / (variance + variance.mean()).sqrt()
        weight = torch.zeros_like(self.linear.weight)
        weight[:rank] = (axes[:rank] * scale[:, None]).to(weight)
        self.linear.weight.copy_(weight)
        self.linear.bias.copy_(-weight @ mean)

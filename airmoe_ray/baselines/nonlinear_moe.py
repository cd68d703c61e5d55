"""NonLinearMoE: a perturbed cosine router at the cloud, TopK (Nguyen et al. 2024)."""

import torch
from torch import Tensor, nn

from airmoe_ray.baselines.linear_moe import pooled
from airmoe_ray.baselines.method import Method, Setting, gated
from airmoe_ray.config import Config
from airmoe_ray.model.cloud_parts import Gate, GateInput

_PERTURBATION = 0.1  # t1 and t2, relative to the typical norms of x and e_j


class PerturbedCosineGate(Gate):
    """s_j = scale <x, e_j> / ((|x| + t1)(|e_j| + t2)) + b_j.

    The perturbations t1, t2 keep the gradient of a cosine from blowing up near the origin, which is the paper's point.
    A cosine lies in [-1, 1] and its softmax is nearly even, hence the learned scale, as in other cosine routers.
    """

    def __init__(self, config: Config, *, feature_dim: int, generator: torch.Generator) -> None:
        super().__init__(config, feature_dim=feature_dim, generator=generator)
        clients = config.experts.count
        self.direction_ND = nn.Parameter(torch.empty(clients, feature_dim))
        self.bias_N = nn.Parameter(torch.zeros(clients))
        self.scale = nn.Parameter(torch.tensor(10.0))
        with torch.no_grad():
            self.direction_ND.normal_(std=feature_dim**-0.5, generator=generator)
        self.t1, self.t2 = _PERTURBATION * feature_dim**0.5, _PERTURBATION  # |x| is about sqrt(D), |e_j| about 1

    def forward(self, seen: GateInput) -> Tensor:
        """Scores (B, N)."""
        x_BD = pooled(seen.features_BDhw)
        length_B1 = x_BD.norm(dim=-1, keepdim=True) + self.t1
        cosine_BN = x_BD @ self.direction_ND.T / (length_B1 * (self.direction_ND.norm(dim=-1) + self.t2))
        return self.scale * cosine_BN + self.bias_N


class NonLinearMoE(Method):
    """Same backbone and experts, a perturbed cosine gate."""

    name, title, group, air = "nonlinear-moe", "NonLinearMoE (perturbed cosine)", "rule", True
    about = "perturbed cosine between pooled features and a learned direction per client, TopK, at the cloud"
    in_paper = "NonLinearMoE"

    def configure(self, base: Config, setting: Setting) -> Config:
        return gated(base, PerturbedCosineGate, head=self.head)

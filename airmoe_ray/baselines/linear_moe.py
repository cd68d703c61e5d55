"""LinearMoE: softmax of a linear gate at the cloud, TopK (the gate of M3ViT, Fan et al. 2022, per image)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from airmoe_ray.baselines.method import Method, Setting, gated
from airmoe_ray.config import Config
from airmoe_ray.model.cloud_parts import Gate, GateInput


def pooled(features_BDhw: Tensor) -> Tensor:
    """What gates look at: mean over the grid, normalised, as the query phi begins as well."""
    mean_BD = features_BDhw.mean(dim=(2, 3))
    return layer_norm(mean_BD, mean_BD.shape[1:])


class LinearGate(Gate):
    """s = W x + b of the pooled features; the fusion weights are softmax(s) over S."""

    def __init__(self, config: Config, *, feature_dim: int, generator: torch.Generator) -> None:
        super().__init__(config, feature_dim=feature_dim, generator=generator)
        self.linear = nn.Linear(feature_dim, config.experts.count)
        with torch.no_grad():
            self.linear.weight.normal_(std=feature_dim**-0.5, generator=generator)
            self.linear.bias.zero_()

    def forward(self, seen: GateInput) -> Tensor:
        """Scores (B, N)."""
        score_BN: Tensor = self.linear(pooled(seen.features_BDhw))
        return score_BN


class LinearMoE(Method):
    """Same backbone and experts, a linear gate."""

    name, title, group, air = "linear-moe", "LinearMoE", "rule", True
    about = "softmax of a linear gate on pooled features, TopK; the gate is at the cloud and needs no uplink"
    in_paper = "LinearMoE"

    def configure(self, base: Config, setting: Setting) -> Config:
        return gated(base, LinearGate, head=self.head)

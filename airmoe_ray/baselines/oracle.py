"""Oracle by domain: an image goes to the clients of its own domain, which no server could know."""

import torch
from torch import Tensor

from airmoe_ray.baselines.method import Method, Setting, gated
from airmoe_ray.config import Config
from airmoe_ray.model.cloud_parts import Gate, GateInput


class DomainGate(Gate):
    """Domain z has the clients z K, z K + 1, …, z K + K - 1 (modulo N); fusion weights as in Eq. (21)."""

    fusion = "divergence"
    needs_domains = True

    def __init__(self, config: Config, *, feature_dim: int, generator: torch.Generator) -> None:
        super().__init__(config, feature_dim=feature_dim, generator=generator)
        self.clients, self.top_k = config.experts.count, config.routing.top_k

    def forward(self, seen: GateInput) -> Tensor:
        """Scores (B, N): 0 for the first client of the domain, -1 for the next, …"""
        assert seen.domains_B is not None
        client_N = torch.arange(self.clients, device=seen.domains_B.device)
        distance_BN = (client_N - self.top_k * seen.domains_B[:, None]) % self.clients
        return -distance_BN.to(seen.stat_BNd)


class OracleByDomain(Method):
    """K becomes N over the number of domains, so that no two domains share a client while there are enough."""

    name, title, group, air = "oracle", "oracle by domain", "control", True
    about = "each domain (weather, drive) has N / Z clients of its own, and the true domain chooses them"

    def refusal(self, base: Config, setting: Setting) -> str | None:
        return "it has no clients for domains that nobody trained on" if setting.unseen_domains else None

    def configure(self, base: Config, setting: Setting) -> Config:
        own = {"routing.top_k": max(base.experts.count // setting.domains, 1), "train.top_k": None}
        align = {"train.lambda_align": base.train.lambda_align, "train.lambda_lb": 0.0}
        return gated(base, DomainGate, head=self.head, changes={**own, **align})

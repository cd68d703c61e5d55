"""MoE-AM: how much each routed client weighs, Eq. (21)."""

import torch
from torch import Tensor

from airmoe_ray.config import RoutingConfig


def fusion_weights(
    delta_BK: Tensor, active_BK: Tensor, config: RoutingConfig, *, score_BK: Tensor | None = None
) -> Tensor:
    r"""w~_j = 1 / (eps + delta_j), beta_j = w~_j / sum over the active clients, Eq. (21); 0 for silent ones.

    A client whose hidden features look like the query (small delta) weighs more. `equal` is the control: 1 / |S|.
    `gate` is the softmax of a gate's scores over the active clients.
    """
    if config.fusion == "gate":
        assert score_BK is not None, "a gate has scored the routed clients"
        return torch.softmax(config.tau * score_BK.masked_fill(~active_BK, -torch.inf), dim=-1)
    weight_BK = 1.0 / (config.eps + delta_BK)
    if config.fusion == "equal":
        weight_BK = weight_BK.detach() * 0 + 1
    weight_BK = weight_BK.masked_fill(~active_BK, 0.0)
    return weight_BK / weight_BK.sum(dim=-1, keepdim=True)

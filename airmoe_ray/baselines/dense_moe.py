"""DenseMoE: all experts, weighted by a softmax; what is left of SoftMoE (Puigcerver et al. 2024) on a grid."""

from airmoe_ray.baselines.linear_moe import LinearGate
from airmoe_ray.baselines.method import Method, Setting, gated
from airmoe_ray.config import Config


class DenseMoE(Method):
    """SoftMoE's slots mix tokens from everywhere and would lose the grid that an ASPP needs: hence a dense sum."""

    name, title, group, air = "dense-moe", "DenseMoE (SoftMoE-like)", "rule", True
    about = "all experts at once, weighted by the softmax of a linear gate at the cloud; K = N"
    in_paper = "SoftMoE"

    def configure(self, base: Config, setting: Setting) -> Config:
        everybody = {"routing.top_k": base.experts.count, "train.top_k": None, "train.lambda_lb": 0.0}
        return gated(base, LinearGate, head=self.head, changes=everybody)

"""The uniform average of all experts: no choice at all."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config


class UniformAverage(Method):
    """Every expert answers every image, with equal weight, in training and when scored."""

    name, title, group, air = "uniform", "uniform average of all experts", "control", True
    about = "all N experts on every image, equal weights, trained together"

    def configure(self, base: Config, setting: Setting) -> Config:
        everybody = {"routing.top_k": base.experts.count, "train.top_k": None, "routing.fusion": "equal"}
        nothing = {"train.lambda_lb": 0.0, "train.lambda_frl": 0.0, "train.lambda_align": 0.0}
        return changed(base, {"experts.shared": self.head, "routing.rule": "js", **everybody, **nothing})

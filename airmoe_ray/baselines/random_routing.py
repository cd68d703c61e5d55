"""Random routing: a model that is trained and scored with clients that are drawn by lot."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config


class RandomRouting(Method):
    """AirMoE in all else: if it is as good, routing earns nothing."""

    name, title, group, air = "random", "trained with random routing", "control", True
    about = "K clients by lot for every image, in training and when scored; all else as AirMoE"

    def configure(self, base: Config, setting: Setting) -> Config:
        return changed(base, {"experts.shared": self.head, "routing.rule": "random", "train.lambda_lb": 0.0})

"""A single model: a network from images to logits, trained from scratch in the place of backbone and experts."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config


class ImageModel(Method):
    """One network by the dotted path of its class; see `single/` for those of the paper's table."""

    group = "single model"

    def __init__(self, name: str, title: str, about: str, path: str, *, in_paper: str | None = None) -> None:
        super().__init__()
        self.name, self.title, self.about, self.path, self.in_paper = name, title, about, path, in_paper  # type: ignore[misc]

    def configure(self, base: Config, setting: Setting) -> Config:
        own = {"model": self.path, "experts.shared": False, "experts.refiner": 0, "channel.kind": "ideal"}
        # the largest step of a whole network from scratch; heads on frozen features never come near it
        return changed(base, {**own, "train.grad_clip": base.train.grad_clip or 1.0})

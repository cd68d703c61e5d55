"""One head on the frozen features: ViT+ASPP, and two controls with as many parameters as the experts have."""

from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config

_LARGEST = 2048  # channels; wider heads are not looked for
_OTHERWISE = 0.15  # how far the proportion of branch to hidden channels may be from that of an expert


def head_parameters(feature_dim: int, classes: int, hidden: int, width: int) -> int:
    """Parameters of `model.experts.Head`: reduction, five branches, merge, each with its GroupNorm, and decoder."""
    branches = 2 * (hidden * width + 2 * width) + 3 * (9 * hidden * width + 2 * width)
    return (feature_dim * hidden + 2 * hidden) + branches + (5 * width * hidden + 2 * hidden) + (hidden + 1) * classes


def widened(setting: Setting, *, hidden: int, width: int, heads: int) -> tuple[int, int]:
    """Hidden and branch channels, in nearly the same proportion, of one head with the parameters of so many."""
    target = heads * head_parameters(setting.feature_dim, setting.classes, hidden, width)
    sizes = [
        (wide, thin)
        for wide in range(16, _LARGEST, 8)
        for thin in range(16, wide + 1, 8)
        if abs(thin / wide - width / hidden) <= _OTHERWISE * width / hidden
    ]
    return min(sizes, key=lambda size: abs(head_parameters(setting.feature_dim, setting.classes, *size) - target))


def alone(base: Config, *, hidden: int, width: int) -> Config:
    """One expert that answers every input at the cloud: no routing, no FRL, no channel."""
    one = {
        "experts.count": 1,
        "experts.shared": False,
        "experts.hidden": hidden,
        "experts.width": width,
        "frl.prototypes": 1,
        "routing.top_k": 1,
        "routing.rule": "js",
        "routing.fusion": "equal",
        "channel.kind": "ideal",
        "cluster.pin": {},
        "train.top_k": None,
        "train.lambda_lb": 0.0,
        "train.lambda_frl": 0.0,
        "train.lambda_align": 0.0,
        "train.warm_start.enabled": False,
        "train.warm_start.shared_epochs": 0,
    }
    return changed(base, one)


class VitAspp(Method):
    """The backbone and one head of an expert's size."""

    name, title, group = "vit-aspp", "ViT+ASPP (one head)", "backbone and head"
    about = "frozen backbone and one head of an expert's size; with another backbone than a ViT, that one"
    in_paper = "ViT+ASPP"

    def configure(self, base: Config, setting: Setting) -> Config:
        return alone(base, hidden=base.experts.hidden, width=base.experts.width)


class HeadOfAll(Method):
    """One head with the parameters of all experts."""

    name, title, group = "head-all", "one head, all experts' parameters", "control"
    about = "one head as large as all experts together (+head: and the cloud's)"

    def configure(self, base: Config, setting: Setting) -> Config:
        size, heads = base.experts, base.experts.count + self.head
        hidden, width = widened(setting, hidden=size.hidden, width=size.width, heads=heads)
        return alone(base, hidden=hidden, width=width)


class HeadOfActive(Method):
    """One head with the parameters that are active per image."""

    name, title, group = "head-active", "one head, active parameters", "control"
    about = "one head as large as the K experts that answer an image (+head: and the cloud's)"

    def configure(self, base: Config, setting: Setting) -> Config:
        size, heads = base.experts, base.routing.top_k + self.head
        hidden, width = widened(setting, hidden=size.hidden, width=size.width, heads=heads)
        return alone(base, hidden=hidden, width=width)

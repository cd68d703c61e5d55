"""One head on the frozen features: ViT+ASPP, and two controls with as many parameters as AirMoE has."""

from airmoe_ray.baselines.airmoe import AirMoEMethod
from airmoe_ray.baselines.method import Method, Setting, changed
from airmoe_ray.config import Config

_LARGEST = 2048  # channels; wider heads are not looked for
_OTHERWISE = 0.15  # how far the proportion of branch to hidden channels may be from that of an expert


def head_parameters(feature_dim: int, classes: int, hidden: int, width: int) -> int:
    """Parameters of `model.experts.Head`: reduction, five branches, merge, each with its GroupNorm, and decoder."""
    branches = 2 * (hidden * width + 2 * width) + 3 * (9 * hidden * width + 2 * width)
    return (feature_dim * hidden + 2 * hidden) + branches + (5 * width * hidden + 2 * hidden) + (hidden + 1) * classes


def airmoe_parameters(setting: Setting, config: Config) -> tuple[int, int]:
    """Trained parameters of AirMoE as configured, and those active per image, as `compare.size` counts them.

    Experts with psi_j, the cloud's head if there is one, query and FRLs. A refiner is left out: it stands behind a
    single head as well.
    """
    size, clients, dim = config.experts, config.experts.count, config.frl.dim
    answering, weighed = min(config.routing.top_k, clients), config.routing.fusion == "divergence"
    head = head_parameters(setting.feature_dim, setting.classes, size.hidden, size.width)
    psi = (size.hidden + 1) * dim if weighed else 0
    libraries = sum(config.frl.counts(clients)) * dim if answering < clients else 0  # choosing all reads none
    query = (setting.feature_dim + 1) * dim + 2 * setting.feature_dim if weighed or libraries else 0
    common = head * size.shared + query + libraries
    return clients * (head + psi) + common, answering * (head + psi) + common


def widened(setting: Setting, *, hidden: int, width: int, target: int) -> tuple[int, int]:
    """Hidden and branch channels of one head of so many parameters, in nearly the same proportion as an expert's."""
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
    """One head with the parameters of all that AirMoE trains."""

    name, title, group = "head-all", "one head, all parameters", "control"
    about = "one head as large as all that AirMoE trains: experts, psi, query, FRLs (+head: and the cloud's head)"

    def configure(self, base: Config, setting: Setting) -> Config:
        trained, _ = airmoe_parameters(setting, AirMoEMethod(head=self.head).configure(base, setting))
        return _as_large_as(trained, base, setting)


class HeadOfActive(Method):
    """One head with the parameters that are active per image."""

    name, title, group = "head-active", "one head, active parameters", "control"
    about = "one head as large as what is active in AirMoE per image: K experts, query, FRLs (+head: and the cloud's)"

    def configure(self, base: Config, setting: Setting) -> Config:
        _, active = airmoe_parameters(setting, AirMoEMethod(head=self.head).configure(base, setting))
        return _as_large_as(active, base, setting)


def _as_large_as(target: int, base: Config, setting: Setting) -> Config:
    hidden, width = widened(setting, hidden=base.experts.hidden, width=base.experts.width, target=target)
    return alone(base, hidden=hidden, width=width)

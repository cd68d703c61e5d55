"""Methods by name, or by the dotted path of a class of one's own."""

import difflib

from torch import nn

from airmoe_ray.baselines.airmoe import AirMoEMethod, LiteralFittedPhi, LiteralReading
from airmoe_ray.baselines.dense_moe import DenseMoE
from airmoe_ray.baselines.ensemble import Ensemble
from airmoe_ray.baselines.image_model import ImageModel
from airmoe_ray.baselines.linear_moe import LinearMoE
from airmoe_ray.baselines.method import Method, Setting, gated
from airmoe_ray.baselines.nonlinear_moe import NonLinearMoE
from airmoe_ray.baselines.oracle import OracleByDomain
from airmoe_ray.baselines.random_routing import RandomRouting
from airmoe_ray.baselines.single import SINGLE_MODELS
from airmoe_ray.baselines.single_head import HeadOfActive, HeadOfAll, VitAspp
from airmoe_ray.baselines.uniform import UniformAverage
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.model.cloud_parts import Gate
from airmoe_ray.runtime.imports import load_class

Kinds = tuple[type[Method], ...]

_RULES: Kinds = (VitAspp, LinearMoE, NonLinearMoE, DenseMoE, AirMoEMethod, LiteralReading, LiteralFittedPhi)
_CONTROLS: Kinds = (HeadOfAll, HeadOfActive, Ensemble, UniformAverage, OracleByDomain, RandomRouting)
_KINDS = {kind.name: kind for kind in (*_RULES, *_CONTROLS)}
# what decides beside a cloud's head
_WITH_HEAD: Kinds = (
    LinearMoE,
    DenseMoE,
    AirMoEMethod,
    HeadOfAll,
    HeadOfActive,
    Ensemble,
    UniformAverage,
    RandomRouting,
)
_IN_PAPER = {"bisenetv2": "BiSecNetV2"}  # sic


def single_methods() -> list[Method]:
    """Networks of others, trained from scratch."""
    return [
        ImageModel(key, known.title, known.variant, known.path, in_paper=_IN_PAPER.get(key, known.title))
        for key, known in SINGLE_MODELS.items()
    ]


def groups() -> dict[str, list[Method]]:
    """What `--methods` takes besides names: all of a kind at once, in the order of the table."""
    rules = [kind() for kind in _RULES]
    controls = [kind() for kind in _CONTROLS]
    heads = [kind(head=True) for kind in _WITH_HEAD]
    single = single_methods()
    parts: dict[str, list[Method]] = {"single": single, "rules": rules, "controls": controls, "heads": heads}
    return {"all": [method for part in parts.values() for method in part], **parts}


def find_methods(text: str) -> list[Method]:
    """Methods of a list such as `airmoe,linear-moe+head,mypkg.rules:MyGate`, each once, in this order."""
    found: dict[str, Method] = {}
    for name in (part.strip() for part in text.split(",") if part.strip()):
        for method in groups().get(name) or [find_method(name)]:
            found.setdefault(method.key, method)
    if not found:
        raise UserError("--methods: no method is named; expected all, or names such as airmoe,linear-moe")
    return list(found.values())


def find_method(name: str) -> Method:
    """One method by its name, with `+head` beside a head at the cloud, or by the dotted path of a class."""
    if ":" in name:
        return _own(name)
    plain, plus, suffix = name.partition("+")
    singles = {method.name: method for method in single_methods()}
    if plain in _KINDS and (not plus or suffix == "head"):
        if plus and plain == VitAspp.name:
            raise UserError(f"--methods {name}: one head is the cloud's already; leave +head away")
        return _KINDS[plain](head=bool(plus))
    if plain in singles and not plus:
        return singles[plain]
    names = [*_KINDS, *singles, *groups()]
    near = difflib.get_close_matches(plain, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    raise UserError(f"--methods {name}: unknown method; {hint} (one of your own: package.module:Class)")


class _OwnGate(Method):
    """A gate of one's own in the place of AirMoE's rule."""

    group, air = "own", True

    def __init__(self, path: str, gate: type[Gate]) -> None:
        super().__init__()
        self.name = self.title = path  # type: ignore[misc]
        self.about = (gate.__doc__ or path).strip().splitlines()[0]  # type: ignore[misc]
        self.gate = gate

    def refusal(self, base: Config, setting: Setting) -> str | None:
        unknown = self.gate.needs_domains and setting.unseen_domains
        return "it needs domains, and those that are scored were never trained on" if unknown else None

    def configure(self, base: Config, setting: Setting) -> Config:
        return gated(base, self.gate, head=False)


def _own(path: str) -> Method:
    """A method, a gate or a network of one's own."""
    kind = load_class(path, object, "--methods")
    if issubclass(kind, Method):
        return kind()
    if issubclass(kind, Gate):
        return _OwnGate(path, kind)
    if issubclass(kind, nn.Module):
        return ImageModel(path, path, (kind.__doc__ or path).strip().splitlines()[0], path)
    raise UserError(f"--methods {path}: expected a Gate, a torch module from images to logits, or a Method")

"""What a method of a comparison is: a name, and how it turns the common configuration into its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from airmoe_ray.config import Config
from airmoe_ray.config_file import parse_config

Group = Literal["single model", "backbone and head", "rule", "AirMoE", "control", "own"]


class Setting(NamedTuple):
    """What a method may need to know of data and backbone."""

    feature_dim: int
    classes: int
    domains: int  # of the training images
    unseen_domains: bool = False  # whether images are scored whose domain was never trained on


class Method(ABC):
    """One row of a comparison. All share data, features, optimizer, losses and steps; a method changes the rest.

    `head`: beside a head at the cloud (`experts.shared`); its name then ends in `+head`.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # as it is called in a table
    group: ClassVar[Group]
    about: ClassVar[str]  # what it is, in a sentence
    in_paper: ClassVar[str | None] = None  # its row in the paper's main table
    air: ClassVar[bool] = False  # whether its outputs cross the channel

    def __init__(self, *, head: bool = False) -> None:
        self.head = head

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return f"{self.name}+head" if self.head else self.name

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.title}, cloud's head" if self.head else self.title

    def refusal(self, base: Config, setting: Setting) -> str | None:
        """Why this method makes no sense here; None where it does."""
        return None

    @abstractmethod
    def configure(self, base: Config, setting: Setting) -> Config:
        """Its own configuration, given the common one."""


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with some settings, named by dotted keys, replaced; checked as any other."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        *blocks, last = key.split(".")
        node = tree
        for block in blocks:
            node = node[block]
        node[last] = value
    return parse_config(tree)


def gated(base: Config, gate: type, *, head: bool, changes: Mapping[str, Any] | None = None) -> Config:
    """The common configuration with a gate in the place of statistics: nothing is left of FRL and alignment."""
    path = f"{gate.__module__}:{gate.__qualname__}"
    own = {"routing.rule": path, "routing.fusion": gate.fusion, "experts.shared": head}  # type: ignore[attr-defined]
    return changed(base, {**own, "train.lambda_align": 0.0, "train.lambda_frl": 0.0, **(changes or {})})

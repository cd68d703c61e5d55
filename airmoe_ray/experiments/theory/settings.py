"""The constants that the bounds speak of, and how long the measurements run; `--set theory.KEY=VALUE` on the way in.

The paper gives no values for its figure: these are ours, chosen so that each effect shows within a few decades.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from airmoe_ray.config import Block
from airmoe_ray.errors import ConfigError

PREFIX = "theory."

Above0 = Annotated[float, Field(gt=0, le=1e100)]
NotBelow0 = Annotated[float, Field(ge=0, le=1e100)]


class Constants(Block):
    """A problem and its link, as Assumptions 1-5 describe them."""

    smoothness: Above0 = 1.0
    """L, of the objective in the parameters."""
    gap: Above0 = 1.0
    """Delta, smoothed objective at the start above its infimum."""
    preconditioner_low: Above0 = 1.0
    """m, smallest eigenvalue of H_t; 1 for plain SGD."""
    preconditioner_high: Above0 = 1.0
    """M, largest eigenvalue of H_t; 1 for plain SGD."""
    data_variance: NotBelow0 = 1.0
    """sigma^2, of gradients over the choice of the sample."""
    jacobian: Above0 = 1.0
    """G, largest spectral norm of dy^/dTheta."""
    loss_smoothness: Above0 = 0.5
    """L_y, Lipschitz constant of the loss's gradient in y^."""
    loss_hessian: Above0 = 0.03
    """rho_H, Lipschitz constant of the loss's Hessian in y^."""
    outputs: Annotated[int, Field(ge=1, le=10**12)] = 64
    """d_y, dimension of y^."""
    noise_power: NotBelow0 = 0.1
    """sigma_c^2, channel noise per complex symbol."""
    rho_min: Above0 = 1.0
    """Smallest receive scaling rho that truncation allows."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.preconditioner_low > self.preconditioner_high:
            raise ValueError(
                f"theory.preconditioner_low = {self.preconditioner_low:g} is above theory.preconditioner_high = "
                f"{self.preconditioner_high:g}; m I <= H_t <= M I needs m <= M"
            )
        return self

    def but(self, **changes: float) -> "Constants":
        """The same with some of them changed, as along the axis of a panel."""
        return self.model_copy(update=changes)


class TheorySettings(Constants):
    """Constants of the panels, and the extent of the measurements."""

    eps: Above0 = 0.1
    """Target: squared gradient norm that is wanted."""
    seeds: Annotated[int, Field(ge=2, le=100)] = 5
    """Problems, starts and channels that the measured floor is taken over; an interval needs two."""
    steps: Annotated[int, Field(ge=10, le=100_000)] = 500
    """SGD steps of each run of the measured floor."""
    images: Annotated[int, Field(ge=1, le=1000)] = 4
    """With --run: training images whose Jacobians and gradients are measured."""


def parse_settings(overrides: Sequence[str]) -> TheorySettings:
    """Settings from `theory.KEY=VALUE`; every mistake is one line."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override!r}: expected KEY=VALUE, such as theory.eps=0.01")
        name = key.strip().removeprefix(PREFIX)
        if name not in TheorySettings.model_fields:
            near = difflib.get_close_matches(name, TheorySettings.model_fields, n=1, cutoff=0.3)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(TheorySettings.model_fields)}"
            raise ConfigError(f"{PREFIX}{name}: unknown key; {hint}")
        try:
            tree[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            tree[name] = text
    try:
        return TheorySettings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(message) from None
        message = message[0].lower() + message[1:]
        raise ConfigError(f"{PREFIX}{first['loc'][0]} = {first['input']!r}: {message}") from None


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the theory, and those of the configuration."""
    own = [override for override in overrides if override.strip().startswith(PREFIX)]
    return own, [override for override in overrides if override not in own]

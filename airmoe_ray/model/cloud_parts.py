"""What the cloud trains: its query, and the head of its own where the configuration has one."""

from typing import NamedTuple

from airmoe_ray.config import Config
from airmoe_ray.model.experts import Head
from airmoe_ray.model.query import Query
from airmoe_ray.runtime.rng import torch_generator


class CloudParts(NamedTuple):
    """The cloud's modules, in the in-process model and in the cloud's own process alike."""

    query: Query
    shared: Head | None  # `experts.shared`


def cloud_parts(config: Config, *, feature_dim: int, classes: int, dilations: tuple[int, int, int]) -> CloudParts:
    """The untrained parts; their initial weights follow from the seed."""
    query = Query(
        feature_dim,
        config.frl.dim,
        temperature=config.routing.norm_temperature,
        generator=torch_generator(config.seed, "init/query"),
    )
    if not config.experts.shared:
        return CloudParts(query, None)
    shared = Head(
        config.experts,
        feature_dim=feature_dim,
        classes=classes,
        dilations=dilations,
        generator=torch_generator(config.seed, "init/shared"),
    )
    return CloudParts(query, shared)

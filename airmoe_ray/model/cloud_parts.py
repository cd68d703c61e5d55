"""What the cloud trains: its query, and a head and a refiner of its own where the configuration has them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.model.experts import Head
from airmoe_ray.model.query import Query
from airmoe_ray.model.refiner import Refiner
from airmoe_ray.runtime.rng import torch_generator


class CloudParts(NamedTuple):
    """The cloud's modules, in the in-process model and in the cloud's own process alike."""

    query: Query
    shared: Head | None  # `experts.shared`
    refiner: Refiner | None  # `experts.refiner`

    def refine(self, fine: Sequence[Tensor]) -> Callable[[Tensor], Tensor] | None:
        """Fused logits to sharper ones, with the finer maps of the same images; None without a refiner."""
        refiner = self.refiner
        return None if refiner is None else lambda logits_BChw: refiner(logits_BChw, fine)


def cloud_parts(
    config: Config,
    *,
    feature_dim: int,
    classes: int,
    dilations: tuple[int, int, int],
    fine_dims: Sequence[int] = (),
) -> CloudParts:
    """The untrained parts; their initial weights follow from the seed. `fine_dims`: channels that a refiner sees."""
    query = Query(
        feature_dim,
        config.frl.dim,
        temperature=config.routing.norm_temperature,
        generator=torch_generator(config.seed, "init/query"),
    )
    shared = refiner = None
    if config.experts.shared:
        shared = Head(
            config.experts,
            feature_dim=feature_dim,
            classes=classes,
            dilations=dilations,
            generator=torch_generator(config.seed, "init/shared"),
        )
    if width := config.experts.refiner:
        generator = torch_generator(config.seed, "init/refiner")
        refiner = Refiner(fine_dims, classes=classes, width=width, generator=generator)
    return CloudParts(query, shared, refiner)

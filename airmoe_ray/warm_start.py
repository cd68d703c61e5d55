"""What clients know before they meet: FRLs filled from the queries of each client's own data D_j (their "history").

Suffixes: S samples, D features, d statistic, M prototypes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.partition import partition
from airmoe_ray.moe import AirMoE
from airmoe_ray.rng import generator
from airmoe_ray.sources import Source
from airmoe_ray.statistics import clr

Indices = NDArray[np.int64]


@torch.no_grad()
def pooled_features(source: Source) -> Tensor:
    """Mean of every feature map over its grid, (S, D): all that the query looks at."""
    rows = [source.plain(index)[0].mean(axis=(1, 2), dtype=np.float32) for index in range(len(source.shape_of))]
    return torch.from_numpy(np.stack(rows))


def client_data(domains_S: Sequence[int], config: Config) -> list[Indices]:
    """D_j of every client, by the configured partition."""
    return partition(
        domains_S,
        config.experts.count,
        rule=config.data.partition,
        alpha=config.data.dirichlet_alpha,
        rng=generator(config.seed, "partition"),
    )


@torch.no_grad()
def fill_libraries(model: AirMoE, pooled_SD: Tensor, data: Sequence[Indices], config: Config) -> None:
    """Each client's prototypes become the k-means centres of the queries of its own data, in logit space.

    The query's projection is fitted first, so that queries differ at all.
    """
    device = model.query.linear.weight.device
    model.query.fit_projection(pooled_SD.to(device), spread=config.train.warm_start.query_spread)
    query_dist_Sd = model.query(pooled_SD.to(device)[..., None, None])
    logits_Sd = clr(query_dist_Sd) * config.routing.norm_temperature
    frl = model.clients.frl
    for j, (own, count) in enumerate(zip(data, config.frl.counts(config.experts.count), strict=True)):
        rng = generator(config.seed, "k-means", j)
        frl.prototypes_NMd[j, :count] = k_means(logits_Sd[torch.from_numpy(own).to(device)], count, rng=rng)
    frl.project()


def k_means(points_Sd: Tensor, count: int, *, rng: np.random.Generator, rounds: int = 25) -> Tensor:
    """Centres of `count` clusters (k-means++ start, Lloyd rounds); points are repeated where there are too few."""
    first = points_Sd[int(rng.integers(len(points_Sd)))]
    centres = [first]
    nearest_S = (points_Sd - first).square().sum(dim=-1)
    for _ in range(count - 1):
        weight = nearest_S.double().cpu().numpy()
        share = weight / weight.sum() if weight.sum() > 0 else None
        centres.append(points_Sd[int(rng.choice(len(points_Sd), p=share))])
        nearest_S = torch.minimum(nearest_S, (points_Sd - centres[-1]).square().sum(dim=-1))
    centres_Md = torch.stack(centres)
    for _ in range(rounds):
        member_S = torch.cdist(points_Sd, centres_Md).argmin(dim=-1)
        total_Md = torch.zeros_like(centres_Md).index_add(0, member_S, points_Sd)
        size_M = torch.bincount(member_S, minlength=count)[:, None]
        centres_Md = torch.where(size_M > 0, total_Md / size_M.clamp_min(1), centres_Md)
    return centres_Md

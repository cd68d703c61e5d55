"""What clients know before they meet, from each one's own data D_j: a filled FRL, and an expert that has begun.

Suffixes: S samples, D features, d statistic, M prototypes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.data.partition import partition
from airmoe_ray.features.sources import Source
from airmoe_ray.model.experts import Expert
from airmoe_ray.model.frl import clip_norm
from airmoe_ray.model.local_clients import LocalClients
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.query import Query
from airmoe_ray.model.statistics import clr
from airmoe_ray.runtime.rng import generator
from airmoe_ray.training.losses import solo_objective
from airmoe_ray.training.optimizers import optimizers
from airmoe_ray.training.pixel_losses import PLAIN, Labelling

Indices = NDArray[np.int64]
Array = NDArray[Any]


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


class OwnData(NamedTuple):
    """What a client learns from before it meets the others: its D_j, one entry per image shape."""

    query_dists: list[Array]  # Q of every sample, (S, d)
    features: list[Array]  # (S, D, h, w); empty where the expert does not learn alone
    labels: list[Array]  # (S, H, W), the client's own


def own_data(source: Source, query_dist_Sd: Tensor, own: Indices, config: Config) -> OwnData:
    """D_j from the common source, with the queries that the cloud makes of it."""
    groups = [own[source.shape_of[own] == shape] for shape in range(len(source.grids))]
    groups = [group for group in groups if len(group)]
    queries = [query_dist_Sd[torch.from_numpy(group)].cpu().numpy() for group in groups]
    if not config.train.warm_start.local_epochs:
        return OwnData(queries, [], [])
    samples = [[source.plain(int(i)) for i in group] for group in groups]
    return OwnData(
        queries,
        [np.stack([features for features, _ in group]) for group in samples],
        [np.stack([label for _, label in group]) for group in samples],
    )


@torch.no_grad()
def fitted_queries(query: Query, pooled_SD: Tensor, config: Config) -> Tensor:
    """Q of every training sample, (S, d), after fitting the query's projection so that queries differ at all."""
    pooled_SD = pooled_SD.to(query.linear.weight)
    query.fit_projection(pooled_SD, spread=config.train.warm_start.query_spread)
    query_dist_Sd: Tensor = query(pooled_SD[..., None, None])
    return query_dist_Sd


def warm_start(
    model: AirMoE, source: Source, data: Sequence[Indices], config: Config, labelling: Labelling = PLAIN
) -> None:
    """All clients in this process, one after another."""
    query_dist_Sd = fitted_queries(model.query, pooled_features(source), config)
    for j, indices in enumerate(data):
        data_j = own_data(source, query_dist_Sd, indices, config)
        warm_start_client(model.clients, j, j, data_j, config=config, labelling=labelling)


def warm_start_client(
    clients: LocalClients,
    index: int,
    client: int,
    own: OwnData,
    *,
    config: Config,
    labelling: Labelling = PLAIN,
) -> None:
    """The client's history: expert and psi learn from D_j alone, prototypes become k-means centres of its queries."""
    expert, frl = cast(Expert, clients.experts[index]), clients.frl
    _learn_alone(expert, client, own, config, labelling)
    if not config.train.warm_start.fill_frl:
        return
    with torch.no_grad():
        query_dist_Sd = torch.from_numpy(np.concatenate(own.query_dists)).to(frl.prototypes_NMd)
        logits_Sd = clr(query_dist_Sd) * config.routing.norm_temperature
        count = int(frl.valid_NM[index].sum())
        centres_Md = k_means(logits_Sd, count, rng=generator(config.seed, "k-means", client))
        frl.prototypes_NMd[index, :count] = clip_norm(centres_Md, config.frl.bound)


def _learn_alone(expert: Expert, client: int, own: OwnData, config: Config, labelling: Labelling = PLAIN) -> None:
    """`local_epochs` over D_j with an optimizer of its own; collaboration starts with a fresh one."""
    (adam, _), size = optimizers([(expert, 1.0)], None, config), config.train.batch_size
    weight = expert.decoder.weight
    for epoch in range(config.train.warm_start.local_epochs):
        rng = generator(config.seed, f"warm-start/{client}", epoch)
        for query_dist_Sd, features_SDhw, labels_SHW in zip(own.query_dists, own.features, own.labels, strict=True):
            order = rng.permutation(len(labels_SHW))
            for rows in (order[start : start + size] for start in range(0, len(order), size)):
                loss = solo_objective(
                    expert,
                    torch.from_numpy(query_dist_Sd[rows]).to(weight),
                    torch.from_numpy(features_SDhw[rows]).to(weight),
                    torch.from_numpy(labels_SHW[rows]).to(weight.device),
                    config=config,
                    labelling=labelling,
                )
                adam.zero_grad(set_to_none=True)
                loss.total.backward()
                adam.step()


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

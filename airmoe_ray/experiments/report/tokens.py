"""Backbone tokens beside the prototypes of the client that was routed first, as in the paper's Fig. 6.

Tokens have D channels, prototypes d: each token goes through phi, Eq. (8), as if it were an image of its own, and both
are then put where Eq. (9) compares them. What the client really reads is the query of the whole image: one more point.
Suffixes: T tokens, M prototypes, d statistic, D features, h w grid.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from airmoe_ray.experiments.report.tsne import Float64Array, squared_distances, tsne
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.model.statistics import clr

MOST_TOKENS = 240


@dataclass(frozen=True)
class TokenMap:
    """Tokens of one image and prototypes of its best client, in the plane; distances are those before t-SNE."""

    client: int
    tokens_T2: Float64Array
    prototypes_M2: Float64Array
    query_2: Float64Array
    among_tokens: float  # mean distance
    among_prototypes: float
    to_nearest: float  # from a token to the nearest prototype, mean
    query_to_nearest: float


@torch.inference_mode()
def token_map(model: AirMoE, features_Dhw: Tensor, client: int, *, seed: int) -> TokenMap:
    """Up to 240 tokens of an image, drawn at random, and all prototypes of a client."""
    tokens_TD = features_Dhw.flatten(1).T.float()
    draw = np.random.default_rng(seed)
    kept = np.sort(draw.choice(len(tokens_TD), min(MOST_TOKENS, len(tokens_TD)), replace=False))
    whole_1D = tokens_TD.mean(dim=0, keepdim=True)
    query_dist_Td = model.query(torch.cat([tokens_TD[kept], whole_1D])[:, :, None, None])
    frl = model.clients.frl
    prototypes_Md = frl.prototypes_NMd[client][frl.valid_NM[client]]
    tokens, prototypes = compared(query_dist_Td, prototypes_Md, frl.config.sim)
    points = np.concatenate([tokens, prototypes])  # the last of the tokens is the query
    places, apart = tsne(points), np.sqrt(squared_distances(points))
    count = len(kept)
    to_prototype = apart[: count + 1, count + 1 :].min(axis=1)
    return TokenMap(
        client,
        places[:count],
        places[count + 1 :],
        places[count],
        among_tokens=_mean_of_pairs(apart[:count, :count]),
        among_prototypes=_mean_of_pairs(apart[count + 1 :, count + 1 :]),
        to_nearest=float(to_prototype[:count].mean()),
        query_to_nearest=float(to_prototype[count]),
    )


def compared(query_dist_Td: Tensor, prototypes_Md: Tensor, sim: str) -> tuple[Float64Array, Float64Array]:
    """Queries and prototypes as the similarity of Eq. (9) sees them: directions, unless it is a plain product."""
    if sim == "clr_cosine":
        query_dist_Td, prototypes_Md = clr(query_dist_Td), prototypes_Md - prototypes_Md.mean(dim=-1, keepdim=True)
    if sim != "dot":
        query_dist_Td, prototypes_Md = normalize(query_dist_Td, dim=-1), normalize(prototypes_Md, dim=-1)
    return query_dist_Td.detach().double().cpu().numpy(), prototypes_Md.detach().double().cpu().numpy()


def _mean_of_pairs(apart: Float64Array) -> float:
    """Over pairs of different points; 0 where there is but one."""
    count = len(apart)
    return float(apart.sum() / (count * (count - 1))) if count > 1 else 0.0

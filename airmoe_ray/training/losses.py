"""The training objective, Eq. (24)-(26), as functions of what one step produced.

Suffixes: B inputs, N clients, K routed, M prototypes, C classes, H W image, h w grid.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from airmoe_ray.config import Config, TrainConfig
from airmoe_ray.model.client import query_divergence
from airmoe_ray.model.experts import Expert, Head
from airmoe_ray.model.frl import FeatureRetrievalLibrary
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.model.statistics import entropy
from airmoe_ray.runtime.workers import OneWorker, Workers
from airmoe_ray.training.pixel_losses import PLAIN, Labelling, cross_entropy, lovasz_softmax, sample_pixels


class LossTerms(NamedTuple):
    """L and its parts, Eq. (24)."""

    total: Tensor
    ce: Tensor
    lb: Tensor
    frl: Tensor
    align: Tensor
    shared: Tensor  # cross-entropy of the cloud's head on its own
    iou: Tensor  # Lovasz-softmax; 0 where lambda_iou is

    def weighed(self, train: TrainConfig) -> "LossTerms":
        """The same terms with their weighted sum as `total`."""
        total = self.ce + train.lambda_lb * self.lb + train.lambda_frl * self.frl + train.lambda_align * self.align
        return self._replace(total=total + train.lambda_shared * self.shared + train.lambda_iou * self.iou)


class PixelLoss(NamedTuple):
    """What logits lose against the labels, one worker's part."""

    ce: Tensor
    iou: Tensor

    def weighed(self, train: TrainConfig) -> Tensor:
        """Their weighted sum."""
        return self.ce + train.lambda_iou * self.iou


def load_balance(mean_prob_N: Tensor) -> Tensor:
    r"""L_LB = sum_j u_j log u_j + log N with u the batch mean of pi, Eq. (25): 0 when the load is even, at most log N.

    The paper prints - log N, which would put the optimum at -2 log N; + log N puts it at 0. Same gradient.
    """
    return math.log(len(mean_prob_N)) - entropy(mean_prob_N)


def frl_regulariser(frl: FeatureRetrievalLibrary, alpha_BNM: Tensor, *, share: float = 1.0) -> Tensor:
    r"""L_FRL = sum_jk (||p_jk||^2 + w_jk^2 + sum_i |alpha_jk^i|), Eq. (26).

    The last term is the constant N B (alpha is a softmax) and has no gradient; `frl.sparsity: entropy` puts the
    entropy of alpha in its place, which sharpens the attention. `share` of the first two terms, which belong to no
    sample, is this worker's.
    """
    size = frl.prototypes_NMd.square().sum(dim=-1) + frl.importance_NM.square()
    sparsity = alpha_BNM.abs().sum()
    if frl.config.sparsity == "entropy":
        sparsity = entropy(alpha_BNM).sum()
    return share * size.masked_fill(~frl.valid_NM, 0.0).sum() + sparsity


def alignment(
    query_dist_Bd: Tensor, psi_BKd: Tensor, active_BK: Tensor, *, temperature: float, workers: Workers | None = None
) -> Tensor:
    """Mean D_JS(Q || R_j) over the active clients: pulls psi to the query, so that renewed prototypes can be found.

    Q is held fixed: the cheapest way to agree would be queries that are all the same.
    """
    delta_BK = query_divergence(query_dist_Bd.detach()[:, None], psi_BKd, temperature=temperature)
    count = (workers or OneWorker()).total(active_BK.sum())
    return delta_BK.masked_fill(~active_BK, 0.0).sum() / count


def objective(
    output: AirMoEOutput[LocalRound],
    labels_BHW: Tensor,
    frl: FeatureRetrievalLibrary,
    *,
    config: Config,
    labelling: Labelling = PLAIN,
    workers: Workers | None = None,
) -> LossTerms:
    """L = L_CE + lambda_LB L_LB + lambda_FRL L_FRL, Eq. (24), on y^_ota; plus lambda_align mean delta_j.

    Where the cloud has a head of its own, plus lambda_shared times its cross-entropy without the clients.

    With several workers this is one worker's part: counts and u are those of the whole batch, so that gradients add up
    to those of a single worker with all of it.
    """
    train, workers = config.train, workers or OneWorker()
    judged = _judged(output, train)
    losses = [pixel_loss(logits_BChw, labels_BHW, train, labelling, workers) for logits_BChw in judged]
    ce, iou = (torch.stack(terms).sum() for terms in zip(*losses, strict=True))
    shared = torch.zeros_like(ce)
    if output.shared_BChw is not None:
        shared = cross_entropy(
            sample_pixels(output.shared_BChw, labels_BHW, labelling, stride=train.loss_stride), labelling, workers
        )
    lb = load_balance(_batch_mean(output.routing.prob_BN, workers))
    assert output.alpha_BNM is not None, "the clients are in this process"
    assert output.psi_BKd is not None
    frl_term = frl_regulariser(frl, output.alpha_BNM, share=1 / workers.size)
    align = alignment(
        output.query_dist_Bd,
        output.psi_BKd,
        output.routing.active_BK,
        temperature=config.routing.norm_temperature,
        workers=workers,
    )
    return LossTerms(ce, ce, lb, frl_term, align, shared, iou).weighed(train)


def _judged(output: AirMoEOutput[LocalRound], train: TrainConfig) -> list[Tensor]:
    """The logits whose losses add up: the fused ones, or every expert's own, so that none learns of another."""
    if train.objective == "fused":
        return [output.logits_BChw]
    refined = [] if output.logits_BChw is output.coarse_BChw else [output.logits_BChw]  # of a mean without gradient
    return [*output.round.on_air.logits_BKChw.unbind(dim=1), *refined]


def pixel_loss(
    logits_BChw: Tensor, labels_BHW: Tensor, train: TrainConfig, labelling: Labelling, workers: Workers
) -> PixelLoss:
    """This worker's part of the losses over the pixels of all workers."""
    pixels = sample_pixels(logits_BChw, labels_BHW, labelling, stride=train.loss_stride)
    ce = cross_entropy(pixels, labelling, workers)
    return PixelLoss(ce, lovasz_softmax(pixels, labelling, workers) if train.lambda_iou else torch.zeros_like(ce))


def _batch_mean(prob_BN: Tensor, workers: Workers) -> Tensor:
    """u of Eq. (25): the value of the whole batch, with the gradient of this worker's samples."""
    own_N = prob_BN.sum(dim=0)
    others_N = workers.total(own_N) - own_N.detach()
    return (own_N + others_N) / workers.total(own_N.new_tensor(len(prob_BN)))


def head_objective(
    head: Head,
    features_BDhw: Tensor,
    labels_BHW: Tensor,
    *,
    config: Config,
    labelling: Labelling = PLAIN,
    workers: Workers | None = None,
) -> LossTerms:
    """The loss of the cloud's head by itself."""
    ce, iou = pixel_loss(head(features_BDhw), labels_BHW, config.train, labelling, workers or OneWorker())
    zero = torch.zeros_like(ce)
    return LossTerms(ce, ce, zero, zero, zero, zero, iou).weighed(config.train)


def solo_objective(
    expert: Expert,
    query_dist_Bd: Tensor,
    features_BDhw: Tensor,
    labels_BHW: Tensor,
    *,
    config: Config,
    labelling: Labelling = PLAIN,
    workers: Workers | None = None,
) -> LossTerms:
    """The loss of one expert by itself: cross-entropy on its own output, psi pulled towards the query."""
    train, workers = config.train, workers or OneWorker()
    logits_BChw, psi_Bd = expert(features_BDhw)
    everyone_B1 = torch.ones_like(psi_Bd[:, :1], dtype=torch.bool)
    temperature = config.routing.norm_temperature
    align = alignment(query_dist_Bd, psi_Bd[:, None], everyone_B1, temperature=temperature, workers=workers)
    ce, iou = pixel_loss(logits_BChw, labels_BHW, train, labelling, workers)
    zero = torch.zeros_like(ce)
    return LossTerms(ce, ce, zero, zero, align, zero, iou).weighed(train)

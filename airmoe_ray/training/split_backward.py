"""Training where experts stay with their clients: what crosses backwards, as pure functions.

The sum on the air is linear in every y_j, so the chain rule splits between cloud and clients. Going back there are two
exchanges. First the cloud broadcasts g = dL/dy^ and each routed client answers with one number per input,
a_j = <g, y_j>. Then every client gets its derivatives (of delta_j, c_j and its statistic P_j), learns, and returns d
numbers of dL/dQ per input. No weight and no hidden feature map of a client goes up, and its output only in the sum.
Suffixes: B inputs, N clients, K routed, n clients of one host, d statistic, C classes, h w grid; P routed pairs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from airmoe_ray.config import ChannelConfig, Config
from airmoe_ray.model.client import answer_query, query_divergence, report
from airmoe_ray.model.experts import ExpertOutput
from airmoe_ray.model.fusion import fusion_weights
from airmoe_ray.model.local_clients import LocalClients
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.channel import quantise
from airmoe_ray.radio.power import receive_scale
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.training.losses import LossTerms, frl_regulariser, load_balance, pixel_loss
from airmoe_ray.training.pixel_losses import PLAIN, Labelling, cross_entropy, sample_pixels


class CloudGradients(NamedTuple):
    """What the cloud knows before it asks anybody: its own loss terms and their derivatives."""

    loss: Tensor  # of what the cloud itself trains, head and refiner: with its graph
    ce: Tensor
    iou: Tensor
    lb: Tensor
    shared: Tensor  # cross-entropy of the cloud's head on its own
    logits_BChw: Tensor  # g = dL/dy^ of the pixels' loss, broadcast to the routed clients
    query_Bd: Tensor  # the cloud's own part of dL/dQ
    stat_BNd: Tensor  # dL_LB/dP_j, each client gets its own


class ReportGradients(NamedTuple):
    """Derivatives by what the routed clients reported."""

    delta_BK: Tensor  # dL/d(delta_j), Eq. (20)-(21)
    scale_limit_BK: Tensor  # dL/d(c_j), Eq. (22); zero unless `channel.rho_grad`


def cloud_gradients(
    output: AirMoEOutput[Any],
    stat_BNd: Tensor,
    labels_BHW: Tensor,
    *,
    config: Config,
    labelling: Labelling = PLAIN,
    refine: Callable[[Tensor], Tensor] | None = None,
) -> CloudGradients:
    """The pixels' loss by y^, lambda_LB L_LB by Q and P_j, Eq. (24)-(25); `stat_BNd` is the leaf the router read."""
    from_air_BChw = _from_air(output).requires_grad_()
    own_BChw = torch.zeros_like(from_air_BChw) if output.shared_BChw is None else output.shared_BChw
    train = config.train
    fused_BChw = from_air_BChw + own_BChw
    refined = fused_BChw if refine is None else refine(fused_BChw)
    fused = pixel_loss(refined, labels_BHW, train, labelling, OneWorker())
    loss = fused.weighed(train)
    (g_BChw,) = torch.autograd.grad(loss, from_air_BChw, retain_graph=True)
    shared = torch.zeros_like(loss)
    if output.shared_BChw is not None:
        shared = cross_entropy(sample_pixels(own_BChw, labels_BHW, labelling, stride=train.loss_stride), labelling)
        loss = loss + train.lambda_shared * shared
    lb = load_balance(output.routing.prob_BN.mean(dim=0))
    query_Bd, stat_grad_BNd = torch.autograd.grad(
        config.train.lambda_lb * lb, (output.query_dist_Bd, stat_BNd), retain_graph=True
    )
    return CloudGradients(
        loss, fused.ce.detach(), fused.iou.detach(), lb.detach(), shared.detach(), g_BChw, query_Bd, stat_grad_BNd
    )


def _from_air(output: AirMoEOutput[Any]) -> Tensor:
    """y^_ota: what was received, without what the cloud's own head adds."""
    logits_BChw = output.coarse_BChw.detach()
    return logits_BChw if output.shared_BChw is None else logits_BChw - output.shared_BChw.detach()


def report_gradients(
    agreement_BK: Tensor, output: AirMoEOutput[Any], scale_limit_BK: Tensor, g_BChw: Tensor, config: Config
) -> ReportGradients:
    r"""dL/d(delta_j) and dL/d(c_j) from the clients' a_j = <g, y_j>.

    y^ = sum_j beta_j y_j + Re n / sqrt(rho), so dL/d(beta_j) = a_j, and by Eq. (21)

    .. math:: dL/d\delta_j = -\tilde w_j^2 (a_j - \sum_l \beta_l a_l) / \sum_l \tilde w_l

    The cloud does not know n, but <g, Re n> / sqrt(rho) is what is left of <g, y^> after the clients' share, and that
    is all that dL/d(rho) needs. Derivatives by autograd on the cloud's own Eq. (21) and (22).
    """
    active_BK = output.routing.active_BK
    delta_BK = output.delta_BK.detach().requires_grad_()
    limit_BK = scale_limit_BK.detach().requires_grad_()
    beta_BK = fusion_weights(delta_BK, active_BK, config.routing)
    fused_B = (beta_BK * agreement_BK.masked_fill(~active_BK, 0.0)).sum(dim=-1)
    total = fused_B.sum()
    if config.channel.rho_grad and config.channel.kind == "air":
        rho_B = receive_scale(limit_BK, beta_BK, active_BK)
        noise_B = ((g_BChw * _from_air(output)).sum(dim=(1, 2, 3)) - fused_B).detach()
        total = total + (noise_B * (rho_B.detach() / rho_B).sqrt()).sum()
    found = torch.autograd.grad(total, (delta_BK, limit_BK), allow_unused=True, materialize_grads=True)
    return ReportGradients(*found)


def agreement(g_BChw: Tensor, logits_PChw: Tensor, sample_P: Tensor, channel: ChannelConfig) -> Tensor:
    """a_j = <g, y_j> of each pair, with y_j as it was received: what more of this client would cost."""
    if channel.kind == "digital":
        logits_PChw = quantise(logits_PChw[:, None], channel.digital_bits)[:, 0]
    return (g_BChw[sample_P] * logits_PChw).sum(dim=(1, 2, 3))


def fill_unknown(agreement_BK: Tensor, known_BK: Tensor, beta_BK: Tensor) -> Tensor:
    """Where a client was lost before it told its a_j, the weighted mean of the others: then nobody's weight moves."""
    share_B1 = (beta_BK * known_BK).sum(dim=-1, keepdim=True)
    mean_B1 = (beta_BK * known_BK * agreement_BK).sum(dim=-1, keepdim=True) / share_B1.clamp_min(1e-30)
    return torch.where(known_BK, agreement_BK, mean_B1)


def loss_terms(own: CloudGradients, output: AirMoEOutput[Any], frl_term: float, config: Config) -> LossTerms:
    """The terms of the whole objective, for the log: the cloud's own, and the sum of the clients' parts of L_FRL."""
    active_BK = output.routing.active_BK
    align = output.delta_BK.masked_fill(~active_BK, 0.0).sum() / active_BK.sum()
    frl = own.ce.new_tensor(frl_term)
    return LossTerms(own.ce, own.ce, own.lb, frl, align, own.shared, own.iou).weighed(config.train)


class Lesson(NamedTuple):
    """What one host is told in the second exchange; pairs are those of its clients that were heard."""

    stat_grad_Bnd: Tensor
    sample_P: Tensor
    beta_P: Tensor
    delta_grad_P: Tensor
    scale_limit_grad_P: Tensor
    align_share: float  # lambda_align over the number of heard pairs of the whole batch


def client_loss(
    clients: LocalClients,
    query_dist_Bd: Tensor,
    lesson: Lesson,
    *,
    outputs_P: ExpertOutput,
    g_BChw: Tensor,
    gain_P: Tensor,
    channel: ChannelConfig,
) -> tuple[Tensor, Tensor]:
    """A scalar whose gradients at a host are those of the whole objective, and the host's own part of L_FRL.

    `outputs_P` are y_j and psi_j with their graphs; `query_dist_Bd` is a leaf, whose gradient is the host's answer.
    """
    config, temperature = clients.config, clients.config.routing.norm_temperature
    stat_Bnd, alpha_BnM = answer_query(clients.frl, query_dist_Bd, temperature=temperature)  # as read, with its graph
    frl_term = frl_regulariser(clients.frl, alpha_BnM)
    loss = (lesson.stat_grad_Bnd * stat_Bnd).sum() + config.train.lambda_frl * frl_term
    if len(outputs_P.psi_Bd):
        rows_P = lesson.sample_P
        loss = loss + (lesson.beta_P[:, None, None, None] * g_BChw[rows_P] * outputs_P.logits_BChw).sum()
        told = report(outputs_P, query_dist_Bd[rows_P], gain_P, channel=channel, temperature=temperature)
        loss = loss + (lesson.delta_grad_P * told.delta).sum()
        fixed_Pd = query_dist_Bd.detach()[rows_P]
        align_P = query_divergence(fixed_Pd, outputs_P.psi_Bd, temperature=temperature)
        loss = loss + lesson.align_share * align_P.sum()
        if channel.rho_grad and channel.kind == "air":
            loss = loss + (lesson.scale_limit_grad_P * told.scale_limit).sum()
    return loss, frl_term.detach()


def square_norm(grads: Iterable[Tensor]) -> float:
    """Sum of squares of all entries of all gradients."""
    return float(sum(grad.square().sum() for grad in grads))


def clip_together(grads: Sequence[Tensor], elsewhere: float, *, limit: float) -> float:
    """Scale `grads` as `clip_grad_norm_` would, were they one with others of square norm `elsewhere`; the scale."""
    total = (elsewhere + square_norm(grads)) ** 0.5
    scale = min(1.0, limit / (total + 1e-6))
    for grad in grads:
        grad.mul_(scale)
    return scale

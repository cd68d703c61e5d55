"""A plain reading of the paper's equations: one image at a time, one client at a time, every noise from torch.

It is what somebody would write first, and what `inprocess_speed` compares with. For the default settings only: linear
or reciprocal score, divergence as weight, drop as truncation, the air as channel.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from airmoe_ray.model.moe import AirMoE


def plain_logits(model: AirMoE, features_BDhw: Tensor, gamma_BN: Tensor) -> Tensor:
    """Fused logits of a batch whose clients have the given gains; the noise is drawn anew."""
    return torch.stack(
        [_image(model, features, gamma) for features, gamma in zip(features_BDhw, gamma_BN, strict=True)]
    )


def _image(model: AirMoE, features_Dhw: Tensor, gamma_N: Tensor) -> Tensor:
    config, clients = model.config, model.clients
    query_d = model.query(features_Dhw[None])[0]  # Eq. (8)
    scores = []
    for j in range(len(clients.experts)):
        prototypes_Md = clients.frl.prototypes_NMd[j][clients.frl.valid_NM[j]]
        logs_d = query_d.log()
        centred_Md = prototypes_Md - prototypes_Md.mean(dim=1, keepdim=True)
        similar_M = config.frl.sim_scale * cosine_similarity((logs_d - logs_d.mean())[None], centred_Md)
        value_d = similar_M.softmax(0) @ prototypes_Md  # Eq. (9)-(10)
        js = _js(query_d, (value_d / config.routing.norm_temperature).softmax(0))  # Eq. (13)-(14)
        scores.append(-float(js))  # Eq. (15): the order is all that counts here
    chosen = sorted(range(len(scores)), key=lambda j: -scores[j])[: config.routing.top_k]  # Eq. (16)
    gains = gamma_N.abs().square().tolist()
    heard = [j for j in chosen if gains[j] >= config.channel.gamma_th] or [max(chosen, key=lambda j: gains[j])]
    outputs, weights = [], []
    for j in heard:
        logits_1Chw, psi_1d = clients.experts[j](features_Dhw[None])  # Eq. (17)-(19)
        outputs.append(logits_1Chw[0])
        delta = _js(query_d, (psi_1d[0] / config.routing.norm_temperature).softmax(0))  # Eq. (20)
        weights.append(1 / (config.routing.eps + float(delta)))
    betas = [weight / sum(weights) for weight in weights]  # Eq. (21)
    fused_Chw = _on_air(outputs, betas, [complex(gamma_N[j]) for j in heard], model)
    return fused_Chw if model.shared is None else fused_Chw + model.shared(features_Dhw[None])[0]


def _on_air(outputs: list[Tensor], betas: list[float], gammas: list[complex], model: AirMoE) -> Tensor:
    """Eq. (22), (4), (23): everybody at once, at the scale that the weakest can afford."""
    channel = model.config.channel
    limits = [
        channel.power * y.numel() * abs(gamma) ** 2 / (beta**2 * float(y.square().sum()))
        for y, beta, gamma in zip(outputs, betas, gammas, strict=True)
    ]
    scale = math.sqrt(min(limits))
    received_Chw = torch.zeros(outputs[0].shape, dtype=torch.complex64)
    for y, beta, gamma in zip(outputs, betas, gammas, strict=True):
        received_Chw += gamma * (scale * beta / gamma * y)
    received_Chw += torch.randn_like(received_Chw) * math.sqrt(channel.power * 10 ** (-channel.snr_db / 10))
    return received_Chw.real / scale


def _js(p_d: Tensor, q_d: Tensor) -> Tensor:
    middle_d = (p_d + q_d) / 2
    return 0.5 * ((p_d * (p_d / middle_d).log()).sum() + (q_d * (q_d / middle_d).log()).sum())

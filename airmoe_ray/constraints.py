"""Constraints (a)-(f) of the paper's problem `eq:pf_obj`, as functions that tell by how much each is violated."""

import torch
from torch import Tensor

from airmoe_ray.clients import LocalRound
from airmoe_ray.config import Config
from airmoe_ray.ledger import check_budget
from airmoe_ray.moe import AirMoEOutput


def check_constraints(output: AirMoEOutput[LocalRound], config: Config, *, tolerance: float = 1e-4) -> None:
    """Assert all six for one batch; `tolerance` is relative."""
    routing, top_k = output.routing, config.routing.top_k
    if config.routing.rule == "js":
        least_B = routing.prob_BN.gather(1, routing.selected_BK).amin(dim=-1)
        others_BN = routing.prob_BN.scatter(1, routing.selected_BK, -1.0)
        assert (least_B >= others_BN.amax(dim=-1)).all(), "(a) S is what the router says"
    assert all(len(set(row)) == top_k for row in routing.selected_BK.tolist()), "(b) |S| = K"
    check_budget(config)  # (c)
    if output.round.channel.kind == "air":
        assert power_excess(output) <= tolerance, "(d) E||b_j y_j||^2 <= P0"
        assert misalignment(output) <= tolerance, "(e) gamma_j b_j = sqrt(rho) beta_j"
    assert (output.beta_BK >= 0).all(), "(f) beta_j >= 0"
    assert (output.beta_BK.sum(dim=-1) - 1).abs().max() <= tolerance, "(f) sum beta_j = 1"


@torch.no_grad()
def sent_energy(output: AirMoEOutput[LocalRound]) -> Tensor:
    """||b_j y_j||^2 over P0, (B, K), of what was really sent: at most 1, and exactly 1 at the bottleneck client."""
    round_ = output.round
    energy_BK = round_.logits_BKChw.square().sum(dim=(2, 3, 4))
    return round_.b_BK.abs().square() * energy_BK / (round_.channel.power * round_.logits_BKChw[0, 0].numel())


def power_excess(output: AirMoEOutput[LocalRound]) -> float:
    """(d): how far the greediest client is over its budget, relative; negative is within."""
    return float(sent_energy(output).max()) - 1.0


@torch.no_grad()
def misalignment(output: AirMoEOutput[LocalRound]) -> float:
    """(e): largest |gamma_j b_j - sqrt(rho) beta_j| over the active clients, relative to sqrt(rho)."""
    round_ = output.round
    gamma_BK = round_.gamma_BN.gather(1, round_.transmit_BK)
    gap_BK = (gamma_BK * round_.b_BK / output.rho_B.sqrt()[:, None] - output.beta_BK).abs()
    return float(torch.where(output.routing.active_BK, gap_BK, 0.0).max())

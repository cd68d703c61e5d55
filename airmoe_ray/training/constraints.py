"""Constraints (6a)-(6f) of the paper's problem, as functions that tell by how much each is violated."""

import torch
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.ledger import check_budget
from airmoe_ray.radio.power import energy_budget


def check_constraints(output: AirMoEOutput[LocalRound], config: Config, *, tolerance: float = 1e-4) -> None:
    """Assert all six of Eq. (6) for one batch; `tolerance` is relative."""
    routing, top_k = output.routing, config.routing.top_k
    if config.routing.rule == "js":
        least_B = routing.prob_BN.gather(1, routing.selected_BK).amin(dim=-1)
        others_BN = routing.prob_BN.scatter(1, routing.selected_BK, -1.0)
        assert (least_B >= others_BN.amax(dim=-1)).all(), "(6a) S is what the router says"
    assert all(len(set(row)) == top_k for row in routing.selected_BK.tolist()), "(6b) |S| = K"
    check_budget(config)  # (6c)
    if output.round.channel.kind == "air":
        assert power_excess(output) <= tolerance, "(6d) E||b_j y_j||^2 <= P0"
        assert misalignment(output) <= tolerance, "(6e) gamma_j b_j = sqrt(rho) beta_j"
    assert (output.beta_BK >= 0).all(), "(6f) beta_j >= 0"
    assert (output.beta_BK.sum(dim=-1) - 1).abs().max() <= tolerance, "(6f) sum beta_j = 1"


@torch.no_grad()
def sent_energy(output: AirMoEOutput[LocalRound]) -> Tensor:
    """||x_j||^2 over P0, (B, K), of what was really sent: at most 1, and exactly 1 at the bottleneck client."""
    sent_BKChw = output.round.on_air.sent_BKChw
    return _energy(sent_BKChw) / energy_budget(output.round.channel, sent_BKChw.shape[2:].numel())


def power_excess(output: AirMoEOutput[LocalRound]) -> float:
    """(6d): how far the greediest client is over its budget, relative; negative is within."""
    return float(sent_energy(output).max()) - 1.0


@torch.no_grad()
def misalignment(output: AirMoEOutput[LocalRound]) -> float:
    """(6e): largest ||gamma_j x_j - sqrt(rho) beta_j y_j|| over the active clients, relative to sqrt(rho) ||y_j||."""
    y, gamma_BK, x = output.round.on_air
    wanted_BK = output.rho_B.sqrt()[:, None] * output.beta_BK
    gap_BKChw = gamma_BK[..., None, None, None] * x - wanted_BK[..., None, None, None] * y
    gap_BK = (_energy(gap_BKChw) / _energy(y)).sqrt() / output.rho_B.sqrt()[:, None]
    return float(torch.where(output.routing.active_BK, gap_BK, 0.0).max())


def _energy(values_BKChw: Tensor) -> Tensor:
    return values_BKChw.abs().square().sum(dim=(2, 3, 4))

"""What one client computes in each exchange of a round; the expert and the FRL themselves are in their own files.

Every function takes any leading axes: the in-process model calls it for all routed clients at once (B, K), the process
of a host for its own routed pairs P. Suffixes: B inputs, N clients of the FRL at hand, M prototypes, d statistic.
"""

from typing import NamedTuple

from torch import Tensor

from airmoe_ray.config import ChannelConfig
from airmoe_ray.model.experts import ExpertOutput
from airmoe_ray.model.frl import FeatureRetrievalLibrary
from airmoe_ray.model.statistics import js_divergence, norm
from airmoe_ray.radio.power import energy_budget, scale_limit, transmit_coefficient


class Statistic(NamedTuple):
    """A client's answer to a query, and the attention that a renewal will reuse."""

    stat_BNd: Tensor  # P_j: this goes up
    alpha_BNM: Tensor  # stays with the client


class ClientReport(NamedTuple):
    """What a client finds out about its own output; the first two go up."""

    delta: Tensor  # D_JS(Q || R_j)
    scale_limit: Tensor  # c_j
    energy: Tensor  # ||y_j||^2; not finite where the output is not


def answer_query(frl: FeatureRetrievalLibrary, query_dist_Bd: Tensor, *, temperature: float) -> Statistic:
    r"""P_j = Norm(p~_j), Eq. (13), of every client of the FRL."""
    read = frl.read(query_dist_Bd)
    return Statistic(norm(read.value_BNd, temperature), read.alpha_BNM)


def query_divergence(query_dist: Tensor, psi: Tensor, *, temperature: float) -> Tensor:
    r"""delta_j = D_JS(Q || R_j), Eq. (20), with R_j = Norm(psi_j(h_j)), Eq. (19); small for an input it knows."""
    return js_divergence(query_dist, norm(psi, temperature))


def report(
    output: ExpertOutput, query_dist: Tensor, gain: Tensor, *, channel: ChannelConfig, temperature: float
) -> ClientReport:
    """delta_j and c_j of an expert's output, Eq. (19)-(20), (22); `gain` is |gamma_j|^2, which the client estimates."""
    logits, psi = output
    energy = logits.square().sum(dim=(-3, -2, -1))
    budget = energy_budget(channel, logits.shape[-3:].numel())
    return ClientReport(
        query_divergence(query_dist, psi, temperature=temperature), scale_limit(energy, gain, budget), energy
    )


def precode(logits: Tensor, beta: Tensor, rho: Tensor, gamma: Tensor, *, channel: ChannelConfig) -> Tensor:
    """The symbols a client sends: x_j = b_j y_j, Eq. (22), complex; y_j itself where there is no air."""
    if channel.kind != "air":
        return logits
    return transmit_coefficient(beta, rho, gamma)[..., None, None, None] * logits

"""The seam between cloud and clients: what the cloud needs of them, wherever they live.

Everything above it is the same code; `local_clients.py` has the clients of one process, `actors` those of many.
Suffixes: B inputs, N clients, K routed, d statistic, D features, C classes, h w grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from airmoe_ray.config import ChannelConfig
from airmoe_ray.model.routing import Routing
from airmoe_ray.radio.channel import Received


class Reading(NamedTuple):
    """What all clients answer to a query."""

    stat_BNd: Tensor  # P_j, Eq. (13)
    faded_BN: Tensor  # the bit "in deep fade"
    present_N: Tensor | None = None  # who answered; None: everybody
    alpha_BNM: Tensor | None = None  # attention, for the loss; None: clients elsewhere keep it to themselves


class Report(NamedTuple):
    """What the routed clients report after running their experts."""

    delta_BK: Tensor  # D_JS(Q || R_j), Eq. (20)
    scale_limit_BK: Tensor  # c_j, Eq. (22)
    routing: Routing  # as carried out: a client lost on the way has made room for another
    psi_BKd: Tensor | None = None  # pre-image of R_j, for the loss; None: as above


class Round(Protocol):
    """One batch, from the clients' side: one method per exchange. What a client knows stays with the client."""

    def read(self, query_dist_Bd: Tensor) -> Reading:
        """All N: statistic P_j, Eq. (9)-(10), (13), and the bit "in deep fade"."""
        ...

    def gains(self, selected_BK: Tensor) -> Tensor:
        """|gamma_j|^2 of routed clients; asked only where all of them faded."""
        ...

    def forward(self, features_BDhw: Tensor, query_dist_Bd: Tensor, routing: Routing) -> Report:
        """Routed clients run their experts; they report delta_j and c_j, Eq. (17)-(20), (22)."""
        ...

    def transmit(self, beta_BK: Tensor, rho_B: Tensor) -> Received:
        """Clients with a weight transmit at once, Eq. (4), (22)."""
        ...

    def renew(self) -> None:
        """Activated clients renew their FRL with the attention of this round's read, Eq. (11)-(12)."""
        ...


R_co = TypeVar("R_co", bound=Round, covariant=True)


class Clients(Protocol[R_co]):
    """The clients, wherever they live."""

    def begin(self, ids_B: Sequence[int], channel: ChannelConfig) -> R_co:
        """Start a round: every input has an id, from which its fading and noise follow."""
        ...


@dataclass(frozen=True)
class AirMoEOutput(Generic[R_co]):
    """The fused logits and the account of how they came about."""

    logits_BChw: Tensor  # y^_ota, plus the cloud's own where it has a head; on a finer grid where it has a refiner
    coarse_BChw: Tensor  # the same before the refiner
    query_dist_Bd: Tensor
    routing: Routing
    delta_BK: Tensor  # D_JS(Q || R_j); meaningful where active
    beta_BK: Tensor  # fusion weights, 0 where silent
    rho_B: Tensor
    nmse_B: Tensor
    round: R_co
    shared_BChw: Tensor | None = None  # the cloud's own logits
    alpha_BNM: Tensor | None = None  # attention of every client; None: clients elsewhere keep it to themselves
    psi_BKd: Tensor | None = None  # psi_j(h_j) of the routed; None: as above

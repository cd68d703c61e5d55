"""All that crosses between front end, cloud, hosts and channel, as frozen dataclasses of plain values and arrays.

What a host or the cloud starts with and tells about itself; the batch of a request; one round forwards, exchange by
exchange. The way back of a training round is in `backward_messages.py`, who takes which message in `stubs.py`.
A large array of an exchange travels beside its message and is named in the stub. Rounds are known by `round_id`.
Suffixes: B inputs, N clients, K routed, n clients of one host, M prototypes, d statistic, C classes, h w grid;
P routed pairs of one host; A inputs that activated one client.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.errors import Fault
from actors.rounds.calls import Message
from airmoe_ray.config import ChannelConfig, Config, RoutingConfig
from airmoe_ray.model.routing import EVERYBODY, Participants
from airmoe_ray.storage.checkpoint import ModelCard

FloatArray = NDArray[np.floating]
Array = NDArray[Any]

# starting


@dataclass(frozen=True)
class HostSpec:
    """What a host starts with, besides its clients' files."""

    clients: tuple[int, ...]
    config: Config
    card: ModelCard
    journal_folder: str | None = None  # where renewals are kept; None: nothing is renewed here
    replica: bool = False


@dataclass(frozen=True)
class HostState:
    """Where a host runs, and how its clients are; one entry per client in each tuple of them."""

    clients: tuple[int, ...]
    versions: tuple[int, ...]
    snapshot_versions: tuple[int, ...]
    drift: tuple[float, ...]  # how far prototypes moved since the checkpoint, over their norm
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...]
    pid: int
    process: int  # when it began [ns]
    busy_s: float = 0.0  # working time since the process began

    @cached_property
    def place(self) -> dict[int, int]:
        """Where each client stands in the tuples above."""
        return {client: place for place, client in enumerate(self.clients)}


@dataclass(frozen=True)
class CloudSpec:
    """What the cloud starts with, besides its file."""

    config: Config
    card: ModelCard


@dataclass(frozen=True)
class CloudState:
    """Where the cloud runs, and what images it wants."""

    gpu_ids: tuple[str, ...]
    pad_multiple: int  # sides of an image are multiples of this


# a request


@dataclass(frozen=True)
class Settings:
    """What a request may choose; requests that differ in K and SNR alone share a batch."""

    routing: RoutingConfig
    channel: ChannelConfig
    renew: bool = False
    participants: Participants = EVERYBODY

    @property
    def common(self) -> tuple[object, ...]:
        """What requests of one batch have in common."""
        routing, channel = self.routing.model_dump(exclude={"top_k"}), self.channel.model_dump(exclude={"snr_db"})
        return routing, channel, self.renew, self.participants


@dataclass(frozen=True)
class Segment(Message):
    """To the cloud, with images (B, H, W, 3): segment them with the clients of this roster or a newer one."""

    ids_B: tuple[int, ...]
    tickets_B: tuple[int, ...]  # numbers of the requests: the same however often one is tried
    settings: Settings  # of all, but for the two that follow
    top_k_B: tuple[int, ...]
    snr_db_B: tuple[float, ...]
    roster_version: int
    time_left_s: float


@dataclass(frozen=True)
class BatchResult:
    """A batch of equal settings, as arrays; the front end takes the single images out of it."""

    logits_BChw: Array
    grid: tuple[int, int]  # of what crossed the air; the logits are finer where the cloud has a refiner
    js_BN: Array
    score_BN: Array
    prob_BN: Array
    selected_BK: Array  # -1 beyond an input's own K
    transmit_BK: Array
    beta_BK: Array
    rho_B: Array
    nmse_B: Array
    faded_BN: Array
    present_N: Array
    all_faded_B: Array
    skipped_B: list[dict[int, Fault]]  # clients that could not take part
    versions: dict[int, int]  # of the FRLs that were read
    renewed_B: list[tuple[int, ...]]  # clients that have renewed their FRL for it, on disk
    faults: dict[str, Fault]  # by host
    heard: tuple[str, ...]  # hosts whose signal arrived
    processes: dict[str, int]  # of hosts that answered: when each began
    calls: int  # that the batch took between actors
    sealed_gamma_BK: bytes  # of who transmitted, from the channel past the cloud
    timings_ms: dict[str, float]


# a round: cloud and hosts


@dataclass(frozen=True)
class Read(Message):
    """To every host: answer the query, Eq. (9)-(10), (13). Each client's fading follows from the inputs' ids."""

    round_id: str
    ids_B: tuple[int, ...]
    query_dist_Bd: Array
    channel: ChannelConfig
    finished: tuple[str, ...] = ()  # earlier rounds, which the host may forget


@dataclass(frozen=True)
class HostStatistic:
    """Reply to `Read`: d numbers and one bit per input and client."""

    stat_Bnd: Array
    faded_Bn: Array
    versions: tuple[int, ...]
    process: int  # when the host's process began [ns]: another number is another process
    clock_s: float  # the host's `time.monotonic` at its reply

    def is_valid(self, shape: tuple[int, ...]) -> bool:
        """Whether the statistics are of this shape and finite."""
        return self.stat_Bnd.shape == shape and bool(np.isfinite(self.stat_Bnd).all())


@dataclass(frozen=True)
class Gains(Message):
    """To hosts of selected clients, where all of these faded: reply with |gamma_j|^2 (B, n)."""

    round_id: str


@dataclass(frozen=True)
class Forward(Message):
    """To hosts of routed clients, with the features (B, D, h, w): run the experts, Eq. (17)-(20)."""

    round_id: str
    query_dist_Bd: Array
    sample_P: Array
    client_P: Array


@dataclass(frozen=True)
class HostReport:
    """Reply to `Forward`: two numbers per pair."""

    delta_P: Array  # D_JS(Q || R_j), Eq. (20)
    scale_limit_P: Array  # c_j, Eq. (22)

    def is_valid(self, pairs: int) -> bool:
        """Whether there are two finite numbers for each pair."""
        return all(x.shape == (pairs,) and np.isfinite(x).all() for x in (self.delta_P, self.scale_limit_P))


@dataclass(frozen=True)
class Transmit(Message):
    """To hosts of clients with a weight: symbols (P, C, h, w) as the reply, which goes on to the channel, Eq. (22).

    What is wrong at a host travels in the place of its symbols: an exception would be the channel's to raise.
    """

    round_id: str
    sample_P: Array
    client_P: Array
    beta_P: Array
    rho_P: Array


@dataclass(frozen=True)
class Renew(Message):
    """To owners: renew the FRLs of the clients that were heard, Eq. (11)-(12); replies with the new versions."""

    round_id: str
    sample_P: Array
    client_P: Array
    tickets_B: tuple[int, ...]  # of the requests: what was renewed for one is not renewed again; none: it never is
    until: float = inf  # on the host's own `time.monotonic`: nobody waits for it any longer, it is to be left undone


@dataclass(frozen=True)
class Collect(Message):
    """To a replica: what a renewal needs of this round; the reply goes on to the owner."""

    round_id: str
    sample_P: Array
    client_P: Array
    tickets_B: tuple[int, ...]


class RenewalInput(NamedTuple):
    """Of the inputs that activated one client, in input order: all that its renewal needs."""

    alpha_AM: Array
    psi_Ad: Array
    ticket_A: tuple[int, ...]  # of whose requests they are


# a round: cloud and channel


@dataclass(frozen=True)
class Superpose(Message):
    """To the channel, with the symbols (P, C, h, w) of each host, all of them there: add them up, Eq. (4)."""

    ids_B: tuple[int, ...]
    channel: ChannelConfig
    snr_db_B: tuple[float, ...]
    transmit_BK: Array
    beta_BK: Array
    places: tuple[Array, ...]  # of each host: input * K + rank of its pairs
    shape: tuple[int, ...]  # (C, h, w)


@dataclass(frozen=True)
class Arrival:
    """Reply to `Superpose`: the signal, and the simulator's knowledge of its error; see `radio.channel.Received`."""

    signal_BChw: Array
    error_energy_B: Array
    clean_energy_B: Array
    sealed_gamma_BK: bytes  # of who transmitted: for the account, passed on by the cloud unopened
    faults: Mapping[int, Fault] = field(default_factory=dict)  # of hosts by number; where any is, nothing was sent

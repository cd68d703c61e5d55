"""Who takes part at the moment: the list that the supervisor writes and rounds begin with."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.errors import Fault
from actors.rounds.replies import Overdue
from actors.rounds.stubs import ChannelCalls, HostCalls
from airmoe_ray.config import ChannelConfig


@dataclass(frozen=True)
class Host:
    """One process that holds clients: their owner, or a replica of a single one."""

    key: str
    calls: HostCalls
    clients: tuple[int, ...]
    owner: bool = True

    def describe(self, predicate: str) -> str:
        """A sentence about it, for people: `expert 3 was lost`, `replica of expert 3 was lost`."""
        return f"{'' if self.owner else 'replica of '}{describe(self.clients, predicate)}"


@dataclass(frozen=True)
class Roster:
    """Who takes part at the moment."""

    version: int
    total: int  # N
    channel: ChannelCalls
    hosts: tuple[Host, ...]
    missing: Mapping[int, Fault] = field(default_factory=dict)  # clients without a host that is up

    def serving(self, turn: int) -> dict[int, Host]:
        """The host that speaks for each client this time; owner and replicas take turns."""
        hosts: dict[int, list[Host]] = {}
        for host in self.hosts:
            for client in host.clients:
                if client < self.total:  # some clients of a host may have left
                    hosts.setdefault(client, []).append(host)
        return {client: found[turn % len(found)] for client, found in hosts.items()}

    def owner_of(self, client: int) -> Host | None:
        """The host that renews this client's FRL."""
        return next((host for host in self.hosts if host.owner and client in host.clients), None)


@dataclass(frozen=True)
class RoundSpec:
    """What a round begins with."""

    id: str
    roster: Roster
    turn: int  # owner and replicas of a client take turns
    ids_B: tuple[int, ...]
    tickets_B: tuple[int, ...]  # numbers of the requests: the same however often one is tried
    channel: ChannelConfig
    snr_db_B: tuple[float, ...]
    classes: int
    overdue: Overdue  # what earlier rounds still wait for, and how long anybody may take
    ends_at: float = float("inf")  # `time.monotonic` by which the round must be over
    finished: tuple[str, ...] = ()  # earlier rounds, which hosts may forget


def span(clients: Sequence[int]) -> str:
    """Ascending ids in short: `0-249`, `3+7-9`."""
    runs: list[list[int]] = []
    for client in clients:
        if runs and client == runs[-1][-1] + 1:
            runs[-1][1:] = [client]
        else:
            runs.append([client])
    return "+".join("-".join(map(str, run)) for run in runs)


def expert_names(clients: Sequence[int]) -> str:
    """`expert 3`, `experts 0-249`."""
    return f"expert{'s' if len(clients) > 1 else ''} {span(clients)}"


def describe(clients: Sequence[int], predicate: str) -> str:
    """`expert 3 was lost`, `experts 0-249 were lost`; the predicate is in the singular, such as a fault's value."""
    if len(clients) > 1:
        predicate = re.sub("^was", "were", re.sub("^is", "are", predicate))
    return f"{expert_names(clients)} {predicate}"

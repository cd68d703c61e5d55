"""Who takes part at the moment: the one list that the supervisor writes and rounds read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.policy import Fault


@dataclass(frozen=True)
class Instance:
    """One actor that holds clients: their owner, or a replica of a single one."""

    key: str
    handle: Any  # Ray's handle of an ExpertHost
    clients: tuple[int, ...]
    owner: bool = True

    def told(self, why: str) -> str:
        """A sentence about it, as people read it."""
        return sentence(self.clients, why) if self.owner else f"replica of {sentence(self.clients, why)}"


@dataclass(frozen=True)
class Roster:
    """Who takes part at the moment."""

    version: int
    total: int  # N
    channel: Any  # Ray's handle of a Channel
    instances: tuple[Instance, ...]
    missing: Mapping[int, Fault] = field(default_factory=dict)  # clients without an instance that is up

    @property
    def drawn(self) -> int:
        """Clients that the channel draws for: also those of a pack that have left. Others' draws are the same."""
        return max([self.total, *(1 + max(instance.clients) for instance in self.instances)])

    def serving(self, turn: int) -> dict[int, Instance]:
        """The instance that speaks for each client this time; replicas take turns."""
        holders: dict[int, list[Instance]] = {}
        for instance in self.instances:
            for client in instance.clients:
                if client < self.total:  # of a pack, some may have left
                    holders.setdefault(client, []).append(instance)
        return {client: found[turn % len(found)] for client, found in holders.items()}

    def owner_of(self, client: int) -> Instance | None:
        """Who renews this client's FRL."""
        return next((i for i in self.instances if i.owner and client in i.clients), None)


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


def sentence(clients: Sequence[int], why: str) -> str:
    """`expert 3 was lost`, `experts 0-249 were lost`."""
    if len(clients) > 1:
        why = re.sub("^was", "were", re.sub("^is", "are", why))
    return f"{expert_names(clients)} {why}"

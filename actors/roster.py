"""Who takes part at the moment: the one list that the supervisor writes and rounds read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.policy import Fault


@dataclass(frozen=True)
class Instance:
    """One actor that holds clients: their owner, or a replica."""

    key: str
    handle: Any  # Ray's handle of an ExpertHost
    clients: tuple[int, ...]
    owner: bool = True

    @property
    def label(self) -> str:
        """As people read it."""
        names = "+".join(str(client) for client in self.clients)
        return f"expert {names}" if self.owner else f"replica of expert {names}"


@dataclass(frozen=True)
class Roster:
    """Who takes part at the moment."""

    version: int
    total: int  # N
    channel: Any  # Ray's handle of a Channel
    instances: tuple[Instance, ...]
    missing: Mapping[int, Fault] = field(default_factory=dict)  # clients without an instance that is up

    def serving(self, turn: int) -> dict[int, Instance]:
        """The instance that speaks for each client this time; replicas take turns."""
        holders: dict[int, list[Instance]] = {}
        for instance in self.instances:
            for client in instance.clients:
                holders.setdefault(client, []).append(instance)
        return {client: found[turn % len(found)] for client, found in holders.items()}

    def owner_of(self, client: int) -> Instance | None:
        """Who renews this client's FRL."""
        return next((i for i in self.instances if i.owner and client in i.clients), None)

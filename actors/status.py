"""What is known about hosts, and how `status` and metrics show it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from actors.host import HostState
from actors.policy import Health, State
from actors.roster import Instance


@dataclass
class Member:
    """One host and what is known about it."""

    instance: Instance
    health: Health = field(default_factory=Health)
    seen: HostState | None = None
    probing: bool = False


@dataclass(frozen=True)
class ExpertStatus:
    """One client, as `status` and metrics show it."""

    id: int
    state: str
    node: str | None
    gpu_ids: list[str]
    version: int
    load_ratio: float
    selected: int
    restarts: int
    replicas: int
    drift: float | None
    pid: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def status_of(
    client: int, holders: Collection[Member], *, load_ratio: float, selected: int, restarts: int
) -> ExpertStatus:
    """A client with its owner's home and state."""
    owner = next((m for m in holders if m.instance.owner), None)
    seen = owner.seen if owner else None
    place = seen.place[client] if seen else 0
    return ExpertStatus(
        id=client,
        state=owner.health.state.value if owner else "missing",
        node=seen.node_ip if seen else None,
        gpu_ids=list(seen.gpu_ids) if seen else [],
        version=seen.versions[place] if seen else 0,
        load_ratio=round(load_ratio, 4),
        selected=selected,
        restarts=restarts,
        replicas=sum(m.health.state is State.UP for m in holders),
        drift=seen.drift[place] if seen else None,
        pid=seen.pid if seen else None,
    )

"""One client as `status` and metrics show it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from actors.rounds.fault_policy import State
from actors.serving.host_records import HostRecord


@dataclass(frozen=True)
class ExpertStatus:
    """The state of one client, its owner's node, and its load."""

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
    knows: str | None  # in a few words, from the model's card; None: nobody said

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return dict(vars(self))


def status_of(
    client: int,
    records: Collection[HostRecord],
    *,
    load_ratio: float,
    selected: int,
    restarts: int,
    knows: str | None,
) -> ExpertStatus:
    """The status of a client, from the records of its owner and replicas."""
    owner = next((record for record in records if record.host.owner), None)
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
        replicas=sum(record.health.state is State.UP for record in records),
        drift=seen.drift[place] if seen else None,
        pid=seen.pid if seen else None,
        knows=knows,
    )

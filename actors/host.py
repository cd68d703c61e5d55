"""What a host of clients is given when it starts, and what it tells."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from numpy.typing import NDArray

from airmoe_ray.checkpoint import ModelCard
from airmoe_ray.config import Config

Array = NDArray[Any]


@dataclass(frozen=True)
class HostSpec:
    """What a host needs besides its clients' files."""

    clients: tuple[int, ...]
    config: Config
    card: ModelCard
    journal_folder: str | None = None  # where renewals are kept; None: nothing is renewed here
    replica: bool = False


@dataclass(frozen=True)
class Pinned:
    """An object kept in the store for as long as its owner lives, so that a restarted actor finds it again.

    A plain reference among a constructor's arguments makes Ray print a warning for every such actor.
    """

    reference: bytes

    @classmethod
    def put(cls, value: bytes) -> "Pinned":
        """Store once, hand out to many."""
        return cls(ray.cloudpickle.dumps(ray.put(value)))  # type: ignore[no-untyped-call]

    def get(self) -> bytes:
        """Fetch."""
        content: bytes = ray.get(ray.cloudpickle.loads(self.reference))
        return content


@dataclass(frozen=True)
class Statistic:
    """Reply to a read: d numbers and one bit per input and client."""

    stat_Bnd: Array
    faded_Bn: Array
    versions: tuple[int, ...]


@dataclass(frozen=True)
class HostState:
    """Where a host lives and how its clients are."""

    clients: tuple[int, ...]
    versions: tuple[int, ...]
    snapshot_versions: tuple[int, ...]
    drift: tuple[float, ...]  # how far prototypes moved since the checkpoint, over their norm
    node_id: str
    node_ip: str
    gpu_ids: tuple[str, ...]
    pid: int

    @cached_property
    def place(self) -> dict[int, int]:
        """Where each client stands in the tuples above."""
        return {client: place for place, client in enumerate(self.clients)}

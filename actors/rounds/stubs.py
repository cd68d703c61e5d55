"""Every call that hosts, channel and cloud take, as typed methods of small picklable stubs.

An exchange takes one message and what travels beside it; other calls are plain. Each method has its namesake on the
actor, which takes a T where the stub takes a `Ref[T]`, and returns the T that the stub returns a `Ref` to; a test
compares the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorClass

from actors.errors import Fault
from actors.rounds.backward_messages import ClientFiles, Descend, Learn, Learned, Weigh
from actors.rounds.calls import Pinned, Ref
from actors.rounds.messages import (
    Array,
    Arrival,
    BatchResult,
    CloudSpec,
    CloudState,
    Collect,
    Forward,
    Gains,
    HostReport,
    HostSpec,
    HostState,
    HostStatistic,
    Read,
    Renew,
    RenewalInput,
    Segment,
    Superpose,
    Transmit,
)

if TYPE_CHECKING:
    from actors.rounds.roster import Roster  # which itself holds stubs
    from airmoe_ray.training.pixel_losses import Labelling
    from airmoe_ray.training.warm_start import OwnData  # which brings all of the training with it


@dataclass(frozen=True)
class ActorCalls:
    """What all stubs have in common: Ray's handle, and the end of the actor's process."""

    handle: Any  # to Ray's own types, every method of a handle is a `Never`

    @property
    def actor_id(self) -> str:
        """By which Ray's errors name the actor."""
        return str(self.handle._actor_id.hex())

    def restart(self) -> None:
        """End the process of an actor that hangs; Ray starts it again."""
        ray.kill(self.handle, no_restart=False)

    def end(self) -> None:
        """End the actor for good."""
        ray.kill(self.handle, no_restart=True)


@dataclass(frozen=True)
class HostCalls(ActorCalls):
    """Calls of an `ExpertHost`."""

    @classmethod
    def start(cls, actor: ActorClass[Any], spec: HostSpec, files: Sequence[bytes | Pinned]) -> Self:
        """A new host, which starts in the background."""
        return cls(actor.remote(spec, files))

    def read(self, message: Read) -> Ref[HostStatistic]:
        """All clients of the host answer a query."""
        return Ref(self.handle.exchange.remote(message.packed))

    def gains(self, message: Gains) -> Ref[Array]:
        """|gamma_j|^2 (B, n)."""
        return Ref(self.handle.exchange.remote(message.packed))

    def forward(self, message: Forward, features_BDhw: Ref[Array]) -> Ref[HostReport]:
        """Routed clients run their experts."""
        return Ref(self.handle.compute.remote(message.packed, features_BDhw.ref))

    def transmit(self, message: Transmit) -> Ref[Array | Fault]:
        """Symbols (P, C, h, w), for the channel; or what went wrong."""
        return Ref(self.handle.emit.remote(message.packed))

    def renew(self, message: Renew) -> Ref[tuple[int, ...]]:
        """An owner renews what its clients read in this round; the new versions."""
        return Ref(self.handle.remember.remote(message.packed))

    def collect(self, message: Collect) -> Ref[dict[int, RenewalInput] | Fault]:
        """What a replica's clients read in this round, for their owner."""
        return Ref(self.handle.emit.remote(message.packed))

    def renew_from(self, collected: Ref[dict[int, RenewalInput] | Fault], until: float) -> Ref[tuple[int, ...]]:
        """An owner renews what a replica has collected, before `until` on its own clock; the new versions."""
        return Ref(self.handle.renew_from.remote(collected.ref, until))

    def snapshots(self, clients: tuple[int, ...]) -> Ref[dict[int, bytes]]:
        """FRLs of these clients, as files."""
        return Ref(self.handle.snapshots.remote(clients))

    def adopt(self, snapshots: Mapping[int, bytes]) -> Ref[tuple[int, ...]]:
        """Take over newer FRLs; the resulting versions."""
        return Ref(self.handle.adopt.remote(snapshots))

    def probe(self) -> Ref[HostState]:
        """Do some real work, then tell the state."""
        return Ref(self.handle.probe.remote())

    def state(self) -> Ref[HostState]:
        """Where the host runs, and how its clients are."""
        return Ref(self.handle.state.remote())


@dataclass(frozen=True)
class LearningHostCalls(HostCalls):
    """Calls of a `LearningHost`."""

    def weigh(self, message: Weigh, g_BChw: Ref[Array]) -> Ref[Array]:
        """a_j = <g, y_j> of each pair."""
        return Ref(self.handle.exchange.remote(message.packed, g_BChw.ref))

    def learn(self, message: Learn) -> Ref[Learned]:
        """Gradients of everything at the host, and the step unless `Descend` follows."""
        return Ref(self.handle.exchange.remote(message.packed))

    def descend(self, message: Descend) -> Ref[None]:
        """The step, where gradients had to be scaled first."""
        return Ref(self.handle.exchange.remote(message.packed))

    def warm_start(self, client: int, own: "OwnData", labelling: "Labelling") -> Ref[None]:
        """A client learns alone from its own data."""
        return Ref(self.handle.warm_start.remote(client, own, labelling))

    def archive(self) -> Ref[dict[int, ClientFiles]]:
        """Files of every client, for the operator's backup."""
        return Ref(self.handle.archive.remote())

    def restore(self, files: Mapping[int, ClientFiles]) -> Ref[None]:
        """Go on from archived files."""
        return Ref(self.handle.restore.remote(files))

    def needs_restore(self) -> Ref[bool]:
        """Whether the process is new and has yet to be given its clients' files."""
        return Ref(self.handle.needs_restore.remote())

    def set_learning(self, learning: bool) -> Ref[None]:
        """Keep graphs for a way back, or only answer."""
        return Ref(self.handle.set_learning.remote(learning))


@dataclass(frozen=True)
class ChannelCalls(ActorCalls):
    """Calls of a `Channel`."""

    @classmethod
    def start(cls, actor: ActorClass[Any], seed: int) -> Self:
        """A new channel, which starts in the background."""
        return cls(actor.remote(seed))

    def superpose(self, message: Superpose, *symbols_PChw: Ref[Array | Fault]) -> Ref[Arrival]:
        """What arrives of the symbols of all hosts. They must be there: the channel would wait, and all after it."""
        return Ref(self.handle.exchange.remote(message.packed, *(symbols.ref for symbols in symbols_PChw)))

    def ping(self) -> Ref[bool]:
        """Whether it is alive."""
        return Ref(self.handle.ping.remote())


@dataclass(frozen=True)
class CloudCalls(ActorCalls):
    """Calls of a `Cloud`."""

    @classmethod
    def start(cls, actor: ActorClass[Any], spec: CloudSpec, content: bytes, weights: Pinned | None) -> Self:
        """A new cloud, which starts in the background; `weights` are its backbone's, where they are a file."""
        return cls(actor.remote(spec, content, weights))

    def segment(self, message: Segment, images_BHW3: NDArray[np.uint8]) -> Ref[BatchResult]:
        """One batch from pixels to fused logits."""
        return Ref(self.handle.exchange.remote(message.packed, images_BHW3))

    def connect(self, roster: "Roster") -> Ref[None]:
        """Work with the clients of this roster from now on."""
        return Ref(self.handle.connect.remote(roster))

    def state(self) -> Ref[CloudState]:
        """Where the cloud runs."""
        return Ref(self.handle.state.remote())

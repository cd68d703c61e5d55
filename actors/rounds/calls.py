"""How one actor calls another: a typed message goes as one argument, a typed reference comes back.

Ray prepares every argument of a call on its own, which costs about 0.2 ms apiece, and ten times that for a fan-out to
ten clients. So the small values of a call travel pickled together, as one message; large arrays, and references to what
other actors have yet to compute, travel beside it. A small reply travels pickled (sealed) for the same reason.
Which messages there are is in `messages.py`, which calls each actor takes in `stubs.py`.
"""

import logging
import pickle
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from actors.errors import Fault, InvalidOutputError, TooLateError, UnknownRoundError

T = TypeVar("T")
log = logging.getLogger("airmoe")


def fault_of(error: Exception) -> Fault:
    """What the exception of a call says about the actor that was called."""
    if isinstance(error, GetTimeoutError | TooLateError):
        return Fault.LATE
    if isinstance(error, RayActorError | UnknownRoundError):
        return Fault.LOST
    return Fault.INVALID if isinstance(error, InvalidOutputError) else Fault.FAILED


class Message:
    """The small values of one call: base of the frozen dataclasses that `Endpoint.receive` takes."""

    @cached_property
    def packed(self) -> bytes:
        """The message as one argument, pickled once, to however many actors it goes."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)


def seal(value: object) -> bytes:
    """Pickle a value for its way; `Ref` and `Endpoint` open it on arrival."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unseal(content: bytes) -> Any:
    """Open what was sealed."""
    return pickle.loads(content)


def _opened(arrived: Any) -> Any:
    """Bytes on the way are always something sealed: no call takes or returns bare bytes."""
    return unseal(arrived) if isinstance(arrived, bytes) else arrived


@dataclass(frozen=True)
class Ref(Generic[T]):
    """A reference to a T: the reply of a call, or something in the object store. `await` and `get` give the T."""

    ref: "ray.ObjectRef[Any]"

    @classmethod
    def put(cls, value: T) -> "Ref[T]":
        """Store a large value once, for many calls to take beside their message."""
        return cls(ray.put(value))

    def get(self, timeout_s: float | None = None) -> T:
        """The T, waited for until `timeout_s` is over."""
        return self.open(ray.get(self.ref, timeout=timeout_s))

    def open(self, arrived: Any) -> T:
        """The T itself, out of what Ray delivered."""
        return _opened(arrived)

    def __await__(self) -> Generator[Any, None, T]:
        return self.open((yield from self.ref.__await__()))


def get_all(refs: Sequence[Ref[T]], timeout_s: float | None = None) -> list[T]:
    """Wait for all references at once."""
    arrived = ray.get([ref.ref for ref in refs], timeout=timeout_s)
    return [ref.open(value) for ref, value in zip(refs, arrived, strict=True)]


def ready(refs: Sequence[Ref[T]], *, count: int = 1, timeout_s: float | None = None) -> list[Ref[T]]:
    """The references that have arrived (or failed), once `count` of them have or the time is over."""
    done, _ = ray.wait([ref.ref for ref in refs], num_returns=count, timeout=timeout_s, fetch_local=False)
    arrived = set(done)
    return [ref for ref in refs if ref.ref in arrived]


class Endpoint:
    """An actor that takes messages; `receive` says which ones, and what each of them calls."""

    def receive(self, message: Any, *beside: Any) -> object:
        """Call the method for this type of message; `beside` is what travelled beside it, opened."""
        raise NotImplementedError

    def exchange(self, packed: bytes, *beside: Any) -> bytes:
        """Take a message; a small reply, sealed, which the caller itself reads."""
        return seal(self.receive(unseal(packed), *map(_opened, beside)))

    def emit(self, packed: bytes, *beside: Any) -> Any:
        """Take a message; the reply as it is, for another actor to take by reference.

        What goes wrong travels in its place: an exception would be raised by that other actor, and look like its own.
        """
        try:
            return self.receive(unseal(packed), *map(_opened, beside))
        except Exception as error:
            log.warning("%s: %s", type(error).__name__, error)
            return fault_of(error)


@dataclass(frozen=True)
class Pinned:
    """An object kept in the store for as long as its owner lives, so that a restarted actor finds it again.

    A plain reference among a constructor's arguments makes Ray print a warning for every such actor.
    """

    reference: bytes

    @classmethod
    def put(cls, value: bytes) -> "Pinned":
        """Store an object once, to be handed out to many."""
        return cls(ray.cloudpickle.dumps(ray.put(value)))  # type: ignore[no-untyped-call]

    def get(self) -> bytes:
        """Fetch the object."""
        content: bytes = ray.get(ray.cloudpickle.loads(self.reference))
        return content

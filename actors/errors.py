"""What can go wrong between processes. Every class survives pickling: one message, no hidden arguments."""

from collections.abc import Mapping
from enum import Enum

from airmoe_ray.errors import UserError


class Fault(Enum):
    """What was wrong with a reply; the value is the predicate of a sentence for people."""

    LATE = "was late"
    LOST = "was lost"
    INVALID = "sent invalid numbers"
    FAILED = "failed with an error"
    QUARANTINED = "is quarantined"
    RESTARTING = "is restarting"


def last_line(error: Exception) -> str:
    """The last line of an error's text, where Ray puts the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


class ClusterError(UserError):
    """A cluster that cannot be reached, is too small, or refuses us: raised before anything runs."""


class ServiceError(RuntimeError):
    """A request that cannot be answered; the message may be shown to whoever sent it."""


class NoExpertsError(ServiceError):
    """No client is able to answer at the moment; `faults` by host are for the health records.

    `rows` are the inputs of the batch that nobody is left for; none: all of them.
    """

    def __init__(
        self, message: str, faults: Mapping[str, Fault] | None = None, rows: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(message, faults, rows)
        self.faults, self.rows = dict(faults or {}), rows

    def __str__(self) -> str:
        return str(self.args[0])


class NotFiniteError(ServiceError):
    """Features of some inputs (`rows` of the batch) are not finite: the cloud's fault or theirs, not the clients'."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message, rows)
        self.rows = rows

    def __str__(self) -> str:
        return str(self.args[0])


class OverloadedError(ServiceError):
    """The bounded queue is full; `again_s` is when it is worth asking again."""

    def __init__(self, message: str, again_s: float = 1.0) -> None:
        super().__init__(message, again_s)
        self.again_s = again_s

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineError(ServiceError):
    """The request's time is over."""


class StoppedError(ServiceError):
    """The system is shutting down."""


class ChannelLostError(RuntimeError):
    """The channel actor died or hangs; the round can be repeated on the restarted one."""


class RosterNeededError(RuntimeError):
    """The cloud does not have this roster: it was restarted, or the roster is still on its way."""


class UnknownRoundError(RuntimeError):
    """An exchange of a round that this actor never began: it was restarted in between."""


class TooLateError(RuntimeError):
    """A call that its caller no longer waits for, and that is left undone."""


class InvalidOutputError(RuntimeError):
    """NaN, Inf or a wrong shape, stopped before the air."""

"""What to do about a client that is late, lost or sends invalid numbers: decisions only, no Ray, no clock.

Before anything is transmitted a missing client can be made good for by the next best one; afterwards the survivors can
only renormalise. Whoever fails again and again is left alone for a while.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf

from actors.errors import Fault

FORGIVEN_AFTER_S = 600.0  # a failure this long after the last one is the first of a new row


class Exchange(Enum):
    """An exchange of a round in which clients may fail."""

    READ = auto()
    GAINS = auto()
    FORWARD = auto()
    TRANSMIT = auto()
    SUPERPOSE = auto()  # the channel's part of a transmission
    RENEW = auto()
    LEARN = auto()  # all of the way back


class Decision(Enum):
    """What the round does next."""

    SUBSTITUTE = auto()  # ask the next best client
    GO_ON_WITHOUT = auto()  # the remaining clients answer
    GIVE_UP = auto()  # nobody is left: the round ends, and may be begun again


def decide(exchange: Exchange, *, survivors: int, spares: int, time_left_s: float, call_s: float) -> Decision:
    """What to do when clients failed in `exchange`, with `survivors` left for the input and `spares` not yet asked.

    A substitute is worth asking only if it can answer: after another `call_s` there must be time to transmit.
    """
    if exchange is Exchange.FORWARD and spares > 0 and (time_left_s > call_s or survivors == 0):
        return Decision.SUBSTITUTE
    return Decision.GO_ON_WITHOUT if survivors > 0 else Decision.GIVE_UP


class State(Enum):
    """Whether a host takes part; the value is what status and metrics show."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    QUARANTINED = "quarantined"
    DRAINING = "draining"


@dataclass(frozen=True)
class Health:
    """What is known about the health of a host."""

    state: State = State.STARTING
    failures: int = 0  # in a row, none of them long after the one before
    failed_at: float = -inf  # the last one [s]
    grave: bool = False  # one of them was more than lateness
    late_probes: int = 0  # in a row: it hangs rather than restarts

    def failed(self, fault: Fault, *, now: float, quarantine_after: int) -> "Health":
        """The health after a failed call at time `now` [s].

        A lost actor is known to restart; others get `quarantine_after` chances, and a new start after a good while.
        """
        failures = 1 + (self.failures if now - self.failed_at <= FORGIVEN_AFTER_S else 0)
        grave = fault is not Fault.LATE or (self.grave and failures > 1)
        health = replace(self, failures=failures, failed_at=now, grave=grave)
        if self.state is State.DRAINING:
            return health
        if fault is Fault.LOST:
            return replace(health, state=State.RESTARTING)
        return replace(health, state=State.QUARANTINED) if failures >= quarantine_after else health

    def unanswered(self) -> "Health":
        """The health of a host that was up and left a plain question unanswered: it is asked for no more work."""
        state = self.state if self.state is State.DRAINING else State.QUARANTINED
        return replace(self, state=state, late_probes=self.late_probes + 1)

    def answered(self, *, heard: bool) -> "Health":
        """The health after a round in which all replies were good: earlier failures are forgiven.

        A statistic in time is enough to make good for late ones, as of a client that is hardly ever routed. Whoever has
        failed or sent nonsense must be `heard`: its experts may do so whenever they are routed.
        """
        return replace(self, failures=0, grave=False) if self.failures and (heard or not self.grave) else self

    def probed(self, ok: bool, *, late: bool = False) -> "Health":
        """The health after a probe: a pass brings the host back, a probe that hangs is counted."""
        if ok:
            return Health(State.DRAINING if self.state is State.DRAINING else State.UP)
        return replace(self, late_probes=self.late_probes + 1 if late else 0)

    @property
    def must_restart(self) -> bool:
        """Whether waiting is pointless: two probes in a row were never answered."""
        return self.late_probes >= 2

    @property
    def fault(self) -> Fault | None:
        """Why the host is left out of a round, None if it takes part."""
        if self.state is State.UP:
            return None
        return Fault.QUARANTINED if self.state is State.QUARANTINED else Fault.RESTARTING

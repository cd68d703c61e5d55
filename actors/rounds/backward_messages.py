"""What crosses on the way back of a training round; the way there is in `messages.py`.

Suffixes: B inputs, n clients of one host, d statistic, C classes, h w grid; P routed pairs of one host.
"""

from dataclasses import dataclass

from actors.rounds.calls import Message
from actors.rounds.messages import Array

ClientFiles = tuple[bytes, bytes]  # a client's weights, and the moments of its optimizer


@dataclass(frozen=True)
class Weigh(Message):
    """To hosts that were heard, with g (B, C, h, w): reply with a_j = <g, y_j> of each pair."""

    round_id: str
    sample_P: Array
    client_P: Array


@dataclass(frozen=True)
class Learn(Message):
    """To every host that answered the read: its derivatives; see `airmoe_ray.training.split_backward.Lesson`."""

    round_id: str
    stat_grad_Bnd: Array
    sample_P: Array
    client_P: Array
    beta_P: Array
    delta_grad_P: Array
    scale_limit_grad_P: Array
    align_share: float
    learning_rate: float | None  # None: gradients are clipped together first, and `Descend` follows


@dataclass(frozen=True)
class Learned:
    """Reply to `Learn`."""

    query_grad_Bd: Array  # the host's part of dL/dQ
    frl_term: float  # its part of L_FRL, for the log
    square_norm: float  # of its gradients; the cloud needs it only to clip


@dataclass(frozen=True)
class Descend(Message):
    """To every host that has learned: the step, with gradients times `scale`."""

    round_id: str
    sample_P: Array
    client_P: Array
    learning_rate: float
    scale: float = 1.0

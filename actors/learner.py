"""A client that learns at home: its expert, psi, FRL and optimizers never leave this process in training.

Suffixes: B inputs, n clients of this host, d statistic, C classes, h w grid; P (input, client) pairs; S samples of D_j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.errors import UnknownRoundError
from actors.expert import ExpertHost
from actors.host import HostSpec, Pinned, Statistic
from airmoe_ray.channel import quantise
from airmoe_ray.checkpoint import expert_tensors, load_client, parse_tensors, serialise
from airmoe_ray.config import ChannelConfig
from airmoe_ray.experts import set_precision
from airmoe_ray.federated import Lesson, client_loss
from airmoe_ray.optimizers import optimizers, restore_moments, stored_moments
from airmoe_ray.warm_start import OwnData, warm_start_client

Array = NDArray[Any]


@dataclass(frozen=True)
class Homework:
    """The second backward exchange, for one host; see `airmoe_ray.federated.Lesson`."""

    stat_grad_Bnd: Array
    sample_P: Array
    client_P: Array
    beta_P: Array
    delta_grad_P: Array
    capacity_grad_P: Array
    align_share: float


@dataclass(frozen=True)
class Learned:
    """What a host answers to its homework."""

    query_grad_Bd: Array  # its part of dL/dQ
    frl_term: float  # its part of L_FRL, for the log
    square_norm: float  # of its gradients; the cloud needs it only to clip


class LearningHost(ExpertHost):
    """An `ExpertHost` that also goes backwards.

    It has to be told first what it knows, by `restore`: one that Ray started again in silence, between two calls, would
    otherwise answer as the beginner it was when it was first made.
    """

    def __init__(self, spec: HostSpec, files: Sequence[bytes] | Sequence[Pinned]) -> None:
        super().__init__(spec, files)
        self.adam, self.sgd = optimizers([(self.clients.experts, 1.0)], self.clients.frl, self.config)
        self.queries: dict[str, Tensor] = {}  # Q of each round that is under way
        self.loss_gradients: dict[str, Tensor] = {}  # and g, once it is known
        self.blank = True
        set_precision(self.clients.experts, self.config.train.precision)
        self.learn_from_now_on(True)

    def is_blank(self) -> bool:
        """Whether it was started anew, and has to be told what it knows."""
        return self.blank

    def learn_from_now_on(self, learning: bool) -> None:
        """Keep graphs, or only answer (validation)."""
        self.learning = learning
        self.clients.train(learning)

    def read(
        self,
        round_id: str,
        query_dist_Bd: Array,
        gamma_Bn: Array,
        channel: ChannelConfig,
        finished: Sequence[str] = (),
    ) -> Statistic:
        """As ever; the query is kept for the way back."""
        self._check_told()
        reply = super().read(round_id, query_dist_Bd, gamma_Bn, channel, finished)
        self.queries = {name: query for name, query in self.queries.items() if name in self.rounds}
        self.loss_gradients = {name: g for name, g in self.loss_gradients.items() if name in self.rounds}
        self.queries[round_id] = self._tensor(query_dist_Bd)
        return reply

    # the way back

    def weigh(self, round_id: str, g_BChw: Array, sample_P: Array, client_P: Array) -> Array:
        """a_j = <g, y_j> of each pair, with y_j as it was received: what more of this client would cost."""
        round_ = self._round(round_id)
        self.loss_gradients[round_id] = self._tensor(g_BChw)
        logits_PChw = torch.stack([round_.outputs[pair][0] for pair in self._pairs(sample_P, client_P)]).detach()
        if round_.channel.kind == "digital":
            logits_PChw = quantise(logits_PChw[:, None], round_.channel.digital_bits)[:, 0]
        return (self.loss_gradients[round_id][sample_P] * logits_PChw).sum(dim=(1, 2, 3)).cpu().numpy()

    def learn(self, round_id: str, work: Homework, learning_rate: float | None) -> Learned:
        """Gradients of everything here; then, unless the cloud first wants to clip, the step and the renewal."""
        round_ = self._round(round_id)
        query = self.queries[round_id].clone().requires_grad_()
        pairs = self._pairs(work.sample_P, work.client_P)
        outputs_P = (
            torch.stack([round_.outputs[pair][0] for pair in pairs]) if pairs else query.new_zeros(0),
            torch.stack([round_.outputs[pair][1] for pair in pairs]) if pairs else query.new_zeros(0),
        )
        lesson = Lesson(
            self._tensor(work.stat_grad_Bnd),
            torch.from_numpy(work.sample_P),
            self._tensor(work.beta_P),
            self._tensor(work.delta_grad_P),
            self._tensor(work.capacity_grad_P),
            work.align_share,
        )
        loss, frl_term = client_loss(
            self.clients,
            query,
            lesson,
            outputs_P=outputs_P,
            g_BChw=self.loss_gradients.get(round_id, query.new_zeros(0)),
            gain_P=round_.gamma_Bn[work.sample_P, [index for _, index in pairs]].abs().square(),
            channel=round_.channel,
        )
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)  # None, not 0: an expert without a sample must not move
        loss.backward()
        grads = [p.grad for p in self.clients.parameters() if p.grad is not None]
        square_norm = float(sum(grad.square().sum() for grad in grads)) if learning_rate is None else 0.0
        if learning_rate is not None:
            self.descend(round_id, work.sample_P, work.client_P, learning_rate)
        assert query.grad is not None
        return Learned(query.grad.cpu().numpy(), float(frl_term), square_norm)

    def descend(
        self, round_id: str, sample_P: Array, client_P: Array, learning_rate: float, scale: float = 1.0
    ) -> None:
        """One step with the gradients (times `scale`), then the renewal, Eq. (5)-(6); the round is over."""
        for parameter in self.clients.parameters():
            if scale != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        for optimizer in self._optimizers():
            optimizer.step()
        self.clients.frl.project()
        self.renew_round(round_id, sample_P, client_P)
        del self.rounds[round_id]

    # before and between

    def warm_start(self, client: int, own: OwnData, class_weight_C: Array | None) -> None:
        """A client learns from its own D_j, whose labels it has: expert and psi, then the FRL by k-means."""
        self._check_told()
        weight_C = None if class_weight_C is None else self._tensor(class_weight_C)
        index = self.index_of[client]
        warm_start_client(self.clients, index, client, own, config=self.config, class_weight_C=weight_C)

    def archive(self) -> dict[int, tuple[bytes, bytes]]:
        """Files of every client here, weights and moments: the operator's backup, not a part of the protocol."""
        self._check_told()
        moments = stored_moments(self.clients, self.adam)
        found = {}
        for client, index in self.index_of.items():
            mine = {k.replace(f"experts.{index}.", "", 1): v for k, v in moments.items() if _belongs(k, index)}
            found[client] = (serialise(expert_tensors(self.clients, index)), serialise(mine))
        return found

    def restore(self, files: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Go on from an archive."""
        self.rounds.clear()
        moments: dict[str, Tensor] = {}
        for client, (weights, optimizer) in files.items():
            index = self.index_of[client]
            load_client(self.clients, index, weights, f"expert {client}")
            stored = parse_tensors(optimizer, f"optimizer of expert {client}")
            moments |= {f"experts.{index}.{name}": value for name, value in stored.items()}
        restore_moments(self.clients, self.adam, moments)
        self.blank = False

    # inside

    def _check_told(self) -> None:
        if self.blank:
            raise UnknownRoundError("started again, and not told yet where to go on")

    def _pairs(self, sample_P: Array, client_P: Array) -> list[tuple[int, int]]:
        return [(int(row), self.index_of[int(client)]) for row, client in zip(sample_P, client_P, strict=True)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.adam] if self.sgd is None else [self.adam, self.sgd]


def _belongs(name: str, index: int) -> bool:
    return name.startswith(f"experts.{index}.")


LearningActor = ray.remote(LearningHost)

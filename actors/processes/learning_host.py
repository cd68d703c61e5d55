"""A host whose clients learn: experts, psi, FRLs and optimizers stay in this process, but for the operator's backup.

No exchange carries them; `archive` does, outside the protocol, so that a checkpoint is whole and a client that
restarts goes on from there.

Suffixes: B inputs, n clients of this host, d statistic, C classes, h w grid; P routed pairs; S samples of D_j.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.errors import UnknownRoundError
from actors.processes.expert_host import ExpertHost, HostMessage, host_actor
from actors.rounds.backward_messages import ClientFiles, Descend, Learn, Learned, Weigh
from actors.rounds.calls import Pinned
from actors.rounds.messages import Array, HostSpec, HostStatistic, Read, Renew
from airmoe_ray.model.experts import ExpertOutput, set_precision
from airmoe_ray.storage.checkpoint import expert_tensors, load_client, parse_tensors, serialise
from airmoe_ray.training.optimizers import descend, forget_gradients, optimizers, restore_moments, stored_moments
from airmoe_ray.training.pixel_losses import Labelling
from airmoe_ray.training.split_backward import Lesson, agreement, client_loss, square_norm
from airmoe_ray.training.warm_start import OwnData, warm_start_client

LearningMessage = Weigh | Learn | Descend


class LearningHost(ExpertHost):
    """An `ExpertHost` that also goes backwards.

    A new process has to be given its clients' files by `restore` before it does anything: Ray may start one again
    between two calls, unnoticed, and it would go on from the files of the very beginning.
    """

    def __init__(self, spec: HostSpec, files: Sequence[bytes | Pinned]) -> None:
        super().__init__(spec, files)
        self.adam, self.sgd = optimizers([(self.clients.experts, 1.0)], self.clients.frl, self.config)
        self.restored = False
        set_precision(self.clients.experts, self.config.train.precision)
        self.set_learning(True)

    def receive(self, message: HostMessage | LearningMessage, *beside: Any) -> object:
        """Call the method for this type of message."""
        match message:
            case Weigh():
                return self.weigh(message, *beside)
            case Learn():
                return self.learn(message)
            case Descend():
                self.descend(message)
                return None
            case _:
                return super().receive(message, *beside)

    def set_learning(self, learning: bool) -> None:
        """Keep graphs for a way back, or only answer (validation)."""
        self.learning = learning
        self.clients.train(learning)

    def read(self, message: Read) -> HostStatistic:
        """Answer a query, in a process that knows where its clients are in their training."""
        self._check_restored()
        return super().read(message)

    # the way back

    def weigh(self, message: Weigh, g_BChw: Array) -> Array:
        """a_j = <g, y_j> of each pair, with y_j as it was received: what more of this client would cost."""
        round_ = self.rounds[message.round_id]
        round_.g_BChw = g = self._tensor(g_BChw)
        pairs = self._pairs(message.sample_P, message.client_P)
        logits_PChw = torch.stack([round_.outputs[pair][0] for pair in pairs]).detach()
        return agreement(g, logits_PChw, torch.from_numpy(message.sample_P), round_.channel).cpu().numpy()

    def learn(self, message: Learn) -> Learned:
        """Gradients of everything here; then, unless the cloud first wants to clip, the step and the renewal."""
        round_ = self.rounds[message.round_id]
        query = round_.query_dist_Bd.clone().requires_grad_()
        pairs = self._pairs(message.sample_P, message.client_P)
        outputs = [round_.outputs[pair] for pair in pairs]
        stacked = [torch.stack(part) for part in zip(*outputs, strict=True)] or [query[:0]] * 2
        lesson = Lesson(
            self._tensor(message.stat_grad_Bnd),
            torch.from_numpy(message.sample_P),
            self._tensor(message.beta_P),
            self._tensor(message.delta_grad_P),
            self._tensor(message.scale_limit_grad_P),
            message.align_share,
        )
        loss, frl_term = client_loss(
            self.clients,
            query,
            lesson,
            outputs_P=ExpertOutput(*stacked),
            g_BChw=query.new_zeros(0) if round_.g_BChw is None else round_.g_BChw,
            gain_P=round_.gain_Bn[message.sample_P, [index for _, index in pairs]],
            channel=round_.channel,
        )
        forget_gradients(self.adam, self.sgd)
        loss.backward()
        norm = 0.0
        if message.learning_rate is None:
            grads = [p.grad for p in self.clients.parameters() if p.grad is not None]
            norm = square_norm(grads)
        else:
            self.descend(Descend(message.round_id, message.sample_P, message.client_P, message.learning_rate))
        assert query.grad is not None
        return Learned(query.grad.cpu().numpy(), float(frl_term), norm)

    def descend(self, message: Descend) -> None:
        """One step with the gradients (times `scale`), then the renewal, Eq. (11)-(12); the round is over."""
        for parameter in self.clients.parameters():
            if message.scale != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(message.scale)
        descend(self.adam, self.sgd, rate=message.learning_rate)
        self.clients.frl.project()
        self.renew(Renew(message.round_id, message.sample_P, message.client_P, tickets_B=()))
        self.rounds.end([message.round_id])

    # before and between rounds

    def warm_start(self, client: int, own: OwnData, labelling: Labelling) -> None:
        """A client learns from its own D_j, whose labels it has: expert and psi, then the FRL by k-means."""
        self._check_restored()
        index = self.index_of[client]
        warm_start_client(self.clients, index, client, own, config=self.config, labelling=labelling.to(self.device))

    def archive(self) -> dict[int, ClientFiles]:
        """Files of every client here, weights and moments: the operator's backup, not a part of the protocol."""
        self._check_restored()
        moments = stored_moments(self.clients, self.adam)
        found = {}
        for client, index in self.index_of.items():
            mine = {k.replace(f"experts.{index}.", "", 1): v for k, v in moments.items() if _belongs(k, index)}
            found[client] = (serialise(expert_tensors(self.clients, index)), serialise(mine))
        return found

    def restore(self, files: Mapping[int, ClientFiles]) -> None:
        """Go on from archived files; rounds under way are forgotten."""
        self.rounds.clear()
        moments: dict[str, Tensor] = {}
        for client, (weights, optimizer) in files.items():
            index = self.index_of[client]
            load_client(self.clients, index, weights, f"expert {client}")
            stored = parse_tensors(optimizer, f"optimizer of expert {client}")
            moments |= {f"experts.{index}.{name}": value for name, value in stored.items()}
        restore_moments(self.clients, self.adam, moments)
        self.restored = True

    def needs_restore(self) -> bool:
        """Whether the process is new and has yet to be given its clients' files."""
        return not self.restored

    # inside

    def _check_restored(self) -> None:
        if not self.restored:
            raise UnknownRoundError("the process is new, and was not given its clients' files yet")

    def _pairs(self, sample_P: Array, client_P: Array) -> list[tuple[int, int]]:
        return [(int(row), self.index_of[int(client)]) for row, client in zip(sample_P, client_P, strict=True)]


def _belongs(name: str, index: int) -> bool:
    return name.startswith(f"experts.{index}.")


LearningActor = host_actor(LearningHost)

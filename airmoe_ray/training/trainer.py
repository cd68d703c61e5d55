"""Training: one step.

It is pure torch on one batch; loops (in one process, or under Ray Train) only feed it. All randomness is counter-based,
so a resumed run takes the very steps an undisturbed one would have taken (bit for bit where torch's kernels are
deterministic, as on the CPU).
Suffixes: B inputs, D features, C classes, H W image, h w grid.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from airmoe_ray.config import Config
from airmoe_ray.features.sources import Source
from airmoe_ray.inference.validate import AskClients
from airmoe_ray.model.experts import Expert, set_precision
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.runtime.workers import OneWorker, Workers
from airmoe_ray.storage.checkpoint import TrainerState
from airmoe_ray.training.constraints import check_constraints
from airmoe_ray.training.losses import LossTerms, head_objective, objective, solo_objective
from airmoe_ray.training.optimizers import (
    descend,
    forget_gradients,
    learning_rate,
    optimizers,
    restore_moments,
    stored_moments,
)
from airmoe_ray.training.pixel_losses import PLAIN, Labelling
from airmoe_ray.training.warm_start import Indices, warm_start


class Batch(NamedTuple):
    """What a step consumes."""

    features_BDhw: Tensor
    labels_BHW: Tensor
    ids_B: list[int]
    fine: tuple[Tensor, ...] = ()  # finer maps, where the cloud has a refiner
    domains_B: Tensor | None = None


class StepResult(NamedTuple):
    """What a step tells the log."""

    loss: LossTerms
    selected_BK: Tensor
    active_BK: Tensor  # who ran and transmitted

    @property
    def forwards(self) -> int:
        """Sample-expert forwards: B K less the truncated."""
        return int(self.active_BK.sum())


class Learning(Protocol):
    """What a run needs of its trainer, wherever the clients learn."""

    model: AirMoE  # as of the last `state`
    config: Config

    @property
    def workers(self) -> Workers:
        """Who shares the work."""
        ...

    @property
    def ask_clients(self) -> AskClients | None:
        """How to ask clients, for each batch of validation, where they are not in `model`."""
        ...

    def begin(self) -> None:
        """Before the first step of a run that is not resumed."""
        ...

    def warm_start(self, source: Source, data: Sequence[Indices]) -> None:
        """What clients bring along, each from its own D_j."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Forward, backward, optimizers, renewal."""
        ...

    def end_epoch(self) -> None:
        """After the last step of an epoch."""
        ...

    def state(self, *, epoch: int) -> TrainerState:
        """What a checkpoint needs besides `model`, which is up to date after this."""
        ...

    def restore(self, state: TrainerState) -> None:
        """Continue where `state` was taken; `model` holds its weights."""
        ...

    def account(self) -> dict[str, Any]:
        """What crossed in training so far, for the log."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Trainer:
    """A model with its optimizers: Adam for experts, psi and query; plain SGD for prototypes."""

    ask_clients = None

    def __init__(
        self,
        model: AirMoE,
        config: Config,
        *,
        total_steps: int,
        labelling: Labelling = PLAIN,
        workers: Workers | None = None,
    ) -> None:
        self.model, self.config, self.total_steps = model, config, total_steps
        self.workers = workers or OneWorker()
        self.labelling = labelling
        self.step_count = 0
        self.shared_steps = round(total_steps * config.train.warm_start.shared_epochs / config.train.epochs)
        self.routing = config.train.routing(config.routing)
        parts: list[tuple[nn.Module, float]] = [
            (model.clients.experts, 1.0),
            (model.query, config.train.query_lr_factor),
        ]
        parts += [(part, 1.0) for part in (model.shared, model.refiner, model.gate) if part is not None]
        self.adam, self.sgd = optimizers(parts, model.clients.frl, config)
        set_precision(model.clients.experts, config.train.precision)

    def begin(self) -> None:
        """Everything is in this process already."""

    def close(self) -> None:
        """Nothing to end."""

    def warm_start(self, source: Source, data: Sequence[Indices]) -> None:
        """What clients bring along, each from its own D_j."""
        warm_start(self.model, source, data, self.config, self.labelling)

    def account(self) -> dict[str, Any]:
        """Nothing crosses any link in one process."""
        return {}

    def step(self, batch: Batch) -> StepResult:
        """Forward through the channel, loss, backward, optimizers, then renewal of the FRLs.

        Renewal comes last: done in place before `backward`, it would corrupt the graph.
        """
        if not self.model.training:  # walking over all modules takes a percent of a small step
            self.model.train()
        if self.step_count < self.shared_steps:
            return self._shared_step(batch)
        output = self.model(
            batch.features_BDhw,
            batch.ids_B,
            fine=batch.fine,
            routing_config=self.routing,
            domains_B=batch.domains_B,
        )
        if self.config.train.check_constraints:
            check_constraints(output, self.config.model_copy(update={"routing": self.routing}))
        loss = objective(
            output,
            batch.labels_BHW,
            self.model.clients.frl,
            config=self.config,
            labelling=self.labelling,
            workers=self.workers,
        )
        self._descend(loss)
        self.model.clients.frl.project()
        output.round.renew(self.workers)
        routing = output.routing
        return StepResult(self._whole(loss), routing.selected_BK, routing.active_BK)

    def _shared_step(self, batch: Batch) -> StepResult:
        """One expert learns for all; `end_epoch` hands it out."""
        common: dict[str, Any] = {
            "config": self.config,
            "labelling": self.labelling,
            "workers": self.workers,
        }
        if self.model.shared is not None:
            loss = head_objective(self.model.shared, batch.features_BDhw, batch.labels_BHW, **common)
        else:
            with torch.no_grad():
                query_dist_Bd = self.model.query(batch.features_BDhw)
            first = cast(Expert, self.model.clients.experts[0])
            loss = solo_objective(first, query_dist_Bd, batch.features_BDhw, batch.labels_BHW, **common)
        self._descend(loss)
        nobody_BK = torch.empty(0, dtype=torch.int64, device=batch.features_BDhw.device)
        return StepResult(self._whole(loss), nobody_BK, torch.ones(len(batch.ids_B), 1, dtype=torch.bool))

    def _descend(self, loss: LossTerms) -> None:
        forget_gradients(self.adam, self.sgd)
        self.workers.backward(loss.total, self.model.parameters())
        if self.config.train.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.grad_clip)
        descend(self.adam, self.sgd, rate=learning_rate(self.step_count, self.total_steps, self.config.train))
        self.step_count += 1

    @torch.no_grad()
    def end_epoch(self) -> None:
        """After an epoch in which one head learned for all, every client gets its copy, a faint one of the cloud's.

        Adam starts afresh with the first routed step: an expert's gradient is then that of its own few samples, and
        second moments of whole batches would hold it back for a thousand steps.
        """
        if not self.shared_steps or self.step_count > self.shared_steps:
            return
        if self.model.shared is not None:
            for expert in self.model.clients.experts:
                # not strict: psi, which the cloud's head lacks, stays as it is
                expert.load_state_dict(self.model.shared.faint_copy(self.config.experts.shared_start), strict=False)
            return
        first, *others = self.model.clients.experts
        for other in others:
            for source, target in zip(first.parameters(), other.parameters(), strict=True):
                target.copy_(source)
        if self.step_count == self.shared_steps:
            for parameter in first.parameters():
                del self.adam.state[parameter]

    def state(self, *, epoch: int) -> TrainerState:
        """Moments of Adam by parameter name; SGD without momentum has none."""
        return TrainerState(epoch=epoch, step=self.step_count, optimizer=stored_moments(self.model, self.adam))

    def restore(self, state: TrainerState) -> None:
        """Continue where `state` was taken."""
        self.step_count = state.step
        restore_moments(self.model, self.adam, state.optimizer)

    def _whole(self, loss: LossTerms) -> LossTerms:
        """The terms of the whole batch: parts add up, but for the load balance, which everybody has whole."""
        parts = torch.stack([loss.ce, loss.frl, loss.align, loss.shared, loss.iou]).detach()
        ce, frl, align, shared, iou = self.workers.total(parts)
        return LossTerms(ce, ce, loss.lb.detach(), frl, align, shared, iou).weighed(self.config.train)

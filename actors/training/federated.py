"""Federated training: the cloud learns its query, every client learns in its own host, and only small numbers cross.

One step is the same as `airmoe_ray.training.trainer.Trainer.step` on the same batch, whoever is present.
Suffixes: B inputs, N clients, K routed, d statistic, D features, C classes, h w grid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from ray.actor import ActorClass
from ray.exceptions import RayError
from torch import Tensor, nn

from actors.errors import ClusterError, last_line
from actors.rounds.backward_messages import Learned
from actors.rounds.backward_round import FederatedClients, FederatedRound
from actors.rounds.calls import Ref, ready
from actors.rounds.patience import Patience
from actors.rounds.ray_clients import Begun, RecordingClients
from actors.rounds.replies import Overdue
from actors.rounds.roster import Roster
from actors.training.client_pool import ClientPool, Files
from actors.training.feature_pool import build_features
from airmoe_ray.config import Config
from airmoe_ray.features.sources import Source
from airmoe_ray.model.moe import AirMoE, collaborate
from airmoe_ray.model.seam import Clients
from airmoe_ray.radio.ledger import BITS_PER_REAL, Traffic, raw_feature_bits
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.storage.checkpoint import ModelCard, TrainerState, expert_tensors, load_client, parse_tensors, serialise
from airmoe_ray.storage.remote_run import RemoteRun
from airmoe_ray.storage.staged_run import train_staged
from airmoe_ray.training.optimizers import (
    descend,
    forget_gradients,
    learning_rate,
    optimizers,
    restore_moments,
    stored_moments,
)
from airmoe_ray.training.pixel_losses import PLAIN, Labelling
from airmoe_ray.training.run import train_run
from airmoe_ray.training.split_backward import clip_together, cloud_gradients, loss_terms, report_gradients
from airmoe_ray.training.trainer import Batch, StepResult
from airmoe_ray.training.warm_start import Indices, fitted_queries, own_data, pooled_features

T = TypeVar("T")
_EXPERT = "clients.experts."


class FederatedTrainer:
    """The cloud's side, with the interface of `Trainer`; `model` keeps the clients' files as of the last `state`."""

    def __init__(
        self,
        model: AirMoE,
        config: Config,
        card: ModelCard,
        *,
        total_steps: int,
        labelling: Labelling = PLAIN,
        report: Reporter,
        **actors: ActorClass[Any],
    ) -> None:
        self.model, self.config, self.card, self.total_steps = model, config, card, total_steps
        self.labelling, self.report, self.workers = labelling, report, OneWorker()
        self.step_count = 0
        parts = model.cloud._asdict().items()
        self.cloud = nn.ModuleDict({name: part for name, part in parts if part is not None})
        factors = {"query": config.train.query_lr_factor}
        self.adam, _ = optimizers([(part, factors.get(name, 1.0)) for name, part in self.cloud.items()], None, config)
        self.traffic = Traffic()
        self._pool: ClientPool | None = None
        self._actors = actors  # in place of `LearningActor` and `ChannelActor`

    def begin(self) -> None:
        """Start every client with its own part of the model, and wait until all of them answer."""
        self._start({})

    def _start(self, moments: dict[str, Tensor]) -> None:
        files: Files = {}
        for j in range(self.config.experts.count):
            mine = {k.removeprefix(f"{_EXPERT}{j}."): v for k, v in moments.items() if _is_of(k, j)}
            files[j] = (serialise(expert_tensors(self.model.clients, j)), serialise(mine))
        self._pool = ClientPool(self.config, self.card, files, self.report, **self._actors)
        self.clients = FederatedClients(
            self.pool.roster(),
            classes=len(self.card.classes),
            overdue=self._overdue(),
            traffic=self.traffic,
        )

    def _overdue(self) -> Overdue:
        """Every client has the same time: a slow one is to learn as well."""
        deadline_s = self.config.train.client_deadline_s
        return Overdue(Patience(deadline_s, slack_s=deadline_s))

    def close(self) -> None:
        """End the clients' actors."""
        if self._pool is not None:
            self._pool.close()

    def warm_start(self, source: Source, data: Sequence[Indices]) -> None:
        """Each client gets the features of its own D_j once, has its labels, and learns alone."""
        query_dist_Sd = fitted_queries(self.model.query, pooled_features(source), self.config)
        calls: list[Ref[None]] = []
        for j, indices in enumerate(data):
            own = own_data(source, query_dist_Sd, indices, self.config)
            for arrays in (own.features, own.query_dists):
                self.traffic.warm_start_bits += BITS_PER_REAL * sum(array.size for array in arrays)
            calls.append(self.pool.host_of(j).warm_start(j, own, self.labelling.to("cpu")))
        bar = self.report.progress("warm start")
        while calls:
            (done,) = ready(calls)
            calls.remove(done)
            try:
                done.get()
            except RayError as error:
                raise ClusterError(f"a client was lost in its warm start ({last_line(error)}); start again") from None
            bar(len(data) - len(calls), len(data))
        self.report.line(f"warm start: {self.traffic.warm_start_bits / 8e6:.2f} MB down, once")
        self.pool.archive()  # so that a client lost before the first checkpoint does not lose this

    def step(self, batch: Batch) -> StepResult:
        """Forward through the air, the two exchanges back, every client's own step, the query's step."""

        def step(roster: Roster) -> StepResult:
            self.clients.follow(roster)
            with _half_the_threads():
                return self._step(batch)

        return self.pool.attempt(step, learning=True)

    def ask_clients(self, ask: Callable[[Clients[Any]], T]) -> T:
        """What `ask` finds with the clients present; nobody learns."""

        def attempt(roster: Roster) -> T:
            clients = RecordingClients(roster, classes=len(self.card.classes), overdue=self._overdue())
            found = ask(clients)
            self.pool.leave_out(clients.faults)
            return found

        return self.pool.attempt(attempt, learning=False)

    def _step(self, batch: Batch) -> StepResult:
        config = self.config
        round_ = self.clients.begin(batch.ids_B, config.channel)
        shared = round_.overlapped(self.model.shared, batch.features_BDhw)
        output = collaborate(
            self.model.query(batch.features_BDhw),
            batch.features_BDhw,
            batch.ids_B,
            Begun(round_),
            routing_config=config.train.routing(config.routing),
            channel=config.channel,
            seed=config.seed,
            shared=shared,
        )
        routing = output.routing
        own = cloud_gradients(
            output,
            round_.stat_BNd,
            batch.labels_BHW,
            config=config,
            labelling=self.labelling,
            refine=self.model.cloud.refine(batch.fine),
        )
        agreement_BK = round_.weigh(own.logits_BChw)
        report = report_gradients(agreement_BK, output, round_.scale_limit_BK, own.logits_BChw, config)
        heard = int(routing.active_BK.sum())
        rate = learning_rate(self.step_count, self.total_steps, config.train)
        forget_gradients(self.adam, None)
        learned = round_.learn(
            own.stat_BNd,
            report,
            align_share=config.train.lambda_align / heard,
            learning_rate=None if config.train.grad_clip else rate,
            own_work=own.loss.backward if own.loss.requires_grad else lambda: None,
        )
        query_grad_Bd = own.query_Bd + sum(torch.from_numpy(x.query_grad_Bd).to(own.query_Bd) for x in learned.values())
        output.query_dist_Bd.backward(query_grad_Bd)
        self._descend(round_, learned, rate)
        self.traffic.images += len(batch.ids_B)
        cells = batch.features_BDhw[:, 0].numel()
        self.traffic.raw_feature_bits += raw_feature_bits(config, cells, clients=config.experts.count)
        self.clients.finished.append(round_.id)
        self.pool.leave_out(round_.faults)
        terms = loss_terms(own, output, sum(x.frl_term for x in learned.values()), config)
        return StepResult(terms, routing.selected_BK, routing.active_BK)

    def _descend(self, round_: FederatedRound, learned: Mapping[str, Learned], rate: float) -> None:
        """The cloud's step; with `grad_clip` also the clients', who wait for the scale that all gradients share."""
        if self.config.train.grad_clip:
            grads = [p.grad for p in self.cloud.parameters() if p.grad is not None]
            elsewhere = sum(found.square_norm for found in learned.values())
            scale = clip_together(grads, elsewhere, limit=self.config.train.grad_clip)
            round_.descend(learned, learning_rate=rate, scale=scale)
        descend(self.adam, None, rate=rate)
        self.step_count += 1

    def end_epoch(self) -> None:
        """Clients share nothing at an epoch's end; the ledger notes what averaging their weights would have sent."""
        self.traffic.fedavg_bits += BITS_PER_REAL * sum(p.numel() for p in self.model.clients.parameters())

    def account(self) -> dict[str, Any]:
        """What a row of the log adds: bits per image so far."""
        return {"traffic": self.traffic.summary()}

    # the operator's copies, outside the protocol

    def state(self, *, epoch: int) -> TrainerState:
        """What a checkpoint needs: the moments of cloud and clients, and the clients' files into `model`."""
        moments = stored_moments(self.cloud, self.adam)
        for client, (weights, optimizer) in self.pool.archive().items():
            load_client(self.model.clients, client, weights, f"expert {client}")
            stored = parse_tensors(optimizer, f"optimizer of expert {client}")
            moments |= {f"{_EXPERT}{client}.{name}": value for name, value in stored.items()}
        return TrainerState(epoch=epoch, step=self.step_count, optimizer=moments, traffic=self.traffic.stored())

    def restore(self, state: TrainerState) -> None:
        """Start the clients where `state` was taken; `model` holds the weights of all."""
        self.step_count, self.traffic = state.step, Traffic.from_stored(state.traffic)
        restore_moments(self.cloud, self.adam, {k: v for k, v in state.optimizer.items() if not k.startswith(_EXPERT)})
        self._start(state.optimizer)

    @property
    def pool(self) -> ClientPool:
        """The clients, once `begin` or `restore` has started them."""
        assert self._pool is not None, "begin first"
        return self._pool


def train_federated(
    config: Config, run: Path | RemoteRun, *, resume: bool, report: Reporter, **actors: ActorClass[Any]
) -> dict[str, Any]:
    """Train on the connected cluster, one actor per client, the cloud in this process; the summary of `train_run`.

    `check_run` has been called before.
    """

    def federation(model: AirMoE, card: ModelCard, total_steps: int, labelling: Labelling) -> FederatedTrainer:
        return FederatedTrainer(
            model, config, card, total_steps=total_steps, labelling=labelling, report=report, **actors
        )

    def train(folder: Path, after_epoch: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        more: dict[str, Any] = {"federation": federation, "after_epoch": after_epoch}
        return train_run(config, folder, resume=resume, report=report, checked=True, **more)

    build_features(config, run if isinstance(run, Path) else None, report)
    return train_staged(run, train, resume=resume)


@contextmanager
def _half_the_threads() -> Iterator[None]:
    """Leave the other cores to clients on this machine: threads that find none free wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads // 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _is_of(name: str, client: int) -> bool:
    return name.startswith(f"{_EXPERT}{client}.")

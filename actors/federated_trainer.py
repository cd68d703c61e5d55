"""Federated training: the cloud learns its query, every client learns at home, and only small numbers cross.

One step is the same as `airmoe_ray.training.Trainer.step` on the same batch, whoever is present.
Suffixes: B inputs, N clients, K routed, d statistic, D features, C classes, h w grid.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor, nn

from actors.clients import Begun
from actors.errors import ChannelLostError, ClusterError, NoExpertsError, last_line
from actors.features import build_features
from actors.federated import AnsweringClients, FederatedClients
from actors.participants import NOT_FINITE, Files, Participants
from actors.policy import Fault
from actors.roster import Roster
from airmoe_ray.checkpoint import ModelCard, TrainerState, expert_tensors, load_client, parse_tensors, serialise
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.federated import CloudGradients, cloud_gradients, report_gradients
from airmoe_ray.ledger import BITS_PER_REAL, Traffic
from airmoe_ray.losses import LossTerms
from airmoe_ray.moe import AirMoE, AirMoEOutput, Clients, collaborate
from airmoe_ray.optimizers import learning_rate_factor, optimizers, restore_moments, stored_moments
from airmoe_ray.reporter import Reporter
from airmoe_ray.run import train_run
from airmoe_ray.sources import Source
from airmoe_ray.training import Batch, StepResult
from airmoe_ray.warm_start import Indices, fitted_queries, own_data, pooled_features
from airmoe_ray.world import Alone

T = TypeVar("T")
_TRIES = 5  # of one step
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
        class_weight_C: Tensor | None = None,
        report: Reporter,
        **actors: Any,
    ) -> None:
        self.model, self.config, self.card, self.total_steps = model, config, card, total_steps
        self.class_weight_C, self.report, self.world = class_weight_C, report, Alone()
        self.step_count = 0
        self.cloud = nn.ModuleDict({"query": model.query} | ({"shared": model.shared} if model.shared else {}))
        factors = {"query": config.train.query_lr_factor, "shared": 1.0}
        self.adam, _ = optimizers([(part, factors[name]) for name, part in self.cloud.items()], None, config)
        self.traffic = Traffic()
        self.participants: Participants | None = None
        self._actors = actors  # classes other than the usual ones

    def begin(self) -> None:
        """Hand every client its own part, and wait until all of them are there."""
        self._start({})

    def _start(self, moments: dict[str, Tensor]) -> None:
        files: Files = {}
        for j in range(self.config.experts.count):
            mine = {k.removeprefix(f"{_EXPERT}{j}."): v for k, v in moments.items() if _is_of(k, j)}
            files[j] = (serialise(expert_tensors(self.model.clients, j)), serialise(mine))
        self.participants = Participants(self.config, self.card, files, self.report, **self._actors)
        self.clients = FederatedClients(
            self.participants.roster(),
            classes=len(self.card.classes),
            call_s=self.config.train.client_deadline_s,
            traffic=self.traffic,
        )

    def close(self) -> None:
        """End the clients' actors."""
        if self.participants is not None:
            self.participants.close()

    def warm_start(self, source: Source, data: Sequence[Indices]) -> None:
        """Each client gets the features of its own D_j once, has its labels, and learns alone."""
        query_dist_Sd = fitted_queries(self.model.query, pooled_features(source), self.config)
        weight_C = None if self.class_weight_C is None else self.class_weight_C.cpu().numpy()
        calls = []
        for j, indices in enumerate(data):
            own = own_data(source, query_dist_Sd, indices, self.config)
            for arrays in (own.features, own.query_dists):
                self.traffic.warm_start_bits += BITS_PER_REAL * sum(array.size for array in arrays)
            calls.append(self._everybody.host_of(j).handle.warm_start.remote(j, own, weight_C))
        bar = self.report.progress("warm start")
        while calls:
            done, calls = ray.wait(calls)
            try:
                ray.get(done)
            except RayError as error:
                raise ClusterError(f"a client was lost in its warm start ({last_line(error)}); start again") from None
            bar(len(data) - len(calls), len(data))
        self.report.line(f"warm start: {self.traffic.warm_start_bits / 8e6:.2f} MB down, once")
        self._everybody.archive()  # so that one who is lost before the first checkpoint has learned this

    def step(self, batch: Batch) -> StepResult:
        """Forward through the air, the two exchanges back, every client's own step, the query's step."""

        def step(roster: Roster) -> StepResult:
            self.clients.roster = roster
            with _half_the_threads():
                return self._step(batch)

        return self._patiently(step, learning=True)

    def answer(self, ask: Callable[[Clients[Any]], T]) -> T:
        """What `ask` finds with the clients present; nobody learns."""

        def attempt(roster: Roster) -> T:
            clients = AnsweringClients(
                roster, classes=len(self.card.classes), call_s=self.config.train.client_deadline_s
            )
            found = ask(clients)
            self._everybody.miss(clients.faults)
            return found

        return self._patiently(attempt, learning=False)

    def _patiently(self, work: Callable[[Roster], T], *, learning: bool) -> T:
        """`work` with whoever is there, again where it was left without clients or channel."""
        faults: dict[str, Fault] = {}
        for _ in range(_TRIES):
            self._everybody.set_learning(learning)
            try:
                return work(self._everybody.roster())
            except NoExpertsError as error:
                faults = error.faults
                self._everybody.miss(faults)
                self._everybody.wait_for_someone()
            except ChannelLostError:
                self._everybody.await_channel()
        if set(faults.values()) == {Fault.INVALID}:
            raise UserError(NOT_FINITE)
        raise ClusterError(f"a step failed {_TRIES} times in a row, clients come and go too fast; go on with --resume")

    def _step(self, batch: Batch) -> StepResult:
        config = self.config
        round_ = self.clients.begin(batch.ids_B, config.channel)
        own_head = round_.meanwhile(self.model.shared, batch.features_BDhw)
        output = collaborate(
            self.model.query(batch.features_BDhw),
            batch.features_BDhw,
            batch.ids_B,
            Begun(round_),
            routing_config=config.train.routing(config.routing),
            channel=config.channel,
            seed=config.seed,
            shared=own_head,
        )
        routing = output.routing
        own = cloud_gradients(
            output, round_.stat_BNd, batch.labels_BHW, config=config, class_weight_C=self.class_weight_C
        )
        agreement_BK = round_.weigh(own.logits_BChw)
        report = report_gradients(agreement_BK, output, round_.capacity_BK, own.logits_BChw, config)
        heard = int(routing.active_BK.sum())
        rate = config.train.lr * learning_rate_factor(self.step_count, self.total_steps, config.train)
        self.adam.zero_grad(set_to_none=True)
        learned = round_.learn(
            own.stat_BNd,
            report,
            align_share=config.train.lambda_align / heard,
            learning_rate=None if config.train.grad_clip else rate,
            aside=own.loss.backward if self.model.shared is not None else lambda: None,
        )
        query_grad_Bd = own.query_Bd + sum(torch.from_numpy(x.query_grad_Bd).to(own.query_Bd) for x in learned.values())
        output.query_dist_Bd.backward(query_grad_Bd)
        if config.train.grad_clip:
            scale = self._clip(sum(x.square_norm for x in learned.values()))
            round_.descend(learned, learning_rate=rate, scale=scale)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["factor"]
        self.adam.step()
        self.step_count += 1
        self.traffic.images += len(batch.ids_B)
        hidden = config.experts.count * config.experts.hidden * batch.features_BDhw[:, 0].numel()
        self.traffic.raw_feature_bits += BITS_PER_REAL * hidden
        self.clients.finished.append(round_.name)
        self._everybody.miss(round_.faults)
        terms = self._terms(own, output, sum(x.frl_term for x in learned.values()))
        return StepResult(terms, routing.selected_BK, routing.active_BK)

    def _clip(self, square_norm: float) -> float:
        """Scale of all gradients that keeps their common norm within `grad_clip`; the query's are scaled here."""
        grads = [p.grad for p in self.cloud.parameters() if p.grad is not None]
        total = (square_norm + float(sum(grad.square().sum() for grad in grads))) ** 0.5
        scale = min(1.0, self.config.train.grad_clip / (total + 1e-6))
        for grad in grads:
            grad.mul_(scale)
        return scale

    def _terms(self, own: CloudGradients, output: AirMoEOutput[Any], frl_term: float) -> LossTerms:
        active_BK = output.routing.active_BK
        align = output.delta_BK.masked_fill(~active_BK, 0.0).sum() / active_BK.sum()
        frl = own.ce.new_tensor(frl_term)
        return LossTerms(own.ce, own.ce, own.lb, frl, align, own.shared).weighed(self.config.train)

    def end_epoch(self) -> None:
        """Nothing is handed out, there is no common expert; the ledger notes what averaging weights would have sent."""
        self.traffic.fedavg_bits += BITS_PER_REAL * sum(p.numel() for p in self.model.clients.parameters())

    def account(self) -> dict[str, Any]:
        """Bits per image so far."""
        return {"traffic": self.traffic.summary()}

    # the operator's copies, outside the protocol

    def state(self, *, epoch: int) -> TrainerState:
        """Everybody's moments, and the clients' files into `model`: what a checkpoint needs."""
        moments = stored_moments(self.cloud, self.adam)
        for client, (weights, optimizer) in self._everybody.archive().items():
            load_client(self.model.clients, client, weights, f"expert {client}")
            stored = parse_tensors(optimizer, f"optimizer of expert {client}")
            moments |= {f"{_EXPERT}{client}.{name}": value for name, value in stored.items()}
        return TrainerState(epoch=epoch, step=self.step_count, optimizer=moments, traffic=self.traffic.stored())

    def restore(self, state: TrainerState) -> None:
        """Start the clients where `state` was taken; `model` holds everybody's weights."""
        self.step_count, self.traffic = state.step, Traffic.from_stored(state.traffic)
        restore_moments(self.cloud, self.adam, {k: v for k, v in state.optimizer.items() if not k.startswith(_EXPERT)})
        self._start(state.optimizer)

    @property
    def _everybody(self) -> Participants:
        assert self.participants is not None, "begin first"
        return self.participants


def train_federated(config: Config, folder: Path, *, resume: bool, report: Reporter, **actors: Any) -> dict[str, Any]:
    """Train on the connected cluster, one actor per client, the cloud in this process; the summary of `train_run`."""

    def federation(model: AirMoE, card: ModelCard, total_steps: int, class_weight_C: Tensor | None) -> FederatedTrainer:
        return FederatedTrainer(
            model, config, card, total_steps=total_steps, class_weight_C=class_weight_C, report=report, **actors
        )

    build_features(config, folder, report)
    return train_run(config, folder, resume=resume, report=report, federation=federation)


@contextmanager
def _half_the_threads() -> Iterator[None]:
    """The other cores are for clients that live here: threads that find none free wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads // 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _is_of(name: str, client: int) -> bool:
    return name.startswith(f"{_EXPERT}{client}.")

"""The clients of federated training: started, left out while they do not answer, and taken back when they do."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ray.actor import ActorClass
from ray.exceptions import RayError

from actors.cluster.connection import nodes
from actors.cluster.placement import HostPlan, Plan, plan
from actors.cluster.reservation import PIN_SHARE
from actors.errors import ChannelLostError, ClusterError, Fault, NoExpertsError
from actors.processes.channel import ChannelActor
from actors.processes.learning_host import LearningActor
from actors.rounds.backward_messages import ClientFiles
from actors.rounds.calls import Pinned, Ref, fault_of, ready
from actors.rounds.messages import HostSpec, HostState
from actors.rounds.roster import Host, Roster, span
from actors.rounds.stubs import ChannelCalls, LearningHostCalls
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.runtime.progress import Reporter
from airmoe_ray.storage.checkpoint import ModelCard

T = TypeVar("T")
Files = dict[int, ClientFiles]  # of each client
NOT_FINITE = "the clients' outputs are not finite any more; lower train.lr or set train.grad_clip"
_POLL_S = 0.2
_TRIES = 5  # of one step


class ClientPool:
    """One host per client (or for several clients), and the channel between them and the cloud."""

    def __init__(
        self,
        config: Config,
        card: ModelCard,
        files: Files,
        report: Reporter,
        *,
        learner: ActorClass[Any] = LearningActor,
        channel: ActorClass[Any] = ChannelActor,
    ) -> None:
        self.config, self.card, self.report, self.archived = config, card, report, files
        shares = plan(config.cluster, config.experts.count, nodes())
        self.channel = ChannelCalls.start(channel.options(**self._options(shares)), config.seed)
        self.calls: dict[str, LearningHostCalls] = {}
        self.hosts: dict[str, Host] = {}
        for host in shares.hosts:
            self._start(host, learner, shares)
        self.learning = True
        self.pids: dict[str, int] = {}  # processes of hosts when they were last taken in
        self.absent: dict[str, Fault] = dict.fromkeys(self.hosts, Fault.LOST)
        self._probes = {calls.probe(): key for key, calls in self.calls.items()}
        self._await_all()

    def _options(self, shares: Plan, host: HostPlan | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": shares.cpus, "max_restarts": -1, "max_task_retries": 0}
        if self.config.cluster.placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        if host is not None:
            options["num_gpus"] = shares.gpus_per_expert
        if host is not None and host.pin:
            options["resources"] = {host.pin: PIN_SHARE}
        return options

    def _start(self, host: HostPlan, learner: ActorClass[Any], shares: Plan) -> None:
        weights = [Pinned.put(self.archived[client][0]) for client in host.clients]
        actor, key = learner.options(**self._options(shares, host)), span(host.clients)
        self.calls[key] = LearningHostCalls.start(actor, HostSpec(host.clients, self.config, self.card), weights)
        self.hosts[key] = Host(key, self.calls[key], host.clients)

    def roster(self) -> Roster:
        """Who takes part now; hosts that were absent and answer again are taken back first."""
        self._take_back(timeout_s=0.0)
        present = tuple(host for key, host in self.hosts.items() if key not in self.absent)
        missing = {client: fault for key, fault in self.absent.items() for client in self.hosts[key].clients}
        return Roster(0, self.config.experts.count, self.channel, present, missing)

    def host_of(self, client: int) -> LearningHostCalls:
        """The host of a client."""
        return next(self.calls[key] for key, host in self.hosts.items() if client in host.clients)

    def leave_out(self, faults: dict[str, Fault]) -> None:
        """Go on without hosts that did not answer, until they do."""
        for key in faults.keys() - self.absent.keys():
            self.report.line(f"{self.hosts[key].describe(faults[key].value)}; going on without")
            self._probes[self.calls[key].probe()] = key
        self.absent |= faults

    def attempt(self, work: Callable[[Roster], T], *, learning: bool) -> T:
        """Do `work` with the hosts present, again where it was left without clients or channel; what it returns."""
        faults: dict[str, Fault] = {}
        for _ in range(_TRIES):
            self.set_learning(learning)
            try:
                return work(self.roster())
            except NoExpertsError as error:
                faults = error.faults
                self.leave_out(faults)
                self.wait_for_someone()
            except ChannelLostError:
                self.await_channel()
        if set(faults.values()) == {Fault.INVALID}:
            raise UserError(NOT_FINITE)
        raise ClusterError(f"a step failed {_TRIES} times in a row, clients come and go too fast; go on with --resume")

    def wait_for_someone(self) -> None:
        """Wait until some host is back; an error when none comes, or none can."""
        if set(self.absent.values()) == {Fault.INVALID} and len(self.absent) == len(self.hosts):
            raise UserError(NOT_FINITE)  # they live, and their weights are what they are
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while len(self.absent) == len(self.hosts):
            self._take_back(timeout_s=_POLL_S)
            if time.monotonic() > until:
                raise ClusterError(
                    f"no client answered for {self.config.cluster.start_deadline_s:g} s; look for what ended them "
                    "(memory?), then continue with --resume"
                )

    def await_channel(self) -> None:
        """Wait until the channel is back; Ray starts it again."""
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while True:
            try:
                self.channel.ping().get(self.config.train.client_deadline_s)
                return
            except RayError:
                if time.monotonic() > until:
                    raise ClusterError("the channel was lost and does not come back; continue with --resume") from None
                time.sleep(_POLL_S)

    def set_learning(self, learning: bool) -> None:
        """Clients keep graphs for a way back, or only answer."""
        if learning != self.learning:
            self.learning = learning
            self.ask(lambda host: host.set_learning(learning))

    def ask(self, call: Callable[[LearningHostCalls], Ref[T]]) -> dict[str, T]:
        """The same call to every host present; one that fails is left out from now on."""
        calls = {key: call(host) for key, host in self.calls.items() if key not in self.absent}
        found, faults = {}, {}
        for key, reply in calls.items():
            try:
                found[key] = reply.get(self.config.train.client_deadline_s)
            except RayError as error:
                faults[key] = fault_of(error)
        self.leave_out(faults)
        return found

    def archive(self) -> Files:
        """Every client's files; of one that is absent, the last ones known. A client that restarts begins there."""
        for files in self.ask(LearningHostCalls.archive).values():
            self.archived |= files
        return self.archived

    def close(self) -> None:
        """End channel and hosts."""
        for calls in [self.channel, *self.calls.values()]:
            calls.end()

    # inside

    def _await_all(self) -> None:
        bar = self.report.progress("clients")
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while self.absent:
            self._take_back(timeout_s=_POLL_S)
            bar(len(self.hosts) - len(self.absent), len(self.hosts))
            if time.monotonic() > until:
                raise ClusterError(
                    f"{len(self.absent)} of {len(self.hosts)} clients did not start within "
                    f"{self.config.cluster.start_deadline_s:g} s; the machine may be short of memory or CPU, or raise "
                    "cluster.start_deadline_s"
                )

    def _take_back(self, timeout_s: float) -> None:
        """Take in every absent host whose probe has been answered."""
        for ref in ready(list(self._probes), count=len(self._probes), timeout_s=timeout_s) if self._probes else []:
            key = self._probes.pop(ref)
            try:
                self._take_in(key, ref.get())
            except RayError:  # not yet
                self._probes[self.calls[key].probe()] = key

    def _take_in(self, key: str, state: HostState) -> None:
        """Take a host back: a new process is given its clients' last archive, one that was late keeps its state."""
        calls, host, limit_s = self.calls[key], self.hosts[key], self.config.train.client_deadline_s
        is_new = calls.needs_restore().get(limit_s)
        if is_new:
            calls.restore({client: self.archived[client] for client in host.clients}).get(limit_s)
        calls.set_learning(self.learning).get(limit_s)
        del self.absent[key]
        if key in self.pids:
            self.report.line(f"{host.describe('is back')}{', from its last backup' if is_new else ''}")
        self.pids[key] = state.pid

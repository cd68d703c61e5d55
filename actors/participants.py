"""The clients that take part in federated training: started, missed when they fail, welcomed back."""

import time
from typing import Any

import ray
from ray.exceptions import RayError

from actors.channel import ChannelActor
from actors.cluster import nodes
from actors.errors import ClusterError
from actors.host import HostSpec, HostState, Pinned
from actors.learner import LearningActor
from actors.placement import plan
from actors.policy import Fault
from actors.replies import fault_of
from actors.reservation import PIN_SHARE
from actors.roster import Instance, Roster, span
from airmoe_ray.checkpoint import ModelCard
from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.reporter import Reporter

Files = dict[int, tuple[bytes, bytes]]  # weights and moments of each client
NOT_FINITE = "the clients' outputs are not finite any more; lower train.lr or set train.grad_clip"
_POLL_S = 0.2


class Participants:
    """One actor per client (or pack of clients), and the channel between them and the cloud."""

    def __init__(
        self,
        config: Config,
        card: ModelCard,
        files: Files,
        report: Reporter,
        *,
        learner: Any = LearningActor,
        channel: Any = ChannelActor,
    ) -> None:
        self.config, self.report, self.archived = config, report, files
        shares = plan(config.cluster, config.experts.count, nodes())
        options: dict[str, Any] = {"num_cpus": shares.cpus, "max_restarts": -1, "max_task_retries": 0}
        if config.cluster.placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        self.channel: Any = channel.options(**options).remote(config.seed)
        self.instances: dict[str, Instance] = {}
        for host in shares.hosts:
            pin = {"resources": {host.pin: PIN_SHARE}} if host.pin else {}
            actor = learner.options(num_gpus=shares.gpus_per_expert, **options, **pin)
            weights = [Pinned.put(files[client][0]) for client in host.clients]
            handle = actor.remote(HostSpec(host.clients, config, card), weights)
            self.instances[span(host.clients)] = Instance(span(host.clients), handle, host.clients)
        self.learning = True
        self.pids: dict[str, int] = {}  # of who has been here; processes as of then
        self.absent: dict[str, Fault] = dict.fromkeys(self.instances, Fault.LOST)
        self._probes = {i.handle.probe.remote(): key for key, i in self.instances.items()}
        self._welcome_all()

    def roster(self) -> Roster:
        """Who takes part now; those who were missing and answer again are welcomed first."""
        self._look_for_the_absent(timeout_s=0.0)
        present = tuple(i for key, i in self.instances.items() if key not in self.absent)
        missing = {c: fault for key, fault in self.absent.items() for c in self.instances[key].clients}
        return Roster(0, self.config.experts.count, self.channel, present, missing)

    def host_of(self, client: int) -> Instance:
        """Where a client lives."""
        return next(instance for instance in self.instances.values() if client in instance.clients)

    def miss(self, faults: dict[str, Fault]) -> None:
        """They did not answer: the next rounds go on without them until they do."""
        for key in faults.keys() - self.absent.keys():
            self.report.line(f"{self.instances[key].told(faults[key].value)}; going on without")
            self._probes[self.instances[key].handle.probe.remote()] = key
        self.absent |= faults

    def wait_for_someone(self) -> None:
        """Until somebody is back; an error when nobody comes, or nobody can."""
        if set(self.absent.values()) == {Fault.INVALID} and len(self.absent) == len(self.instances):
            raise UserError(NOT_FINITE)  # they live, and their weights are what they are
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while len(self.absent) == len(self.instances):
            self._look_for_the_absent(timeout_s=_POLL_S)
            if time.monotonic() > until:
                raise ClusterError(
                    f"no client answered for {self.config.cluster.start_deadline_s:g} s; look for what ended them "
                    "(memory?), then continue with --resume"
                )

    def await_channel(self) -> None:
        """Until the channel is back; Ray starts it again."""
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while True:
            try:
                ray.get(self.channel.ping.remote(), timeout=self.config.train.client_deadline_s)
                return
            except RayError:
                if time.monotonic() > until:
                    raise ClusterError("the channel was lost and does not come back; continue with --resume") from None
                time.sleep(_POLL_S)

    def set_learning(self, learning: bool) -> None:
        """Clients keep graphs, or only answer."""
        if learning != self.learning:
            self.learning = learning
            self.ask("learn_from_now_on", learning)

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same question to everybody present; who fails is missed."""
        calls = {
            key: getattr(i.handle, method).remote(*arguments)
            for key, i in self.instances.items()
            if key not in self.absent
        }
        found, faults = {}, {}
        for key, ref in calls.items():
            try:
                found[key] = ray.get(ref, timeout=self.config.train.client_deadline_s)
            except RayError as error:
                faults[key] = fault_of(error)
        self.miss(faults)
        return found

    def archive(self) -> Files:
        """Every client's files; of one that is absent, the last ones known. A client that restarts begins there."""
        for files in self.ask("archive").values():
            self.archived |= files
        return self.archived

    def close(self) -> None:
        """End all of it."""
        for handle in [self.channel, *(i.handle for i in self.instances.values())]:
            ray.kill(handle, no_restart=True)

    # inside

    def _welcome_all(self) -> None:
        bar = self.report.progress("clients")
        until = time.monotonic() + self.config.cluster.start_deadline_s
        while self.absent:
            self._look_for_the_absent(timeout_s=_POLL_S)
            bar(len(self.instances) - len(self.absent), len(self.instances))
            if time.monotonic() > until:
                raise ClusterError(
                    f"{len(self.absent)} of {len(self.instances)} clients did not start within "
                    f"{self.config.cluster.start_deadline_s:g} s; the machine may be short of memory or CPU, or raise "
                    "cluster.start_deadline_s"
                )

    def _look_for_the_absent(self, timeout_s: float) -> None:
        if not self._probes:
            return
        ready, _ = ray.wait(list(self._probes), num_returns=len(self._probes), timeout=timeout_s)
        for ref in ready:
            key = self._probes.pop(ref)
            try:
                self._welcome(key, ray.get(ref))
            except RayError:  # not yet
                self._probes[self.instances[key].handle.probe.remote()] = key

    def _welcome(self, key: str, state: HostState) -> None:
        """One that was started anew goes on from its last archive; one that was merely late knows more than that."""
        handle, patience_s = self.instances[key].handle, self.config.train.client_deadline_s
        blank = ray.get(handle.is_blank.remote(), timeout=patience_s)
        if blank:
            mine = {client: self.archived[client] for client in self.instances[key].clients}
            ray.get(handle.restore.remote(mine), timeout=patience_s)
        ray.get(handle.learn_from_now_on.remote(self.learning), timeout=patience_s)
        del self.absent[key]
        if key in self.pids:
            how = ", from its last backup" if blank else ""
            self.report.line(f"{self.instances[key].told('is back')}{how}")
        self.pids[key] = state.pid

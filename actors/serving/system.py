"""The actors of one served run: starts them together, replaces, adds and removes them, and ends them all."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.autoscaler import most_gpus
from actors.cluster.connection import nodes
from actors.cluster.placement import CPUS_JOINING, HostPlan, no_room, wanted_plan
from actors.cluster.reservation import PIN_SHARE, reserve
from actors.errors import ClusterError, last_line
from actors.processes.channel import ChannelActor
from actors.processes.cloud import CloudActor
from actors.processes.expert_host import ExpertActor
from actors.processes.frl_journal import only_server
from actors.rounds.calls import Pinned, Ref, ready
from actors.rounds.messages import CloudSpec, HostSpec, HostState
from actors.rounds.roster import Host, span
from actors.rounds.stubs import ActorCalls, ChannelCalls, CloudCalls, HostCalls
from airmoe_ray.config import Config
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.features.backbone import weights_file
from airmoe_ray.radio.ledger import check_budget
from airmoe_ray.storage.checkpoint import expert_file, load_checkpoint, parse_tensors, read_file

log = logging.getLogger("airmoe")
Progress = Callable[[int, int], None]
# restarts yes, silent retries no: policy decides
_FOREVER: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}


class System:
    """Cloud, channel and hosts of a checkpoint, and how to make more."""

    cloud: CloudCalls
    channel: ChannelCalls

    def __init__(
        self,
        checkpoint: Path,
        config: Config,
        *,
        state: Path | None = None,
        expert_actor: ActorClass[Any] = ExpertActor,
        cloud_actor: ActorClass[Any] = CloudActor,
    ) -> None:
        self.checkpoint, self.config = checkpoint, config
        self.state = checkpoint.parent / "state" if state is None else state  # for what it writes itself
        self.expert_actor, self.cloud_actor = expert_actor, cloud_actor
        stored, self.card = load_checkpoint(checkpoint)
        check_budget(config)
        trained, asked = stored.experts.count, config.experts.count
        if asked > trained and not expert_file(checkpoint, asked - 1).exists():
            raise CheckpointError(
                f"{checkpoint}: holds {trained} experts, the configuration asks for {asked}; leave experts.count alone"
            )
        self._cloud_file = read_file(checkpoint / "cloud.safetensors")
        for client in range(asked):
            self.file_of(client)
        self._backbone_file = weights_file(config.backbone)
        self._pinned: dict[int, Pinned] = {}
        self._pinned_backbone: Pinned | None = None
        self._group: PlacementGroup | None = None
        self._made = 0
        self._places: dict[str, tuple[HostPlan, int | None]] = {}  # clients and bundle of each host, by its key
        self._lock: IO[bytes] | None = None

    def start(self, progress: Progress | None = None, *, wait_s: float = 0.0) -> dict[str, tuple[Host, HostState]]:
        """Create every actor at once and wait until each answers; hosts and their states by key.

        On a cluster that may grow, `wait_s` is the time for it to do so.
        """
        cluster = self.config.cluster
        self.plan = wanted_plan(cluster, self.config.experts.count, nodes(), grows=wait_s > 0)
        if cluster.experts_per_actor == "auto":
            log.info("%s", self.plan.packing)
        self._group = reserve(self.plan, cluster, wait_s=wait_s)
        if self.config.serve.renew_frl:
            self._lock = only_server(self._frl_folder, self._cloud_file)
        self.cloud = self._make_cloud()
        self.channel = ChannelCalls.start(self._placed(ChannelActor, 1), self.config.seed)
        hosts = [self.make_host(host, bundle=bundle) for bundle, host in enumerate(self.plan.hosts, start=2)]
        states, cloud = {host.key: host.calls.probe() for host in hosts}, self.cloud.state()
        first_answers: dict[str, Ref[Any]] = {**states, "cloud": cloud, "channel": self.channel.ping()}
        _await_all(first_answers, cluster.start_deadline_s, progress)
        self.pad_multiple = cloud.get().pad_multiple
        return {host.key: (host, states[host.key].get()) for host in hosts}

    def make_host(self, host: HostPlan, *, bundle: int | None = None, replica: bool = False) -> Host:
        """A new host for some clients; it starts in the background."""
        journal = str(self._frl_folder) if self.config.serve.renew_frl else None
        spec = HostSpec(host.clients, self.config, self.card, journal, replica)
        labels = self.config.cluster.labels.get("expert")
        gpus = self.plan.gpus_per_expert
        actor = self._placed(self.expert_actor, bundle, gpus=gpus, pin=host.pin, labels=labels)
        calls = HostCalls.start(actor, spec, [self.fetch(client) for client in host.clients])
        self._made += 1
        key = f"{span(host.clients)}/{self._made}"
        self._places[key] = (host, bundle)
        return Host(key, calls, host.clients, owner=not replica)

    def remove_host(self, host: Host) -> None:
        """End a host for good."""
        self._places.pop(host.key, None)
        host.calls.end()

    def remake_host(self, host: Host) -> Host:
        """Another actor in the place of one whose constructor failed: such a one Ray does not start again."""
        plan, bundle = self._places[host.key]
        self.remove_host(host)
        return self.make_host(plan, bundle=bundle, replica=not host.owner)

    def remake_cloud(self, dead: CloudCalls) -> None:
        """Another cloud in the place of one whose constructor failed; once, however many requests were lost with it."""
        if self.cloud is dead:
            dead.end()
            self.cloud = self._make_cloud()

    def _make_cloud(self) -> CloudCalls:
        threads = self.config.serve.in_flight + 2  # and one for the readiness check, one for rosters
        actor = self._placed(self.cloud_actor, 0, gpus=self.plan.gpus_per_cloud, threads=threads)
        if self._backbone_file is not None and self._pinned_backbone is None:
            self._pinned_backbone = Pinned.put(self._backbone_file)
        return CloudCalls.start(actor, CloudSpec(self.config, self.card), self._cloud_file, self._pinned_backbone)

    @property
    def _frl_folder(self) -> Path:
        """Where clients keep what they renew."""
        storage = self.config.cluster.storage
        return ((Path(storage) if storage else self.state) / "frl").resolve()

    def stop(self) -> None:
        """End cloud, channel and the reservation; hosts are ended one by one (`remove_host`)."""
        started: list[ActorCalls | None] = [getattr(self, "cloud", None), getattr(self, "channel", None)]
        for calls in started:
            if calls is not None:
                calls.end()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._lock is not None:
            self._lock.close()

    def file_of(self, client: int) -> bytes:
        """A client's checkpoint file, also of one that was added after the start."""
        path = expert_file(self.checkpoint, client)
        content = read_file(path)
        parse_tensors(content, str(path))  # a damaged file is refused here, by its name
        return content

    def fetch(self, client: int) -> Pinned:
        """A client's file in the object store, where hosts find it."""
        if client not in self._pinned:
            self._pinned[client] = Pinned.put(self.file_of(client))
        return self._pinned[client]

    def check_room(self, hosts: Sequence[HostPlan]) -> None:
        """Say at once where hosts would wait for room in vain; within its reach, an autoscaler is left to make it."""
        if lacking := no_room(self.plan, hosts, nodes()):
            most = most_gpus()
            wanted = self.plan.gpus_per_cloud + self.plan.gpus_per_expert * (len(self._places) + len(hosts))
            if most is None or wanted > most:
                raise ClusterError(lacking)

    def _placed(
        self,
        actor: ActorClass[Any],
        bundle: int | None,
        *,
        gpus: float = 0.0,
        threads: int = 1,
        pin: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> ActorClass[Any]:
        """The actor class with its resources and its place."""
        cpus = self.plan.cpus if bundle is not None else min(self.plan.cpus, CPUS_JOINING)
        options: dict[str, Any] = {**_FOREVER, "num_cpus": cpus, "num_gpus": gpus, "max_concurrency": threads}
        if pin is not None:
            options["resources"] = {pin: PIN_SHARE}
        if bundle is None and labels:
            options["label_selector"] = labels
        if bundle is not None and self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        elif self.config.cluster.placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        return actor.options(**options)


def _await_all(answers: dict[str, Ref[Any]], deadline_s: float, progress: Progress | None) -> None:
    """Wait for the first answers of new actors, by name; a constructor's own error is passed on as it is."""
    until = time.monotonic() + deadline_s
    pending, total = {ref: name for name, ref in answers.items()}, len(answers)
    while pending:
        for ref in ready(list(pending), timeout_s=0.5):
            name = _name(pending.pop(ref))
            try:
                ref.get()
            except RayActorError as error:
                raise ClusterError(f"{name} could not start: {_cause(error)}") from None
            except (RayError, GetTimeoutError) as error:
                raise ClusterError(f"{name} failed its first probe: {last_line(error)}") from None
        if progress is not None:
            progress(total - len(pending), total)
        if pending and time.monotonic() > until:
            late = ", ".join(_name(name) for name in list(pending.values())[:5])
            raise ClusterError(
                f"{len(pending)} of {total} actors did not start within {deadline_s:g} s ({late}); the machine may be "
                "short of memory or CPU, or raise cluster.start_deadline_s"
            )


def _name(key: str) -> str:
    """An actor's name for people; the key of a host is `clients/number`."""
    clients, _, number = key.partition("/")
    return f"expert{'' if clients.isdigit() else 's'} {clients}" if number else key


def _cause(error: RayActorError) -> str:
    """The last line of a constructor's traceback, without the exception's class where it is one of ours."""
    line = last_line(error)
    name, _, message = line.partition(": ")
    ours = {"UserError", *(cls.__name__ for cls in UserError.__subclasses__())}
    return message if name.rpartition(".")[2] in ours else line

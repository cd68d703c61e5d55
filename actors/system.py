"""The actors of one served run: created together, replaced, added, removed, and all gone at the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.channel import ChannelActor
from actors.cloud import CloudActor, CloudSpec
from actors.cluster import nodes
from actors.errors import ClusterError, last_line
from actors.expert import ExpertActor
from actors.host import HostSpec, HostState, Pinned
from actors.journal import only_server
from actors.placement import Pack, wish
from actors.reservation import PIN_SHARE, reserve
from actors.roster import Instance, span
from airmoe_ray.checkpoint import expert_file, load_checkpoint, parse_tensors, read_file
from airmoe_ray.config import Config
from airmoe_ray.errors import CheckpointError, UserError
from airmoe_ray.ledger import check_budget

Progress = Callable[[int, int], None]
# restarts yes, silent retries no: policy decides
_FOREVER: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0}


class System:
    """Handles of cloud, channel and hosts, and how to make more."""

    def __init__(
        self, checkpoint: Path, config: Config, *, expert_actor: Any = ExpertActor, cloud_actor: Any = CloudActor
    ) -> None:
        self.checkpoint, self.config = checkpoint, config
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
        self._pinned: dict[int, Pinned] = {}
        self._group: PlacementGroup | None = None
        self._made = 0
        self._places: dict[str, tuple[Pack, int | None]] = {}  # clients and bundle of each host, by its key
        self._lock: IO[bytes] | None = None

    def start(self, progress: Progress | None = None, *, wait_s: float = 0.0) -> dict[str, tuple[Instance, HostState]]:
        """Create every actor at once and wait until each answers; hosts and their states by key.

        On a cluster that may grow, `wait_s` is the time for it to do so.
        """
        cluster = self.config.cluster
        self.plan = wish(cluster, self.config.experts.count, nodes(), grows=wait_s > 0)
        self._group = reserve(self.plan, cluster, wait_s=wait_s)
        if self.config.serve.renew_frl:
            self._lock = only_server(self._frl_home, self._cloud_file)
        self.cloud = self._make_cloud()
        self.channel = self._remote(ChannelActor, 1).remote(self.config.seed)
        instances = [self.make_host(host, bundle=bundle) for bundle, host in enumerate(self.plan.hosts, start=2)]
        waiting: dict[Any, str] = {instance.handle.probe.remote(): instance.key for instance in instances}
        waiting[self.cloud.state.remote()] = "cloud"
        waiting[self.channel.ping.remote()] = "channel"
        states = _await_all(waiting, cluster.start_deadline_s, progress)
        self.pad_multiple = int(states["cloud"]["pad_multiple"])
        return {instance.key: (instance, states[instance.key]) for instance in instances}

    def make_host(self, host: Pack, *, bundle: int | None = None, replica: bool = False) -> Instance:
        """A new actor for some clients; it starts in the background."""
        journal = str(self._frl_home) if self.config.serve.renew_frl else None
        spec = HostSpec(host.clients, self.config, self.card, journal, replica)
        actor = self._remote(self.expert_actor, bundle, gpus=self.plan.gpus_per_expert, pin=host.pin)
        handle = actor.remote(spec, [self.fetch(client) for client in host.clients])
        self._made += 1
        key = f"{span(host.clients)}/{self._made}"
        self._places[key] = (host, bundle)
        return Instance(key, handle, host.clients, owner=not replica)

    def remove_host(self, instance: Instance) -> None:
        """End an actor for good."""
        self._places.pop(instance.key, None)
        ray.kill(instance.handle, no_restart=True)

    def remake_host(self, instance: Instance) -> Instance:
        """Another actor in the place of one whose constructor failed: such a one Ray does not start again."""
        host, bundle = self._places[instance.key]
        self.remove_host(instance)
        return self.make_host(host, bundle=bundle, replica=not instance.owner)

    def remake_cloud(self, dead: Any) -> None:
        """The same for the cloud; once, however many requests were lost with it."""
        if self.cloud is dead:
            ray.kill(dead, no_restart=True)
            self.cloud = self._make_cloud()

    def _make_cloud(self) -> Any:
        threads = self.config.serve.in_flight + 1
        actor = self._remote(self.cloud_actor, 0, gpus=self.plan.gpus_per_cloud, threads=threads)
        return actor.remote(CloudSpec(self.config, self.card), self._cloud_file)

    @property
    def _frl_home(self) -> Path:
        """Where clients keep what they renew."""
        storage = self.config.cluster.storage
        return ((Path(storage) if storage else self.checkpoint.parent / "state") / "frl").resolve()

    def restart(self, handle: Any) -> None:
        """End an actor that hangs; Ray starts it again."""
        ray.kill(handle, no_restart=False)

    def stop(self) -> None:
        """End cloud, channel and the reservation; hosts are ended by who holds them."""
        for handle in (getattr(self, "cloud", None), getattr(self, "channel", None)):
            if handle is not None:
                ray.kill(handle, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._lock is not None:
            self._lock.close()

    def file_of(self, client: int) -> bytes:
        """A client's checkpoint file, also of one that was added after the start."""
        path = expert_file(self.checkpoint, client)
        content = read_file(path)
        parse_tensors(content, str(path))  # a damaged file is told here, by its name
        return content

    def fetch(self, client: int) -> Pinned:
        """The same in the object store, where hosts find it."""
        if client not in self._pinned:
            self._pinned[client] = Pinned.put(self.file_of(client))
        return self._pinned[client]

    def _remote(
        self, actor: Any, bundle: int | None, *, gpus: float = 0.0, threads: int = 1, pin: str | None = None
    ) -> Any:
        options: dict[str, Any] = {**_FOREVER, "num_cpus": self.plan.cpus, "num_gpus": gpus, "max_concurrency": threads}
        if pin is not None:
            options["resources"] = {pin: PIN_SHARE}
        if bundle is not None and self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        elif self.config.cluster.placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        return actor.options(**options)


def _await_all(waiting: dict[Any, str], deadline_s: float, progress: Progress | None) -> dict[str, Any]:
    """First answers of new actors by name; a constructor's own complaint is passed on as it is."""
    states: dict[str, Any] = {}
    until = time.monotonic() + deadline_s
    pending, total = list(waiting), len(waiting)
    while pending:
        ready, pending = ray.wait(pending, timeout=0.5)
        for ref in ready:
            try:
                states[waiting[ref]] = ray.get(ref)
            except RayActorError as error:
                raise ClusterError(f"{_name(waiting[ref])} could not start: {_cause(error)}") from None
            except (RayError, GetTimeoutError) as error:
                raise ClusterError(f"{_name(waiting[ref])} failed its first probe: {last_line(error)}") from None
        if progress is not None:
            progress(len(states), total)
        if pending and time.monotonic() > until:
            late = ", ".join(_name(waiting[ref]) for ref in pending[:5])
            raise ClusterError(
                f"{len(pending)} of {total} actors did not start within {deadline_s:g} s ({late}); the machine may be "
                "short of memory or CPU, or raise cluster.start_deadline_s"
            )
    return states


def _name(key: str) -> str:
    """Of an actor, as people read it: an instance's key is `clients/number`."""
    clients, _, number = key.partition("/")
    return f"expert{'' if clients.isdigit() else 's'} {clients}" if number else key


def _cause(error: RayActorError) -> str:
    """The last line of a constructor's traceback, without the exception's class where it is one of ours."""
    line = last_line(error)
    name, _, message = line.partition(": ")
    ours = {"UserError", *(cls.__name__ for cls in UserError.__subclasses__())}
    return message if name.rpartition(".")[2] in ours else line

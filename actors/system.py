"""The actors of one served run: created together, replaced, added, removed, and all gone at the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.channel import ChannelActor
from actors.cloud import CloudActor, CloudSpec
from actors.cluster import nodes
from actors.errors import ClusterError
from actors.expert import ExpertActor
from actors.host import HostSpec, HostState, Pinned
from actors.placement import Plan, plan
from actors.roster import Instance
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
        self.files: dict[int, bytes] = {}
        for client in range(asked):
            self.file_of(client)
        self._pinned: dict[int, Pinned] = {}
        self._group: PlacementGroup | None = None
        self._made = 0

    def start(self, progress: Progress | None = None) -> dict[str, tuple[Instance, HostState]]:
        """Create every actor at once and wait until each answers; hosts and their states by key."""
        count = self.config.experts.count
        self.plan = plan(self.config.cluster, count, nodes())
        self._group = _reserve(self.plan, count, self.config.cluster)
        self.cloud = self._remote(
            self.cloud_actor, 0, gpus=self.plan.gpus_per_cloud, threads=self.config.serve.in_flight + 1
        ).remote(CloudSpec(self.config, self.card), self._cloud_file)
        self.channel = self._remote(ChannelActor, 1).remote(self.config.seed)
        instances = [self.make_host((client,), bundle=2 + client) for client in range(count)]
        waiting: dict[Any, str] = {instance.handle.probe.remote(): instance.key for instance in instances}
        waiting[self.cloud.state.remote()] = "cloud"
        waiting[self.channel.ping.remote()] = "channel"
        states = _await_all(waiting, self.config.cluster.start_deadline_s, progress)
        self.pad_multiple = int(states["cloud"]["pad_multiple"])
        return {instance.key: (instance, states[instance.key]) for instance in instances}

    def make_host(self, clients: tuple[int, ...], *, bundle: int | None = None, replica: bool = False) -> Instance:
        """A new actor for some clients; it starts in the background."""
        cluster = self.config.cluster
        journal = None
        if self.config.serve.renew_frl:
            home = Path(cluster.storage) if cluster.storage else self.checkpoint.parent / "state"
            journal = str((home / "frl").resolve())
        spec = HostSpec(clients, self.config, self.card, journal, replica)
        actor = self._remote(self.expert_actor, bundle, gpus=self.plan.gpus_per_expert)
        handle = actor.remote(spec, [self._pin(client) for client in clients])
        self._made += 1
        name = "+".join(str(client) for client in clients)
        return Instance(f"{name}/{self._made}", handle, clients, owner=not replica)

    def remove_host(self, instance: Instance) -> None:
        """End an actor for good."""
        ray.kill(instance.handle, no_restart=True)

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

    def file_of(self, client: int) -> bytes:
        """A client's checkpoint file, also of one that was added after the start."""
        if client not in self.files:
            path = expert_file(self.checkpoint, client)
            content = read_file(path)
            parse_tensors(content, str(path))  # a damaged file is told here, by its name
            self.files[client] = content
        return self.files[client]

    def _pin(self, client: int) -> Pinned:
        if client not in self._pinned:
            self._pinned[client] = Pinned.put(self.file_of(client))
        return self._pinned[client]

    def _remote(self, actor: Any, bundle: int | None, *, gpus: float = 0.0, threads: int = 1) -> Any:
        options: dict[str, Any] = {**_FOREVER, "num_cpus": self.plan.cpus, "num_gpus": gpus, "max_concurrency": threads}
        if bundle is not None and self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        elif self.config.cluster.placement == "spread":
            options["scheduling_strategy"] = "SPREAD"
        return actor.options(**options)


def _reserve(shares: Plan, experts: int, config: Any) -> PlacementGroup:
    """One bundle per actor, so that the whole system fits before any of it starts."""
    home = _home(shares)
    bundles = [{"CPU": shares.cpus, "GPU": shares.gpus_per_cloud, **home}, {"CPU": shares.cpus, **home}]
    bundles += [{"CPU": shares.cpus, "GPU": shares.gpus_per_expert} for _ in range(experts)]
    group = placement_group(
        [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles],
        strategy=config.placement.upper(),
    )
    if not group.wait(timeout_seconds=min(config.start_deadline_s, 60.0)):
        remove_placement_group(group)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        raise ClusterError(
            f"{experts} experts x {shares.gpus_per_expert:g} GPU and {shares.cpus:g} CPU do not fit: free are "
            f"{free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs (others may hold the rest); stop "
            "something or add nodes"
        )
    return group


def _home(shares: Plan) -> dict[str, float]:
    """For cloud and channel: the front end's own node, if it has room. Losing any other one then costs experts only."""
    here = ray.get_runtime_context().get_node_id()
    found = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)  # type: ignore[no-untyped-call]
    fits = found.get("CPU", 0.0) >= 2 * shares.cpus and found.get("GPU", 0.0) >= shares.gpus_per_cloud
    names = [name for name in found if name.startswith("node:") and name != "node:__internal_head__"]
    return {names[0]: 0.001} if fits and names else {}


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
                reason = _last_line(str(error))
                raise ClusterError(f"{_name(waiting[ref])} failed its first probe: {reason}") from None
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
    return f"expert {key.partition('/')[0]}" if "/" in key else key


def _cause(error: RayActorError) -> str:
    """The last line of a constructor's traceback, without the exception's class where it is one of ours."""
    line = _last_line(str(error))
    name, _, message = line.partition(": ")
    ours = {"UserError", *(cls.__name__ for cls in UserError.__subclasses__())}
    return message if name.rpartition(".")[2] in ours else line


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"

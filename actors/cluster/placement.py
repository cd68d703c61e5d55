"""Which clients share a host, and which share of which GPU it gets: arithmetic, and words for what is lacking."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.errors import ClusterError
from airmoe_ray.config import ClusterConfig

_GRAIN = 10_000  # Ray counts resources in ten-thousandths
_CPUS_UNSEEN = 0.1  # what an actor claims of nodes that have yet to come
_GPU_ADVICE = "lower cluster.gpus_per_expert (0 is CPU only, auto divides what is there), or add GPUs"


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in all."""

    cpus: float
    gpus: float
    resources: frozenset[str] = frozenset()  # names of whatever else it offers


@dataclass(frozen=True)
class HostPlan:
    """The clients of one host, on a node that offers `pin`."""

    clients: tuple[int, ...]
    pin: str | None = None


@dataclass(frozen=True)
class Plan:
    """Every host, and the resources of each actor."""

    hosts: tuple[HostPlan, ...]
    gpus_per_expert: float
    gpus_per_cloud: float
    cpus: float  # of every actor: a claim for the scheduler, not a limit

    @property
    def demand(self) -> str:
        """What the hosts need, in words."""
        return f"{_experts(self.hosts)} x {self.gpus_per_expert:g} GPU and {self.cpus:g} CPU"


def plan_hosts(config: ClusterConfig, clients: Iterable[int]) -> list[HostPlan]:
    """At most `experts_per_actor` clients to a host, in order; clients of different pins never share one."""
    by_pin: dict[str | None, list[int]] = {}
    for client in clients:
        by_pin.setdefault(config.pin.get(client), []).append(client)
    size = config.experts_per_actor
    found = [
        HostPlan(tuple(together[start : start + size]), pin)
        for pin, together in by_pin.items()
        for start in range(0, len(together), size)
    ]
    return sorted(found, key=lambda host: host.clients)


def plan(config: ClusterConfig, experts: int, nodes: Sequence[Node]) -> Plan:
    """A plan that these nodes hold, or an error that says what is needed and what is there."""
    found = wanted_plan(config, experts, nodes)
    if lacking := shortage(found, nodes):
        raise ClusterError(lacking)
    return found


def wanted_plan(config: ClusterConfig, experts: int, nodes: Sequence[Node], *, grows: bool = False) -> Plan:
    """Shares for the cloud and `experts` experts, whether or not these nodes hold them; `grows`: others may join."""
    hosts = plan_hosts(config, range(experts))
    share = _even_share(hosts, nodes) if config.gpus_per_expert == "auto" else config.gpus_per_expert
    cloud = share if config.gpus_per_cloud == "auto" else config.gpus_per_cloud
    share, cloud = (math.ceil(x) if x > 1 else x for x in (share, cloud))  # above 1, Ray hands out whole GPUs only
    if config.gpus_per_cloud == "auto" and not _fits(share, len(hosts), cloud, nodes):
        # the experts' shares were asked for, the cloud's was only wanted; where nodes must come anyway, for both
        cloud = cloud if grows and not _fits(share, len(hosts), 0.0, nodes) else 0.0
    return Plan(tuple(hosts), share, cloud, _cpu_claim(hosts, share, cloud, nodes))


def shortage(found: Plan, nodes: Sequence[Node]) -> str | None:
    """Why these nodes do not hold the plan: what is needed, what is there, what to do. None: they do."""
    hosts, share, cloud = found.hosts, found.gpus_per_expert, found.gpus_per_cloud
    for pin, pinned in _by_pin(hosts).items():
        offering = [node for node in nodes if pin in node.resources]
        if not offering:
            return _nobody_offers(pin, pinned, nodes)
        if not _fits(share, len(pinned), 0.0, offering):
            return (
                f"{_need(pinned, share, 0.0)} on nodes that offer {pin}, which {_have(share, offering)}; {_GPU_ADVICE}"
            )
        if not sum(node.cpus for node in offering):
            return f"{_experts(pinned)} need some CPU each on nodes that offer {pin}, which have 0; add nodes"
    if not _fits(share, len(hosts), cloud, nodes):
        return f"{_need(hosts, share, cloud)}, the cluster {_have(share, nodes, 'has')}; {_GPU_ADVICE}"
    if not sum(node.cpus for node in nodes):
        return f"{_experts(hosts)} need some CPU each, the cluster has 0; add nodes"
    return None


# arithmetic


def _even_share(hosts: Sequence[HostPlan], nodes: Sequence[Node]) -> float:
    """The share of each host and of the cloud; some share a GPU, so the number per GPU is rounded up."""
    gpus = [(count, sum(math.floor(node.gpus) for node in where)) for count, where in _nodes_for(hosts, nodes)]
    return min((math.floor(_GRAIN / math.ceil((count + 1) / n)) / _GRAIN if n else 0.0 for count, n in gpus), default=0)


def _cpu_claim(hosts: Sequence[HostPlan], share: float, cloud: float, nodes: Sequence[Node]) -> float:
    """Claim of each actor: all of them, and some replicas, fit beside each other wherever pins and GPUs put them."""
    groups = [(count, sum(node.cpus for node in where)) for count, where in _nodes_for(hosts, nodes)]
    if share:
        groups += [(min(_slots(int(node.gpus), share), len(hosts)), node.cpus) for node in nodes if node.gpus >= 1]
    claims = [0.5 * cpus / (count + 2) for count, cpus in groups if cpus]
    unseen = [] if claims and _fits(share, len(hosts), cloud, nodes) else [_CPUS_UNSEEN]
    return max(math.floor(_GRAIN * min([1.0, *claims, *unseen])), 1) / _GRAIN


def _nodes_for(hosts: Sequence[HostPlan], nodes: Sequence[Node]) -> list[tuple[int, Sequence[Node]]]:
    """How many hosts go to which nodes: all of them to any, and those of each pin where it is offered."""
    found: list[tuple[int, Sequence[Node]]] = [(len(hosts), nodes)]
    for pin, pinned in _by_pin(hosts).items():
        found.append((len(pinned), [node for node in nodes if pin in node.resources]))
    return [(count, where) for count, where in found if where]


def _by_pin(hosts: Sequence[HostPlan]) -> dict[str, list[HostPlan]]:
    found: dict[str, list[HostPlan]] = {}
    for host in hosts:
        if host.pin is not None:
            found.setdefault(host.pin, []).append(host)
    return found


def _fits(share: float, hosts: int, cloud: float, nodes: Sequence[Node]) -> bool:
    """Whether the nodes hold `hosts` shares and the cloud's. A share is on one node; below 1, on one GPU of it."""
    free = [math.floor(node.gpus) for node in nodes]
    if share == 0:
        return cloud == 0 or any(gpus >= cloud for gpus in free)
    room = sum(_slots(gpus, share) for gpus in free)
    if cloud == 0:
        return room >= hosts
    lost = [_slots(gpus, share) - _slots_beside(gpus, share, cloud) for gpus in free if gpus >= cloud]
    return bool(lost) and room - min(lost) >= hosts


def _slots(gpus: int, share: float) -> int:
    """How many shares the GPUs of one node hold."""
    return int(gpus // share) if share >= 1 else gpus * _per_gpu(share)


def _slots_beside(gpus: int, share: float, cloud: float) -> int:
    """How many shares the GPUs of the cloud's own node hold beside it."""
    beside = _per_gpu(share, 1 - cloud) if cloud < 1 and share < 1 else 0
    return _slots(gpus - math.ceil(cloud), share) + beside


def _per_gpu(share: float, free: float = 1.0) -> int:
    return math.floor(free / share + 1e-9)


# words


def _experts(hosts: Sequence[HostPlan]) -> str:
    """`10 experts`, or `1000 experts in 4 actors`."""
    count = sum(len(host.clients) for host in hosts)
    return f"{count} experts" if count == len(hosts) else f"{count} experts in {len(hosts)} actors"


def _need(hosts: Sequence[HostPlan], share: float, cloud: float = 0.0) -> str:
    whole = len(hosts) * share if share >= 1 or share == 0 else math.ceil(len(hosts) / _per_gpu(share))
    with_cloud = f" and the cloud {cloud:g}" if cloud else ""
    return f"{_experts(hosts)} x {share:g} GPU{with_cloud} need {math.ceil(whole + cloud)} GPUs"


def _have(share: float, nodes: Sequence[Node], verb: str = "have") -> str:
    each = [math.floor(node.gpus) for node in nodes if node.gpus >= 1]
    spread = f" ({' + '.join(map(str, each))}, and a share lives on one node)" if len(each) > 1 and share > 1 else ""
    return f"{verb} {sum(each)}{spread}"


def _nobody_offers(pin: str, pinned: Sequence[HostPlan], nodes: Sequence[Node]) -> str:
    offered = ", ".join(sorted({name for node in nodes for name in node.resources})) or "nothing to pin to"
    return (
        f"expert {pinned[0].clients[0]} is pinned to {pin} (cluster.pin), which no node offers; nodes offer {offered}; "
        f"start one with `ray start --resources='{{\"{pin}\": 1}}'`"
    )

"""Which clients share a host, and which share of which GPU it gets: arithmetic, and words for what is lacking."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from actors.errors import ClusterError
from airmoe_ray.config import ClusterConfig

_GRAIN = 10_000  # Ray counts resources in ten-thousandths
CPUS_JOINING = 0.01  # what a host claims that joins a running system, whose claims were made for those at its start
_CPUS_UNSEEN = 0.1  # what an actor claims of nodes that have yet to come
_GPU_ADVICE = "lower cluster.gpus_per_expert (0 is CPU only, auto divides what is there), or add GPUs"


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in all."""

    cpus: float
    gpus: float
    resources: frozenset[str] = frozenset()  # names of whatever else it offers
    labels: Mapping[str, str] = field(default_factory=dict)
    free_cpus: float = math.inf  # of what it has; unknown where it does not matter
    free_gpus: float = math.inf

    def has(self, selector: Mapping[str, str]) -> bool:
        """Whether its labels are what a selector asks for, in Ray's words: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
        return all(_selected(self.labels.get(key), wanted) for key, wanted in selector.items())


@dataclass(frozen=True)
class HostPlan:
    """Which clients one host holds, and the resource that its node must offer, if any."""

    clients: tuple[int, ...]
    pin: str | None = None


@dataclass(frozen=True)
class Plan:
    """Every host, and the resources of each actor."""

    hosts: tuple[HostPlan, ...]
    gpus_per_expert: float
    gpus_per_cloud: float
    cpus: float  # of every actor: a claim for the scheduler, not a limit
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # that each role asks for
    experts_per_actor: int = 1

    @property
    def packing(self) -> str:
        """How clients share actors, in words."""
        clients = sum(len(host.clients) for host in self.hosts)
        return f"{clients} experts in {len(self.hosts)} actors, at most {self.experts_per_actor} in each"

    @property
    def demand(self) -> str:
        """What the hosts need, in words."""
        return f"{_experts(self.hosts)} x {self.gpus_per_expert:g} GPU and {self.cpus:g} CPU"


def plan_hosts(config: ClusterConfig, clients: Iterable[int], *, size: int) -> list[HostPlan]:
    """At most `size` clients to a host, in order; clients of different pins never share one."""
    by_pin: dict[str | None, list[int]] = {}
    for client in clients:
        by_pin.setdefault(config.pin.get(client), []).append(client)
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
    nodes = [node for node in nodes if node.has(config.labels.get("expert", {}))] or list(nodes)
    size = experts_per_actor(config, experts, nodes)
    hosts = plan_hosts(config, range(experts), size=size)
    share, cloud = _shares(config, hosts, nodes)
    if config.gpus_per_cloud == "auto" and not _fits(share, len(hosts), cloud, nodes):
        # the experts' shares were asked for, the cloud's was only wanted; where nodes must come anyway, for both
        cloud = cloud if grows and not _fits(share, len(hosts), 0.0, nodes) else 0.0
    return Plan(tuple(hosts), share, cloud, _cpu_claim(hosts, share, cloud, nodes), dict(config.labels.items()), size)


def experts_per_actor(config: ClusterConfig, experts: int, nodes: Sequence[Node]) -> int:
    """How many clients share an actor; `auto`: as many as leave one actor to each GPU share or core of these nodes.

    More actors than that would take turns, and each exchange is a call to every one of them. Of nodes that have yet to
    come nothing is known, and every client gets its own.
    """
    if config.experts_per_actor != "auto":
        return config.experts_per_actor
    gpus, share = sum(math.floor(node.gpus) for node in nodes), config.gpus_per_expert
    if share == "auto":
        cloud = _cloud_share(config, gpus)
        places = 1 if gpus == 1 and cloud < 1 else max(gpus - math.ceil(cloud), 0)
    else:
        cloud = 0.0 if config.gpus_per_cloud == "auto" else config.gpus_per_cloud
        counts = range(experts, 0, -1) if share else ()
        places = next((count for count in counts if _fits(_whole(share), count, _whole(cloud), nodes)), 0)
    places = places or sum(math.floor(node.cpus) for node in nodes)
    return math.ceil(experts / places) if places > 0 else 1


def shortage(found: Plan, nodes: Sequence[Node]) -> str | None:  # noqa: PLR0911  a reason each
    """Why these nodes do not hold the plan: what is needed, what is there, what to do. None: they do."""
    hosts, share, cloud = found.hosts, found.gpus_per_expert, found.gpus_per_cloud
    if lacking := _unlabelled(found, nodes):
        return lacking
    if selector := found.labels.get("expert"):
        home = [node for node in nodes if node.has(found.labels.get("cloud", {}))]
        nodes = [node for node in nodes if node.has(selector)]
        cloud = cloud if any(node in nodes for node in home) else 0.0  # else it takes nothing from them
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


def _unlabelled(found: Plan, nodes: Sequence[Node]) -> str | None:
    """Which role finds no node with the labels it asks for; for the cloud, one with a GPU for it as well."""
    for role, selector in found.labels.items():
        if not any(node.has(selector) for node in nodes):
            return _nobody_has(role, selector, nodes)
    cloud, selector = found.gpus_per_cloud, found.labels.get("cloud", {})
    if selector and cloud and not any(node.gpus >= cloud for node in nodes if node.has(selector)):
        return (
            f"the cloud needs {cloud:g} GPU on a node with its labels (cluster.labels), which none has; {_GPU_ADVICE}"
        )
    return None


def no_room(found: Plan, added: Sequence[HostPlan], nodes: Sequence[Node]) -> str | None:
    """Why hosts that are to join a running system do not fit into what is free; None: they do."""
    share, selector = found.gpus_per_expert, found.labels.get("expert", {})
    cpus = min(found.cpus, CPUS_JOINING)
    for pin in {host.pin for host in added}:
        hosts = [host for host in added if host.pin == pin]
        where = [node for node in nodes if node.has(selector) and (pin is None or pin in node.resources)]
        slots = sum(_free_slots(node, share, cpus) for node in where)
        if slots < len(hosts):
            free, gpus = max(slots, 0), sum(node.free_gpus for node in where)
            return (
                f"{_experts(hosts)} x {share:g} GPU and {cpus:g} CPU do not fit beside what runs: there is room "
                f"for {free} ({gpus:g} GPUs are free); add nodes, or start again with that many experts, among which "
                "cluster.gpus_per_expert=auto divides the GPUs"
            )
    return None


# arithmetic


def _shares(config: ClusterConfig, hosts: Sequence[HostPlan], nodes: Sequence[Node]) -> tuple[float, float]:
    """GPU shares of each host and of the cloud; `auto` sets the cloud's aside and divides the rest."""
    gpus = sum(math.floor(node.gpus) for node in nodes)
    wanted, cloud = config.gpus_per_cloud, _cloud_share(config, gpus)
    if config.gpus_per_expert != "auto":
        share = config.gpus_per_expert
        if wanted == "auto" and not _fits(_whole(share), len(hosts), _whole(cloud), nodes):
            cloud = min(share, cloud) if gpus else share
    else:
        share = _even_share(hosts, nodes, cloud)
        if wanted == "auto" and not _fits(share, len(hosts), cloud, nodes):  # pins leave no GPU to the cloud alone
            share = cloud = _even_share(hosts, nodes, None)
    return _whole(share), _whole(cloud)


def _cloud_share(config: ClusterConfig, gpus: int) -> float:
    """What the cloud wants of so many GPUs."""
    wanted = config.gpus_per_cloud
    return (1.0 if gpus > 1 else 0.5 * gpus) if wanted == "auto" else wanted


def _whole(share: float) -> float:
    """A share that Ray can hand out: above 1, whole GPUs only."""
    return math.ceil(share) if share > 1 else share


def _free_slots(node: Node, share: float, cpus: float) -> int:
    """How many more hosts a node takes; on GPUs of which each is cut into equal shares."""
    by_cpu = math.floor(node.free_cpus / cpus + 1e-6) if math.isfinite(node.free_cpus) else 1 << 30
    if share == 0:
        return by_cpu
    if not math.isfinite(node.free_gpus) or share >= 1:
        return min(by_cpu, _slots(int(min(node.free_gpus, node.gpus)), share))
    taken = math.ceil((node.gpus - node.free_gpus) / share - 1e-3)
    return min(by_cpu, max(_slots(int(node.gpus), share) - taken, 0))


def _selected(label: str | None, wanted: str) -> bool:
    unwanted, value = wanted.startswith("!"), wanted.removeprefix("!")
    listed = value.removeprefix("in(").removesuffix(")") if value.startswith("in(") else value
    return (label in {part.strip() for part in listed.split(",")}) != unwanted


def _even_share(hosts: Sequence[HostPlan], nodes: Sequence[Node], cloud: float | None) -> float:
    """The share of each host beside the cloud's; None: the cloud's is like theirs.

    Some share a GPU, so the number per GPU is rounded up.
    """
    shares = [1.0]
    whole = sum(math.floor(node.gpus) for node in nodes)
    for count, where in _nodes_for(hosts, nodes):
        gpus = sum(math.floor(node.gpus) for node in where)
        elsewhere = cloud is not None and whole - gpus >= cloud  # beside those that pins have taken
        if elsewhere:
            shares.append(_part(1.0, count, gpus))
        elif cloud is None:
            shares.append(_part(1.0, count + 1, gpus))
        elif cloud < 1 and gpus == 1:
            shares.append(_part(1.0 - cloud, count, 1))
        else:
            shares.append(_part(1.0, count, gpus - math.ceil(cloud)))
    return min(shares) if nodes else 0.0


def _part(of: float, count: int, gpus: int) -> float:
    """GPU share of each of `count` actors on `gpus` GPUs of which a part `of` each is free, rounded down."""
    return math.floor(_GRAIN * of / math.ceil(count / gpus)) / _GRAIN if gpus > 0 else 0.0


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


def _nobody_has(role: str, selector: Mapping[str, str], nodes: Sequence[Node]) -> str:
    there = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items()})
    wanted = ", ".join(f"{key}={value}" for key, value in selector.items())
    return (
        f"the {role} asks for a node with {wanted} (cluster.labels), which none has; nodes have "
        f"{', '.join(there) or 'no labels'}; start one with `ray start --labels='{wanted}'`"
    )


def _nobody_offers(pin: str, pinned: Sequence[HostPlan], nodes: Sequence[Node]) -> str:
    offered = ", ".join(sorted({name for node in nodes for name in node.resources})) or "nothing to pin to"
    return (
        f"expert {pinned[0].clients[0]} is pinned to {pin} (cluster.pin), which no node offers; nodes offer {offered}; "
        f"start one with `ray start --resources='{{\"{pin}\": 1}}'`"
    )

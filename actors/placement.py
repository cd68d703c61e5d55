"""Which share of which GPU each actor gets: arithmetic only, and messages for what cannot be had."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import ClusterError
from airmoe_ray.config import ClusterConfig

_GRAIN = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has in all."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Plan:
    """Resources of each actor."""

    gpus_per_expert: float
    gpus_per_cloud: float
    cpus: float  # of every actor: a claim for the scheduler, not a limit


def plan(config: ClusterConfig, experts: int, nodes: Sequence[Node]) -> Plan:
    """Shares for the cloud and `experts` experts, or an error that says what is needed and what is there."""
    total = sum(math.floor(node.gpus) for node in nodes)
    share = _even_share(experts, total) if config.gpus_per_expert == "auto" else config.gpus_per_expert
    cloud = share if config.gpus_per_cloud == "auto" else config.gpus_per_cloud
    share, cloud = (math.ceil(x) if x > 1 else x for x in (share, cloud))  # above 1, Ray hands out whole GPUs only
    if config.gpus_per_cloud == "auto" and config.gpus_per_expert != "auto" and not _fits(share, experts, cloud, total):
        cloud = 0.0  # the experts' shares were asked for; the cloud's was only a wish
    if not _fits(share, experts, cloud, total):
        needed = _gpus_needed(share, experts) + cloud
        with_cloud = f" and the cloud {cloud:g}" if cloud else ""
        raise ClusterError(
            f"{experts} experts x {share:g} GPU{with_cloud} need {math.ceil(needed)} GPUs, the cluster has {total}; "
            "lower cluster.gpus_per_expert (0 is CPU only, auto divides what is there), or add GPUs"
        )
    cpus = sum(node.cpus for node in nodes)
    # small enough that all actors, and some replicas, fit beside each other on any node
    per_actor = math.floor(_GRAIN * min(1.0, 0.5 * cpus / (experts + 2))) / _GRAIN
    if per_actor <= 0:
        raise ClusterError(f"{experts} experts need some CPU each, the cluster has {cpus:g}; add nodes")
    return Plan(share, cloud, per_actor)


def _even_share(experts: int, gpus: int) -> float:
    """What each expert and the cloud get; shares of one GPU must fit into it, so the number per GPU is rounded up."""
    if not gpus:
        return 0.0
    per_gpu = math.ceil((experts + 1) / gpus)
    return math.floor(_GRAIN / per_gpu) / _GRAIN


def _gpus_needed(share: float, experts: int) -> float:
    """GPUs that `experts` shares occupy: a share below 1 never straddles two GPUs, one above takes whole ones."""
    if share <= 0:
        return 0
    if share >= 1:
        return math.ceil(share) * experts
    return math.ceil(experts / math.floor(1 / share + 1e-9))


def _fits(share: float, experts: int, cloud: float, total: int) -> bool:
    needed = _gpus_needed(share, experts)
    if cloud <= 0 or cloud >= 1:
        return needed + math.ceil(cloud) <= total or share == cloud == 0
    if cloud == share:
        return _gpus_needed(share, experts + 1) <= total
    room = 1 - (experts % math.floor(1 / share + 1e-9)) * share if 0 < share < 1 else 0.0
    last_is_open = 0 < share < 1 and experts % math.floor(1 / share + 1e-9) != 0
    return needed + (0 if last_is_open and room >= cloud else 1) <= total

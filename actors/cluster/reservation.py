"""Reserves room for the whole system before any of it starts, and gives an autoscaler time to make it."""

import logging
import time
import uuid

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.cluster.connection import nodes
from actors.cluster.placement import Plan, shortage
from actors.errors import ClusterError
from airmoe_ray.config import ClusterConfig

SERVING = "airmoe-serve-"  # how the name of a front end's reservation begins, by which others see who holds what
PIN_SHARE = 0.001  # of a custom resource: a place to be, not something that is used up
_BUSY_S = 60.0  # how long others may take to let go of what is there
_REPEAT_S = 10.0  # between two equal notes

log = logging.getLogger("airmoe")


def reserve(plan: Plan, config: ClusterConfig, *, wait_s: float = 0.0) -> PlacementGroup:
    """Reserve one bundle each for cloud, channel and every host, in this order.

    Where the nodes do not hold the plan it is refused, or, with `wait_s`, asked for all the same: what is pending is
    what an autoscaler looks at.
    """
    lacking = shortage(plan, nodes())
    if lacking and not wait_s:
        raise ClusterError(lacking)
    group = placement_group(
        _bundles(plan),
        strategy=config.placement.upper(),
        name=f"{SERVING}{uuid.uuid4().hex[:8]}",
        bundle_label_selector=_labels(plan),
    )
    try:
        _await(group, plan, wait_s or min(config.start_deadline_s, _BUSY_S), grows=wait_s > 0)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _bundles(plan: Plan) -> list[dict[str, float]]:
    own_node = _own_node(plan)
    bundles = [{"CPU": plan.cpus, "GPU": plan.gpus_per_cloud, **own_node}, {"CPU": plan.cpus, **own_node}]
    for host in plan.hosts:
        pinned = {host.pin: PIN_SHARE} if host.pin else {}
        bundles.append({"CPU": plan.cpus, "GPU": plan.gpus_per_expert, **pinned})
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]


def _labels(plan: Plan) -> list[dict[str, str]]:
    """The node labels that each bundle asks for."""
    roles = ["cloud", "channel", *["expert"] * len(plan.hosts)]
    return [dict(plan.labels.get(role, {})) for role in roles]


def _own_node(plan: Plan) -> dict[str, float]:
    """The front end's own node for cloud and channel, if it has room: losing any other one then costs experts only."""
    if plan.labels.get("cloud") or plan.labels.get("channel"):
        return {}
    here = ray.get_runtime_context().get_node_id()
    found = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)  # type: ignore[no-untyped-call]
    fits = found.get("CPU", 0.0) >= 2 * plan.cpus and found.get("GPU", 0.0) >= plan.gpus_per_cloud
    names = [name for name in found if name.startswith("node:") and name != "node:__internal_head__"]
    return {names[0]: PIN_SHARE} if fits and names else {}


def _await(group: PlacementGroup, plan: Plan, wait_s: float, *, grows: bool) -> None:
    until, noted, noted_at = time.monotonic() + wait_s, "", 0.0
    while not group.wait(timeout_seconds=1):
        lacking, now = shortage(plan, nodes()) or _busy(plan), time.monotonic()
        if now > until:
            raise ClusterError(f"{lacking} (waited {wait_s:g} s)" if grows else lacking)
        if grows and (lacking != noted or now - noted_at > _REPEAT_S):
            log.warning("waiting for the autoscaler, %.0f s more: %s", until - now, lacking)
            noted, noted_at = lacking, now


def _busy(plan: Plan) -> str:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return (
        f"{plan.demand} do not fit: free are {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs "
        "(others may hold the rest); stop something or add nodes"
    )

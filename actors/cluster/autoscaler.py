"""How far the cluster's autoscaler may grow it.

Ray tells its drivers only where somebody hosts it. Elsewhere the file that the autoscaler works from says so: `ray up`
leaves it on the head, where the autoscaler runs, and where commands are given. KubeRay's stands in a RayCluster, which
pods may not read.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # comes with ray
import ray
import yaml
from ray._private.state import state

_IN_KUBERAY = "RAY_USAGE_STATS_KUBERAY_IN_USE"  # KubeRay sets it in every pod of its clusters
_OPTION, _GCS = "--autoscaling-config=", "--gcs-address="


def most_gpus() -> float | None:
    """How many GPUs the cluster's autoscaler can bring it to; None where none comes, infinite where nobody says.

    That is in pods of KubeRay: it brings lost ones back, and where the RayCluster allows it more of them, but the limit
    is not known here.
    """
    most = state.get_max_resources_from_cluster_config()
    if most is not None:
        return float(most.get("GPU", 0))
    if os.environ.get(_IN_KUBERAY) == "1":
        return math.inf
    file = _file_of(str(ray.get_runtime_context().gcs_address))
    return None if file is None else gpus_within(file)


def gpus_within(file: Mapping[str, Any]) -> float | None:
    """GPUs of the head and of as many workers as a cluster file allows; None where it lists hosts that are there."""
    types = file.get("available_node_types") or {}
    if file["provider"]["type"] == "local" or not types:
        return None
    head = types.get(file.get("head_node_type"), {})
    total, left = _gpus(head), int(file.get("max_workers", 0))
    for kind in sorted(types.values(), key=_gpus, reverse=True):
        count = min(int(kind.get("max_workers", 0)), left)
        total, left = total + count * _gpus(kind), left - count
    return total


def _gpus(kind: Mapping[str, Any]) -> float:
    return float((kind.get("resources") or {}).get("GPU", 0))


def _file_of(gcs_address: str) -> dict[str, Any] | None:
    """What the autoscaler of this cluster was started with, where it runs on this node; None elsewhere."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"{_GCS}{gcs_address}" not in command:
            continue
        for named in (part.removeprefix(_OPTION) for part in command if part.startswith(_OPTION)):
            try:
                found: dict[str, Any] = yaml.safe_load(Path(named).expanduser().read_text())
            except OSError:  # another user's
                continue
            return found
    return None

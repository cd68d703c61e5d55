"""Whether the experts fit: on this machine, on the machines of a cluster file, or on a provider's node types."""

from actors.cluster.placement import Node, plan
from airmoe_ray.config import Config
from api.cli.doctor.cluster_file import ClusterFile

_MOST_NODES = 1000  # of one type


def fit(config: Config, nodes: list[Node], where: str) -> str:
    """Plan the placement on these nodes; what does not fit is raised."""
    shares = plan(config.cluster, config.experts.count, nodes)
    gpu = f"{shares.gpus_per_expert:g} GPU each" if shares.gpus_per_expert else "on the CPU"
    return f"{config.experts.count} experts {gpu} fit on {where}"


def fully_grown(file: ClusterFile, config: Config) -> str:
    """Plan the placement on the cluster when it has all the nodes it may get."""
    nodes: list[Node] = []
    for name, kind in file.tree["available_node_types"].items():
        is_head = name == file.tree["head_node_type"]
        count = 1 if is_head else int(kind.get("max_workers", file.tree.get("max_workers", 0)))
        offers = kind.get("resources") or {}
        nodes += [Node(cpus=float(offers.get("CPU", 1)), gpus=float(offers.get("GPU", 0)))] * min(count, _MOST_NODES)
    return fit(config, nodes, f"{len(nodes)} nodes")

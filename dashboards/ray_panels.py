"""What the dashboard shows of the cluster: Ray's own metrics of nodes and GPUs, as an agent on every node exports them.

Names and labels are those of Ray 2.60 (`ray/dashboard/modules/reporter`). Without a cluster, these rows stay empty.
"""

from dashboards.panels import Panel

NODE = "{{RayNodeType}} {{ip}}"
GPU = "{{ip}} GPU {{GpuIndex}}"


def share(used: str, free: str, by: str) -> str:
    """What is used of used and free."""
    return f"sum by ({by}) ({used}) / (sum by ({by}) ({used}) + sum by ({by}) ({free}))"


RAY_ROWS: dict[str, tuple[Panel, ...]] = {
    "Nodes": (
        Panel(
            "Nodes", "none", "Nodes of the Ray cluster.", {"nodes": "count(ray_node_cpu_count)"}, kind="stat", width=4
        ),
        Panel(
            "Scraped",
            "none",
            "Which targets answer Prometheus: the front end and every node.",
            {"{{job}} {{instance}}": 'min by (job, instance) (up{job=~"airmoe|ray"})'},
            kind="states",
            width=10,
        ),
        Panel(
            "Claimed of Ray",
            "none",
            "CPUs and GPUs that actors have claimed. A claim places an actor, it does not hold it down.",
            {
                "{{Name}} claimed": 'sum by (Name) (ray_resources{State="USED", Name=~"CPU|GPU"})',
                "{{Name}} free": 'sum by (Name) (ray_resources{State="AVAILABLE", Name=~"CPU|GPU"})',
            },
            width=10,
        ),
        Panel(
            "CPU",
            "percent",
            "CPU of each node, 100 % is all of its cores. An even row of busy nodes wants more of them.",
            {NODE: "max by (ip, RayNodeType) (ray_node_cpu_utilization)"},
        ),
        Panel(
            "Memory",
            "percentunit",
            "Memory of each node; at 95 % Ray ends the workers that use most.",
            {NODE: "max by (ip, RayNodeType) (ray_node_mem_used / ray_node_mem_total)"},
        ),
        Panel(
            "Object store",
            "percentunit",
            "Shared memory of each node that holds features on their way; full, Ray writes to disk.",
            {
                "{{NodeAddress}}": share(
                    "ray_object_store_used_memory", "ray_object_store_available_memory", "NodeAddress"
                )
            },
        ),
        Panel(
            "Network",
            "Bps",
            "What each node sends (and receives, below): broadcasts of features are the most of it.",
            {
                "{{ip}} sent": "max by (ip) (ray_node_network_send_speed)",
                "{{ip}} received": "-max by (ip) (ray_node_network_receive_speed)",
            },
            width=12,
        ),
        Panel(
            "Disk",
            "percent",
            "Disk of each node. Full, logs and journals stop.",
            {NODE: "max by (ip, RayNodeType) (ray_node_disk_utilization_percentage)"},
            width=12,
        ),
    ),
    "GPUs": (
        Panel(
            "GPU",
            "percent",
            "How busy each GPU is. Experts share one; a GPU near 100 % with a queue wants replicas elsewhere.",
            {GPU: "max by (ip, GpuIndex) (ray_node_gpus_utilization)"},
        ),
        Panel(
            "GPU memory",
            "percentunit",
            "Memory of each GPU; every process on it takes some hundred megabytes before its first tensor.",
            {GPU: share("ray_node_gram_used", "ray_node_gram_available", "ip, GpuIndex")},
        ),
        Panel(
            "GPU power",
            "watt",
            "What each GPU draws.",
            {GPU: "max by (ip, GpuIndex) (ray_node_gpu_power_milliwatts) / 1000"},
            width=4,
        ),
        Panel(
            "GPU temperature",
            "celsius",
            "Above 80 degrees most cards slow down.",
            {GPU: "max by (ip, GpuIndex) (ray_node_gpu_temperature_celsius)"},
            width=4,
        ),
    ),
}

"""How many workers train, and on what: a decision without Ray, told in a line, and the wait for GPUs still to come."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray.util.placement_group import placement_group, remove_placement_group

from actors.cluster.connection import nodes
from actors.cluster.placement import Node
from actors.errors import ClusterError

_ON_CPU = "set train.device=cpu to train without"


@dataclass(frozen=True)
class Crew:
    """The workers of a training."""

    workers: int
    gpu: bool  # one each
    cpus: int  # of the cluster as it is
    gpus: int
    missing: int = 0  # GPUs that an autoscaler has to bring

    @property
    def told(self) -> str:
        """What they are, in a line."""
        several = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        if not self.gpu:
            return f"{several} on the CPU; {self.cpus} CPUs are there" + (f", {self.gpus} GPUs" if self.gpus else "")
        if not self.missing:
            return f"{several} with a GPU each; {self.gpus} are there"
        return f"{several} with a GPU each; {self.gpus} are there, waiting for the autoscaler to bring {self.missing}"

    def threads(self, most: int) -> int:
        """CPU threads of each, of at most `most` on a machine."""
        return max(min(self.cpus, most) // self.workers, 1)


def plan_crew(device: str, workers: int | None, there: Sequence[Node], most_gpus: float | None) -> Crew:
    """The workers that a cluster has room for: on GPUs, wherever it has or can have any, unless `device` is another.

    `most_gpus` is what its autoscaler can bring it to; None where it has none. Without `workers`, one for each GPU.
    """
    cpus, gpus = int(sum(node.cpus for node in there)), int(sum(int(node.gpus) for node in there))
    reach = max(gpus, int(most_gpus or 0))
    if device.startswith("cuda:"):
        raise ClusterError(
            f"train.device = {device}: on Ray a worker gets the GPU that Ray assigns; set train.device=cuda, or "
            "train.engine=local for a GPU by its number"
        )
    if device == "cuda" and not reach:
        raise ClusterError(f"train.device = cuda: the cluster has no GPU and cannot get one; {_ON_CPU}")
    gpu = reach > 0 and device in ("auto", "cuda")
    workers = workers or (max(gpus, 1) if gpu else 1)
    if gpu and workers > reach:
        more = f" and can have {reach}" if reach > gpus else ""
        raise ClusterError(f"--workers {workers}: the cluster has {gpus} GPUs{more}; ask for {reach}, or {_ON_CPU}")
    if not gpu and workers > cpus:
        raise ClusterError(f"--workers {workers}: the cluster has {cpus} CPUs and {gpus} GPUs; ask for fewer")
    return Crew(workers, gpu, cpus, gpus, missing=max(workers - gpus, 0) if gpu else 0)


def await_gpus(crew: Crew, *, wait_s: float) -> None:
    """Ask for what is missing, and wait until it is there; what is pending is what an autoscaler looks at."""
    if not crew.missing:
        return
    group = placement_group([{"CPU": 1, "GPU": 1}] * crew.workers)
    until = time.monotonic() + wait_s
    try:
        while not group.wait(timeout_seconds=1):
            if time.monotonic() > until:
                found = int(sum(int(node.gpus) for node in nodes()))
                raise ClusterError(
                    f"--workers {crew.workers}: the cluster has {found} GPUs (waited {wait_s:g} s for the autoscaler, "
                    f"cluster.autoscale_wait_s); ask for fewer, or {_ON_CPU}"
                )
    finally:
        remove_placement_group(group)

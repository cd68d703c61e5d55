"""How many workers train, and on what: a decision without Ray, told in a line, and the wait for what is not free."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util import placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group

from actors.cluster.connection import nodes
from actors.cluster.placement import Node
from actors.cluster.reservation import SERVING
from actors.errors import ClusterError
from airmoe_ray.runtime.progress import Reporter

_ON_CPU = "set train.device=cpu to train without"
_BUSY_S = 60.0  # how long others may take to let go of what is there: more than a run that ends needs
_REPEAT_S = 30.0  # between two notes of a wait


@dataclass(frozen=True)
class Crew:
    """The workers of a training."""

    workers: int
    gpu: bool  # one each
    cpus: int  # of the cluster as it is
    gpus: int
    free: int = 0  # GPUs that nobody holds
    missing: int = 0  # GPUs that an autoscaler has to bring
    held: int = 0  # GPUs that are there, and that others have to let go of

    @property
    def several(self) -> str:
        """How many they are."""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"

    @property
    def told(self) -> str:
        """What they are, in a line."""
        if not self.gpu:
            there = f"{self.cpus} CPUs are there" + (f", {self.gpus} GPUs" if self.gpus else "")
            return f"{self.several} on the CPU; {there}"
        there = f"{self.gpus} are there" + (f", {self.free} of them free" if self.free < self.gpus else "")
        waits = [f"for others to let go of {self.held}"] if self.held else []
        waits += [f"for the autoscaler to bring {self.missing}"] if self.missing else []
        return f"{self.several} with a GPU each; {there}" + (f", waiting {' and '.join(waits)}" if waits else "")

    @property
    def bundle(self) -> dict[str, float]:
        """What each of them takes."""
        return {"CPU": 1, "GPU": 1} if self.gpu else {"CPU": 1}

    def threads(self, most: int) -> int:
        """CPU threads of each, of at most `most` on a machine."""
        return max(min(self.cpus, most) // self.workers, 1)


def plan_crew(device: str, workers: int | None, there: Sequence[Node], most_gpus: float | None) -> Crew:
    """The workers that a cluster has room for: on GPUs, wherever it has or can have any, unless `device` is another.

    `most_gpus` is what its autoscaler can bring it to; None where it has none, infinite where it does not say: then
    GPUs are waited for where there are some already, or where they are asked for by name. Without `workers`, one for
    each GPU that is free.
    """
    cpus, gpus = int(sum(node.cpus for node in there)), int(sum(int(node.gpus) for node in there))
    free = sum(int(min(node.free_gpus, node.gpus) + 1e-6) for node in there)
    most = most_gpus or 0
    if math.isinf(most) and not gpus and device != "cuda":
        most = 0
    reach = max(gpus, math.floor(most)) if math.isfinite(most) else most
    if device.startswith("cuda:"):
        raise ClusterError(
            f"train.device = {device}: on Ray a worker gets the GPU that Ray assigns; set train.device=cuda, or "
            "train.engine=local for a GPU by its number"
        )
    if device == "cuda" and not reach:
        raise ClusterError(f"train.device = cuda: the cluster has no GPU and cannot get one; {_ON_CPU}")
    gpu = reach > 0 and device in ("auto", "cuda")
    workers = workers or (max(free, 1) if gpu else 1)
    if gpu and workers > reach:
        more = f" and can have {reach}" if reach > gpus else ""
        raise ClusterError(f"--workers {workers}: the cluster has {gpus} GPUs{more}; ask for {reach}, or {_ON_CPU}")
    if not gpu and workers > cpus:
        raise ClusterError(f"--workers {workers}: the cluster has {cpus} CPUs and {gpus} GPUs; ask for fewer")
    lacking = max(workers - free, 0) if gpu else 0
    missing = int(min(lacking, reach - gpus))
    return Crew(workers, gpu, cpus, gpus, free=free, missing=missing, held=lacking - missing)


def await_room(crew: Crew, report: Reporter, *, wait_s: float) -> None:
    """Ask for all that the workers take at once, and wait until it is free; Ray Train would wait in silence, for ever.

    What is pending is what an autoscaler looks at: `wait_s` is for it. What others hold is waited for no longer than a
    run that ends needs: a front end lets go of nothing.
    """
    wait_s = wait_s if crew.missing and not crew.held else min(wait_s, _BUSY_S)
    group = placement_group([crew.bundle] * crew.workers)
    until, note_at = time.monotonic() + wait_s, time.monotonic() + 2
    try:
        while not group.wait(timeout_seconds=1):
            now = time.monotonic()
            if now > until:
                for_whom = " for the autoscaler, cluster.autoscale_wait_s" if crew.missing and not crew.held else ""
                raise ClusterError(f"{_lacking(crew)} (waited {wait_s:g} s{for_whom}); {_advice(crew)}")
            if now > note_at:
                report.line(f"waiting, {until - now:.0f} s more: {_lacking(crew)}")
                note_at = now + _REPEAT_S
    finally:
        remove_placement_group(group)


class Watch:
    """Says while a training runs that its workers wait for room: at the start, or when lost ones are to come back."""

    def __init__(self, crew: Crew, report: Reporter) -> None:
        self.crew, self.report = crew, report
        self.look_at = time.monotonic() + _REPEAT_S

    def look(self) -> None:
        """Look, not too often."""
        if time.monotonic() < self.look_at:
            return
        self.look_at = time.monotonic() + _REPEAT_S
        kind = "GPU" if self.crew.gpu else "CPU"
        wanted = [{kind: 1.0}] * self.crew.workers  # as Ray Train asks for them
        groups = placement_group_table().values()
        if any(group["state"] == "PENDING" and list(group["bundles"].values()) == wanted for group in groups):
            self.report.line(f"workers wait for room: {_lacking(self.crew)}")


def _lacking(crew: Crew) -> str:
    """What does not fit, and who holds what is there."""
    kind, there = "GPU" if crew.gpu else "CPU", nodes()
    has = sum(node.gpus if crew.gpu else node.cpus for node in there)
    free = sum(int((node.free_gpus if crew.gpu else node.free_cpus) + 1e-6) for node in there)
    serving = _held_by_serving(kind)
    others = max(has - ray.available_resources().get(kind, 0.0) - serving, 0.0)  # type: ignore[no-untyped-call]
    held = [
        f"{who} {amount:g}" for who, amount in (("serving holds", serving), ("others hold", others)) if amount > 0.01
    ]
    return f"--workers {crew.workers}: {free} of the cluster's {has:g} {kind}s are free" + "".join(
        f", {one}" for one in held
    )


def _held_by_serving(kind: str) -> float:
    groups = [
        group
        for group in placement_group_table().values()
        if group["state"] == "CREATED" and str(group["name"]).startswith(SERVING)
    ]
    return float(sum(bundle.get(kind, 0.0) for group in groups for bundle in group["bundles"].values()))


def _advice(crew: Crew) -> str:
    if not crew.gpu:
        return "stop serving first, ask for fewer, or add nodes"
    return f"stop serving first, raise max_workers in the cluster's file, ask for fewer, or {_ON_CPU}"

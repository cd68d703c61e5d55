"""The device of an actor: the GPU that Ray assigned to it, and the CPU where it assigned none."""

import ray
import torch

from airmoe_ray.runtime.device import assigned_device

_INSTEAD = "set cluster.gpus_per_expert=0 (cluster.gpus_per_cloud=0, train.device=cpu) for the CPU"


def assigned_gpus() -> tuple[str, ...]:
    """Ids of the GPUs that Ray assigned to this process; none outside of Ray."""
    if not ray.is_initialized():
        return ()
    return tuple(str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def own_device(*, threads: int = 0) -> torch.device:
    """Where this process computes; an error where its GPU cannot be used."""
    return assigned_device(assigned_gpus(), threads=threads, instead=_INSTEAD)

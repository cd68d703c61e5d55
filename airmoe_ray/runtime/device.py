"""Where tensors live: chosen once, by name or by a scheduler; and memory that is kept for the next ones."""

import ctypes
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from airmoe_ray.errors import UserError

LOGICAL_GPUS = "AIRMOE_LOGICAL_GPUS"  # 1, for tests alone: a GPU that is assigned but absent is the CPU

log = logging.getLogger("airmoe")

# of glibc's malloc.h: no block of its own for large tensors, none given back below 2 GB, more at a time, one pool
_KEEP_MEMORY = ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 26), (-8, 1))


def pick_device(name: str, *, threads: int = 0) -> torch.device:
    """`auto` is a GPU when there is one; anything else is torch's name of a device. `threads` of the CPU, 0 for all."""
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"train.device = {name!r}: not usable here ({str(error).splitlines()[0]}); try auto") from None
    return device


def check_device_name(name: str) -> None:
    """Refuse what no machine has; whether another machine can use it is for that one to say."""
    try:
        torch.device("cpu" if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"train.device = {name!r}: no device ({str(error).splitlines()[0]}); try auto") from None


def assigned_device(gpus: Sequence[str], *, threads: int = 0, instead: str) -> torch.device:
    """The device of a process to which a scheduler has assigned these GPUs, by their ids, and no other.

    None assigned is the CPU, whatever the machine has: a GPU that nobody counted belongs to somebody else. One that is
    assigned and cannot be used is an error, which says what to do `instead`.
    """
    if gpus and os.environ.get(LOGICAL_GPUS) == "1" and not torch.cuda.is_available():
        log.warning("GPU %s was assigned, and the machine has none: on the CPU (%s=1)", gpus[0], LOGICAL_GPUS)
        gpus = ()
    if not gpus:
        return pick_device("cpu", threads=threads)
    shown = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    device = torch.device("cuda", shown.index(gpus[0]) if gpus[0] in shown else int(gpus[0]))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise UserError(
            f"GPU {gpus[0]} was assigned and cannot be used ({reason}; driver {_driver_version()}, torch "
            f"{torch.__version__} for CUDA {torch.version.cuda or 'none'}); install a torch and a driver that fit each "
            f"other, or {instead}"
        ) from None
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    return device


def _driver_version() -> str:
    """The version of the NVIDIA driver that the kernel has loaded."""
    try:
        found = re.search(r"(\d+\.\d+[.\d]*)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "not loaded"
    return found[1] if found else "unknown"


def keep_freed_memory() -> None:
    """Let glibc keep freed tensors' memory for the next ones.

    By default it gives every large block back to the kernel, which fills the next one with zeros page by page: of the
    backbone's time on a CPU that was 30 % for one image of 640 x 480 and 60 % for eight. A process then stays as large
    as it has once been. Other C libraries have no such settings, and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _KEEP_MEMORY:
            mallopt(setting, value)


def pick_precision(name: str, device: torch.device) -> torch.dtype | None:
    """Number format of the experts' convolutions in training; None is the parameters' own."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.bfloat16 if name == "bfloat16" else None

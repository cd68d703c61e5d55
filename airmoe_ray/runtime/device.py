"""Where tensors live: chosen once, by name; and memory that is kept for the next ones."""

import ctypes

import torch

from airmoe_ray.errors import UserError

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

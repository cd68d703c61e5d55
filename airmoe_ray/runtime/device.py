"""Where tensors live: chosen once, by name."""

import torch

from airmoe_ray.errors import UserError


def pick_device(name: str, *, threads: int = 0) -> torch.device:
    """`auto` is a GPU when there is one; anything else is torch's name of a device. `threads` of the CPU, 0 for all."""
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


def pick_precision(name: str, device: torch.device) -> torch.dtype | None:
    """Number format of the experts' convolutions in training; None is the parameters' own."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.bfloat16 if name == "bfloat16" else None

"""An image as the backbone takes it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.transforms import fit, pad_to_multiple


def prepare(image: UInt8Array, *, image_size: int | None, multiple: int) -> tuple[UInt8Array, tuple[int, int]]:
    """An image as the backbone takes it: fitted to the long side (None keeps its size), padded; and its valid size."""
    fitted = image if image_size is None else fit(image, image_size)
    return pad_to_multiple(fitted, multiple)


def to_tensor(images: Sequence[UInt8Array], device: torch.device | None = None) -> Tensor:
    """Equal-sized RGB images as (B, 3, H, W) in [0, 1]; bytes go to the device, and become numbers there."""
    return torch.from_numpy(np.stack(images)).to(device).permute(0, 3, 1, 2).float().div_(255.0)

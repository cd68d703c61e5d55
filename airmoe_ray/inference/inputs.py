"""Images as programs have them, a path, the bytes of a file, a PIL image or an array, as RGB pixels."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.errors import DataError, UserError
from airmoe_ray.inference.decode import ImageError, TooManyPixelsError, decode, pixels_of

ImageInput = str | os.PathLike[str] | bytes | Image.Image | NDArray[np.uint8]


def read_pixels(image: ImageInput, *, max_pixels: int, long_side: int | None = None) -> tuple[UInt8Array, UInt8Array]:
    """RGB pixels (H, W, 3), upright, and those that are to be scaled down to `long_side`: mostly the same.

    Files are decoded as the server decodes them.
    """
    if isinstance(image, str | os.PathLike):
        return _from_file(Path(image).expanduser(), max_pixels, long_side)
    if isinstance(image, bytes | bytearray | memoryview):
        return _decoded(bytes(image), max_pixels, long_side)
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if not isinstance(image, Image.Image):
        raise UserError(f"image: {type(image).__name__} is not taken; give a path, bytes, a PIL image or a NumPy array")
    if not image.width or not image.height:
        raise UserError(f"image: {image.width} x {image.height} has no pixels")
    if image.width * image.height > max_pixels:
        raise TooManyPixelsError(image.width * image.height, max_pixels)
    rgb = pixels_of(image)
    return rgb, rgb


def _from_file(path: Path, max_pixels: int, long_side: int | None) -> tuple[UInt8Array, UInt8Array]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of an image") from None
    try:
        return _decoded(data, max_pixels, long_side)
    except ImageError as error:
        raise DataError(f"{path}: {error}") from None


def _decoded(data: bytes, max_pixels: int, long_side: int | None) -> tuple[UInt8Array, UInt8Array]:
    fewer = decode(data, max_pixels=max_pixels, long_side=long_side)
    return (fewer if fewer.whole else decode(data, max_pixels=max_pixels)).rgb, fewer.rgb


def _from_array(pixels: NDArray[Any]) -> Image.Image:
    grey_or_colour = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype != np.uint8 or not grey_or_colour or 0 in pixels.shape:
        shape = " x ".join(map(str, pixels.shape))
        raise UserError(f"image: an array of {shape} {pixels.dtype}; expected uint8 (H, W), (H, W, 3) or (H, W, 4)")
    return Image.fromarray(pixels)

"""Images made on the spot, as files of every kind."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.inference.decode import (
    decode,
)

LIMIT = 1_000_000
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "TIFF": {}}
CLASSES = ClassTable(("road", "sky", "car"), ((128, 64, 128), (70, 130, 180), (0, 0, 142)))


def photo(height: int = 24, width: int = 40) -> UInt8Array:
    """Smooth, with a different colour in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([y * 255 // height, x * 255 // width, (x + y) * 2], axis=2).astype(np.uint8)


def saved(image: Image.Image | UInt8Array, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> UInt8Array:
    return decode(data, max_pixels=LIMIT).rgb


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of a stated size and given further chunks."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *chunks, (b"IEND", b"")]
    body = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)

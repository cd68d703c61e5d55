"""Encodes masks: index, colour and overlay PNGs, arrays, and one binary mask per class.

PNGs are written here rather than by Pillow: rows are filtered with Up (a mask's row mostly repeats the one above) and
deflated with zlib-ng's run-length strategy, in bands, so that little memory is needed beside the file itself. Of a mask
of 12 megapixels it makes the same 26 to 37 kB as zlib in a fifth of the time (docs/performance.md).
"""

import io
import struct
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from airmoe_ray.data.base import ClassTable, UInt8Array
from airmoe_ray.inference.pictures import colour_mask, overlay
from api.http.codec.polygons import outlines
from api.http.codec.rle import encode_classes
from api.http.schemas import Format, Rle, Segment

_GREY, _RGB, _PALETTE = 0, 2, 3  # colour types of the PNG format
_UP = 2  # its filter "difference to the row above"
_BAND_PIXELS = 1 << 18


def index_png(mask: UInt8Array, classes: ClassTable) -> bytes:
    """Palette PNG whose pixel values are the class ids."""
    palette = colour_mask(np.arange(256, dtype=np.uint8), classes)
    return _png(mask.shape, (mask[rows] for rows in _bands(mask)), colour_type=_PALETTE, palette=palette.tobytes())


def colour_png(mask: UInt8Array, classes: ClassTable) -> bytes:
    """RGB PNG of the classes' colours."""
    return _png(mask.shape, (colour_mask(mask[rows], classes) for rows in _bands(mask)), colour_type=_RGB)


def overlay_png(rgb: UInt8Array, mask: UInt8Array, classes: ClassTable) -> bytes:
    """RGB PNG of the image with the mask's colours over it."""
    if rgb.shape != (*mask.shape, 3):
        raise ValueError(f"image {rgb.shape} and mask {mask.shape} differ in size")
    return _png(mask.shape, _overlay_bands(rgb, mask, classes), colour_type=_RGB)


def npy(mask: UInt8Array) -> bytes:
    """The index array in NumPy's file format."""
    buffer = io.BytesIO()
    np.save(buffer, mask, allow_pickle=False)
    return buffer.getvalue()


def segments(
    mask: UInt8Array,
    score_C: NDArray[np.floating],
    area_C: NDArray[np.integer],
    classes: ClassTable,
    *,
    form: Format = "png",
    threshold: float | None = None,
) -> list[Segment]:
    """The classes present, in order of their ids; scores and areas are those of `mask_and_scores`.

    Those with a score below `threshold` are left out.
    """
    present = [int(c) for c in np.flatnonzero(area_C) if threshold is None or score_C[c] >= threshold]
    return [
        Segment(label=classes.names[c], id=c, score=float(score_C[c]), area=int(area_C[c]), mask=own_mask)
        for c, own_mask in zip(present, _own_masks(mask, present, form), strict=True)
    ]


def _own_masks(mask: UInt8Array, class_ids: Sequence[int], form: Format) -> Sequence[str | Rle | list[list[int]]]:
    """Each class's own mask, in the form that was asked for."""
    if form == "rle":
        return encode_classes(mask, class_ids)
    if form == "polygons":
        return [outlines(mask, c) for c in class_ids]
    return [base64_text(binary_png(mask, c)) for c in class_ids]


def binary_png(mask: UInt8Array, class_id: int) -> bytes:
    """8-bit greyscale PNG: 255 where the mask is of one class, else 0."""
    full = np.uint8(255)
    bands = ((mask[rows] == class_id).view(np.uint8) * full for rows in _bands(mask))
    return _png(mask.shape, bands, colour_type=_GREY)


def base64_text(data: bytes) -> str:
    """Bytes as base64 text, for JSON."""
    return b64encode(data).decode("ascii")


def _overlay_bands(rgb: UInt8Array, mask: UInt8Array, classes: ClassTable) -> Iterator[UInt8Array]:
    for rows in _bands(mask):
        first = max(rows.start - 1, 0)  # borders are drawn where a pixel differs from the one above
        yield overlay(rgb[first : rows.stop], mask[first : rows.stop], classes)[rows.start - first :]


def _bands(mask: UInt8Array) -> Iterator[slice]:
    height, width = mask.shape
    step = max(1, _BAND_PIXELS // width)
    return (slice(top, min(top + step, height)) for top in range(0, height, step))


def _png(shape: tuple[int, ...], bands: Iterable[UInt8Array], *, colour_type: int, palette: bytes = b"") -> bytes:
    """Write an 8-bit PNG of pixel rows that come in bands."""
    height, width = shape
    deflate = zlib_ng.compressobj(level=1, strategy=zlib_ng.Z_RLE)
    packed = []
    above: UInt8Array | None = None  # the last row of the band before
    for band in bands:
        rows = band.reshape(len(band), -1)
        filtered = np.empty((len(rows), rows.shape[1] + 1), dtype=np.uint8)
        filtered[:, 0] = _UP
        filtered[0, 1:] = rows[0] if above is None else rows[0] - above
        np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
        packed.append(deflate.compress(filtered.data))
        above = rows[-1]
    packed.append(deflate.flush())
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", b"".join(packed)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks if data or name == b"IEND")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib_ng.crc32(data, zlib_ng.crc32(name)))

"""Decodes images from strangers to RGB pixels; their size is checked before anything is decoded.

The content decides what an image is, not its name or declared type. Only five decoders can ever run. Colour profiles
are ignored, as they are in training; the first frame of several is taken; transparent pixels show white, which is
what people see where they look at such a picture.

A JPEG can be decoded at a half, a quarter or an eighth of its size for a fraction of the time, since its blocks are
stored as frequencies. Where the picture is scaled down further anyway, `long_side` allows that.
"""

import io
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.errors import UserError

_MEDIA_TYPE_OF = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
}
MEDIA_TYPES = frozenset({*_MEDIA_TYPE_OF.values(), "application/octet-stream"})
"""Types a body may be declared as; another one is 415. Which of them it is, the content decides."""

_ON_THE_SIDE = frozenset({5, 6, 7, 8})  # EXIF orientations that swap height and width
_SPARE = 2  # pixels decoded for each that is wanted, along a side; with 1, masks change in twice as many pixels
_NAMES = "PNG, JPEG, WEBP, BMP or TIFF"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (  # offset, bytes, media type
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\0", "image/tiff"),
    (0, b"MM\0*", "image/tiff"),
    (0, b"II+\0", "image/tiff"),
    (0, b"MM\0+", "image/tiff"),
    (0, b"GIF8", "image/gif"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftypavis", "image/avif"),
    (4, b"ftyphe", "image/heic"),
    (4, b"ftypmif1", "image/heic"),
    (0, b"\0\0\0\x0cjP  ", "image/jp2"),
    (0, b"\xff\x0a", "image/jxl"),
    (0, b"\0\0\0\x0cJXL ", "image/jxl"),
    (0, b"8BPS", "image/vnd.adobe.photoshop"),
    (0, b"%PDF", "application/pdf"),
    (0, b"%!PS", "application/postscript"),
    (0, b"<svg", "image/svg+xml"),
)

# Pillow warns of odd metadata and of sizes that are checked here. By module: `catch_warnings` is not safe in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class ImageError(UserError):
    """A file that cannot be taken as an image; `status` is what a server answers."""

    status = 400


class NotAnImageError(ImageError):
    """A file that is no image at all, or a broken one."""


class UnsupportedTypeError(ImageError):
    """An image, or a document, of a kind that is not taken."""

    status = 415

    def __init__(self, media_type: str) -> None:
        super().__init__(media_type)
        self.media_type = media_type

    def __str__(self) -> str:
        return f"{self.media_type} is not taken; send {_NAMES}"


class TooManyPixelsError(ImageError):
    """An image whose header states more pixels than allowed."""

    status = 413

    def __init__(self, pixels: int, limit: int) -> None:
        super().__init__(pixels, limit)  # both, so that it survives pickling
        self.pixels, self.limit = pixels, limit

    def __str__(self) -> str:
        return f"the image has {self.pixels} pixels, the limit is {self.limit}; send a smaller one"


@dataclass(frozen=True)
class Picture:
    """A decoded image, upright."""

    rgb: UInt8Array  # (H, W, 3), or fewer of a JPEG that was decoded at a part of its size
    format: str  # PNG, JPEG, WEBP, BMP or TIFF
    size: tuple[int, int]  # height and width of the image itself

    @property
    def whole(self) -> bool:
        """Whether all its pixels are there."""
        return self.rgb.shape[:2] == self.size


def sniff(data: bytes) -> str | None:
    """Media type by the first bytes, also of common kinds that are not taken; None if nothing is known about them."""
    for offset, magic, media_type in _MAGIC:
        if data.startswith(magic, offset) and (media_type != "image/webp" or data.startswith(b"RIFF")):
            return media_type
    return None


def decode(data: bytes, *, max_pixels: int, long_side: int | None = None) -> Picture:
    """Decode an image in memory to RGB pixels, rotated as its EXIF data says.

    Of a JPEG that is to be scaled down to `long_side`, fewer pixels are decoded, but never below twice that size.
    """
    if not data:
        raise NotAnImageError(f"the file is empty; send {_NAMES}")
    media_type = sniff(data)
    if media_type is None:
        raise NotAnImageError(f"the file is not an image; send {_NAMES}")
    if media_type not in MEDIA_TYPES:
        raise UnsupportedTypeError(media_type)
    (name,) = (name for name, known in _MEDIA_TYPE_OF.items() if known == media_type)
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:
                raise TooManyPixelsError(pixels, max_pixels)
            width, height = image.size
            if long_side is not None:
                _decode_fewer(image, long_side)
            image.load()
            turned = _orientation(image) in _ON_THE_SIDE
            return Picture(pixels_of(image), name, (width, height) if turned else (height, width))
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        stated = re.search(r"\((\d+) pixels\)", str(error))  # Pillow's own limit comes before the size is known here
        raise TooManyPixelsError(int(stated[1]) if stated else max_pixels + 1, max_pixels) from None
    except Exception as error:  # decoders raise whatever comes, from SyntaxError to struct.error
        raise NotAnImageError(f"the {name} is truncated, damaged or of an unusual kind") from error


def _decode_fewer(image: Image.Image, long_side: int) -> None:
    """Have a JPEG decoded at the smallest of its sizes that leaves enough to scale down; others stay as they are."""
    width, height = image.size
    scale = max(width, height) / (_SPARE * long_side)
    if scale > 1:
        image.draft(None, (math.ceil(width / scale), math.ceil(height / scale)))


def pixels_of(image: Image.Image) -> UInt8Array:
    """8-bit RGB pixels (H, W, 3) of an image of any mode, upright."""
    return _upright(_rgb(image), _orientation(image))


def _rgb(image: Image.Image) -> UInt8Array:
    """Pixels of any mode as 8-bit RGB."""
    if image.mode.startswith("I;16"):
        return _grey((np.asarray(image).astype(np.uint32) + 128) // 257)  # 65535 = 255 * 257
    if image.mode in {"I", "F"}:
        return _grey(_to_bytes(np.asarray(image)))
    if image.mode == "LAB":
        image = _from_lab(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGB", image.size, "white")
        paper.paste(image, mask=image.getchannel("A"))
        image = paper
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _to_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """32-bit samples as 0 to 255, from the narrowest of the usual ranges that holds them, else from their own."""
    values = np.nan_to_num(values.astype(np.float32), copy=False, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 65535:
        low, high = 0.0, next(top for top in (1.0, 255.0, 65535.0) if high <= top)
    scale = 255 / max(high - low, 1e-30) if high > low else 0.0
    values *= scale
    values -= low * scale
    return np.rint(values, out=values).clip(0, 255, out=values)


def _grey(values: NDArray[Any]) -> UInt8Array:
    return np.repeat(values.astype(np.uint8)[..., None], 3, axis=2)


def _from_lab(image: Image.Image) -> Image.Image:
    converted = ImageCms.profileToProfile(
        image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert converted is not None, "not in place"
    return converted


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 (upright) where the metadata is missing or broken."""
    try:
        return int(image.getexif().get(0x0112, 1))  # Pillow has turned a TIFF already, and taken the tag away
    except Exception:
        return 1


def _upright(rgb: UInt8Array, orientation: int) -> UInt8Array:
    if orientation in _ON_THE_SIDE:
        rgb = rgb.transpose(1, 0, 2)
    if orientation in {3, 4, 7, 8}:
        rgb = rgb[::-1]
    if orientation in {2, 3, 6, 7}:
        rgb = rgb[:, ::-1]
    return np.ascontiguousarray(rgb)

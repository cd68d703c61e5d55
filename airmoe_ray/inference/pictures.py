"""Pictures for people: masks in colour, overlays, and sheets of image, truth and prediction."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from airmoe_ray.data.base import IGNORE, ClassTable, UInt8Array

_GAP = 6  # pixels between tiles
_INK = (32, 34, 38)
_PAPER = (255, 255, 255)


def colour_mask(mask: UInt8Array, classes: ClassTable) -> UInt8Array:
    """Class ids as colours; void is black."""
    table = np.zeros((256, 3), dtype=np.uint8)
    table[: len(classes.palette)] = classes.palette
    for label, union in enumerate(classes.unions, start=len(classes.palette)):
        table[label] = classes.palette[union[0]]
    table[IGNORE] = 0
    return np.take(table, mask, axis=0)  # four times as fast as table[mask]


def overlay(image: UInt8Array, mask: UInt8Array, classes: ClassTable, *, opacity: float = 0.55) -> UInt8Array:
    """The image with the mask's colours over it; class borders keep full colour so that thin things stay visible."""
    colours = colour_mask(mask, classes).astype(np.float32)
    blended = image.astype(np.float32) * (1 - opacity) + colours * opacity
    border = np.zeros(mask.shape, dtype=bool)
    border[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    border[1:] |= mask[1:] != mask[:-1]
    blended[border] = colours[border]
    return blended.astype(np.uint8)


def sheet(
    rows: Sequence[Sequence[UInt8Array]],
    *,
    columns: Sequence[str],
    names: Sequence[str],
    classes: ClassTable,
    tile: tuple[int, int] = (192, 256),
) -> Image.Image:
    """A grid of pictures with column titles, row names and a legend of the classes."""
    height, width = tile
    margin, head, legend = 64, 28, 30
    total_w = margin + len(columns) * (width + _GAP)
    per_line = max(1, (total_w - margin) // 118)
    legend_lines = -(-len(classes.names) // per_line)
    page = Image.new("RGB", (total_w, head + len(rows) * (height + _GAP) + legend_lines * 22 + legend // 2), _PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=14)
    for c, title in enumerate(columns):
        draw.text((margin + c * (width + _GAP) + width / 2, head / 2), title, _INK, font, anchor="mm")
    for r, (name, pictures) in enumerate(zip(names, rows, strict=True)):
        top = head + r * (height + _GAP)
        draw.text((margin - 8, top + height / 2), name, _INK, font, anchor="rm")
        for c, picture in enumerate(pictures):
            page.paste(
                Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR),
                (margin + c * (width + _GAP), top),
            )
    top = head + len(rows) * (height + _GAP) + 8
    for k, (name, colour) in enumerate(zip(classes.names, classes.palette, strict=True)):
        x, y = margin + (k % per_line) * 118, top + (k // per_line) * 22
        draw.rounded_rectangle((x, y, x + 14, y + 14), radius=3, fill=colour, outline=_INK)
        draw.text((x + 20, y + 7), name.replace("_", " "), _INK, font, anchor="lm")
    return page

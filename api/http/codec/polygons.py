"""Outlines of masks as polygons in COCO's form, along the edges of pixels: what they enclose is the mask, exactly.

The pixel of row y and column x is the square from (x, y) to (x + 1, y + 1). Pixels that share an edge hang together,
those that share only a corner do not; each component is one polygon. COCO's polygons have no holes, so a hole is joined
to the outline left of it by a slit of no width; whoever counts crossings, as COCO's own tools do, sees the hole.

Such outlines turn at right angles, so their corners tell everything: along a line of the pixel grid the first corner is
joined to the second, the third to the fourth. Rows and columns by turns lead round an outline.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.data.base import UInt8Array

_Point = tuple[int, int]  # x, y
_Slits = dict[int, list[list[_Point]]]  # by the corner that a vertical edge starts at: ways round holes right of it


def outlines(mask: UInt8Array, class_id: int) -> list[list[int]]:
    """Polygons x1, y1, x2, y2, … round the pixels (H, W) of one class, one per component, from top to bottom."""
    inside = mask == class_id
    rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    if not rows.size:
        return []
    top, left = int(rows[0]), int(columns[0])
    padded = np.pad(inside[top : rows[-1] + 1, left : columns[-1] + 1], 1)
    corners = _Corners.of(padded)
    slits: _Slits = {}
    polygons = []
    for ring, is_hole in reversed(_rings(corners, padded)):  # a hole is joined to a ring that was found before it
        way = _way(ring, corners, slits)
        if is_hole:
            slits.setdefault(corners.left_of(way[0], padded), []).append(way)
        else:
            polygons.append([value for x, y in way for value in (x + left, y + top)])
    return polygons[::-1]


@dataclass(frozen=True)
class _Corners:
    """All corners of the outlines, row by row; where two pixels touch across, there are two at one place."""

    x: NDArray[np.int64]
    y: NDArray[np.int64]
    along_row: NDArray[np.int64]  # the corner at the other end of the horizontal edge
    along_column: NDArray[np.int64]  # and of the vertical one
    by_column: NDArray[np.int64]  # corners column by column; two and two are a vertical edge

    @classmethod
    def of(cls, padded: NDArray[np.bool_]) -> "_Corners":
        """Find the corners of a mask with an empty border, and which are joined by an edge."""
        nw, ne, sw, se = padded[:-1, :-1], padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
        across = (nw == se) & (ne == sw) & (nw != ne)
        y, x = np.nonzero((nw ^ ne ^ sw ^ se) | across)
        twice = across[y, x]
        first = np.cumsum(1 + twice) - (1 + twice)  # of the corners at each place
        y, x, twice = (np.repeat(values, 1 + twice) for values in (y, x, twice))
        # of two corners at a place, the first ends the edge from the left; it ends the one from above, too, where
        # these are edges of one pixel, else it starts the one downwards
        is_second = np.ones(len(y), dtype=bool)
        is_second[first] = False
        starts_down = np.where(twice & ~nw[y, x], ~is_second, is_second)
        by_column = np.lexsort((starts_down, y, x))
        along_row = np.arange(len(y)) ^ 1
        along_column = np.empty_like(along_row)
        along_column[by_column] = by_column[along_row]
        return cls(x, y, along_row, along_column, by_column)

    def left_of(self, point: _Point, padded: NDArray[np.bool_]) -> int:
        """The corner where the nearest edge left of a hole's first corner starts: its lower one, see `_rings`."""
        x, y = point
        filled = padded[y + 1, : x + 1]  # the row of pixels below the point, up to it
        edge_x = x - int(np.argmin(filled[::-1]))
        column = slice(*np.searchsorted(self.x, [edge_x, edge_x + 1], sorter=self.by_column))
        above = int(np.searchsorted(self.y[self.by_column[column]], y, side="right"))
        return int(self.by_column[column][above])


def _rings(corners: _Corners, padded: NDArray[np.bool_]) -> list[tuple[list[int], bool]]:
    """Outlines as corners in order, and whether each is round a hole; the mask is on the right of every edge."""
    along_row, along_column = corners.along_row.tolist(), corners.along_column.tolist()
    fills = padded[corners.y + 1, corners.x + 1].tolist()  # the pixel below and right of a corner
    seen = bytearray(len(fills))
    rings = []
    for start, is_hole in enumerate(not fill for fill in fills):
        if seen[start]:
            continue
        # the topmost corner of its ring, and the leftmost there: edges lead from it to the right and down
        first, second = (along_column, along_row) if is_hole else (along_row, along_column)
        ring: list[int] = []
        corner = start
        while not seen[corner]:
            other = first[corner]
            seen[corner] = seen[other] = 1
            ring += (corner, other)
            corner = second[other]
        rings.append((ring, is_hole))
    return rings


def _way(ring: list[int], corners: _Corners, slits: _Slits) -> list[_Point]:
    """Points round a ring, with a detour round each hole that is joined to it."""
    points = list(zip(corners.x[ring].tolist(), corners.y[ring].tolist(), strict=True))
    if not any(corner in slits for corner in ring):
        return points
    way: list[_Point] = []
    for corner, point in zip(ring, points, strict=True):
        if not way or way[-1] != point:  # a slit may start where the edge ends
            way.append(point)
        for hole in sorted(slits.get(corner, ()), key=lambda hole: -hole[0][1]):  # the edge leads upwards
            place = (point[0], hole[0][1])
            way += [place, *hole, hole[0], place]
    return way

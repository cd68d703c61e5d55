"""Where things are in a procedural street: the classes, the camera, the cross-section of the street.

World axes in metres, seen from the camera: x to the right, y up from the ground, z forward. Colours are RGB in [0, 1]
and come first (3HW): numpy is several times quicker when the innermost axis is long.
Suffixes of all files here: H W image, L a list of its pixels, G those of them that are glass.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
Point = tuple[float, float]

FAR_M = 300.0  # depth of the sky: finite, so that fog and lighting need no special case
NEAR_M = 1.2


class Kind(IntEnum):
    """Class ids, in label order."""

    ROAD = 0
    LANE_MARK = 1
    SIDEWALK = 2
    BUILDING = 3
    VEGETATION = 4
    SKY = 5
    VEHICLE = 6
    PERSON = 7
    POLE = 8
    SIGN = 9


@dataclass(frozen=True)
class Camera:
    """Pinhole above a flat street that bends sideways by `bend_per_m` * z^2 metres."""

    height_px: int
    width_px: int
    focal_px: float
    horizon_px: float  # row of the horizon: pitch
    vanish_px: float  # column of the vanishing point: yaw
    eye_m: float  # height above the ground
    bend_per_m: float

    def project(self, x_m: float, y_m: float, z_m: float) -> Point:
        """World point to (column, row)."""
        z_m = max(z_m, NEAR_M)
        column = self.vanish_px + self.focal_px * (x_m / z_m + self.bend_per_m * z_m)
        return column, self.horizon_px + self.focal_px * (self.eye_m - y_m) / z_m

    def sees(self, x_m: float, z_m: float) -> bool:
        """Whether the foot of something at (x, z) is inside the frame, with a small margin."""
        column = self.project(x_m, 0.0, z_m)[0]
        return 0.03 * self.width_px < column < 0.97 * self.width_px

    def ground(self) -> tuple[FloatArray, FloatArray]:
        """Depth of each row's ground (H,), FAR_M above the horizon, and lateral position of each pixel there (H, W)."""
        rows_H = np.arange(self.height_px, dtype=np.float32) + 0.5
        below_H = np.maximum(rows_H - self.horizon_px, self.focal_px * self.eye_m / FAR_M)
        z_H = (self.focal_px * self.eye_m / below_H).astype(np.float32)
        return z_H, self.lateral(z_H[:, None])

    def lateral(self, z_m: FloatArray) -> FloatArray:
        """Lateral position [m] of the ray through each column at depth z, which broadcasts against (W,)."""
        columns_W = np.arange(self.width_px, dtype=np.float32) + 0.5
        slope_W = (columns_W - self.vanish_px) / np.float32(self.focal_px)
        return (slope_W - np.float32(self.bend_per_m) * z_m) * z_m


@dataclass(frozen=True)
class Mark:
    """A painted line along the road; `dash_m` = 0 for a solid one."""

    x_m: float
    half_m: float
    dash_m: float
    yellow: bool


@dataclass(frozen=True)
class Street:
    """The cross-section, left to right: zone i lies between edges i-1 and i; the outermost zones are endless."""

    edges_m: tuple[float, ...]
    kinds: tuple[Kind, ...]
    road_m: tuple[float, float]
    walls_m: tuple[float, float]  # where the building lines stand
    marks: tuple[Mark, ...]
    crosswalk_m: float  # depth of its near edge, 0 for none

    def strips(self, kind: Kind) -> list[tuple[float, float]]:
        """The bounded zones of a kind, as (left, right)."""
        inner = zip(self.edges_m[:-1], self.edges_m[1:], self.kinds[1:-1], strict=True)
        return [(left, right) for left, right, zone in inner if zone is kind]


def draw_camera(rng: Generator, height: int, width: int) -> Camera:
    """A camera on a car or a pedestrian's head; focal length follows the smaller side so that layouts scale."""
    return Camera(
        height_px=height,
        width_px=width,
        focal_px=min(1.2 * height, 0.9 * width) * rng.uniform(0.85, 1.2),
        horizon_px=height * rng.uniform(0.34, 0.56),
        vanish_px=width * rng.uniform(0.24, 0.76),
        eye_m=rng.uniform(1.4, 2.3),
        bend_per_m=rng.normal(0.0, 0.0022),
    )


def _side(rng: Generator) -> list[tuple[Kind, float]]:
    """Strips from the kerb outwards; one side in six has no sidewalk."""
    walk, grass = (Kind.SIDEWALK, rng.uniform(2.2, 5.5)), (Kind.VEGETATION, rng.uniform(0.8, 3.0))
    layouts = ([walk], [walk, grass], [grass, walk], [walk], [walk, grass], [grass])
    return layouts[rng.integers(len(layouts))]


def draw_street(rng: Generator) -> Street:
    """A road of two to four lanes somewhere around the camera, with what lies beside it."""
    lanes = int(rng.integers(2, 5))
    lane_m = rng.uniform(2.6, 3.4)
    left = -lane_m * lanes * rng.uniform(0.35, 0.75)
    right = left + lane_m * lanes

    edges, kinds = [left, right], [Kind.ROAD]
    for kind, width in _side(rng):
        edges.insert(0, edges[0] - width)
        kinds.insert(0, kind)
    for kind, width in _side(rng):
        edges.append(edges[-1] + width)
        kinds.append(kind)
    ends = (Kind.VEGETATION, *kinds, Kind.VEGETATION)

    half = rng.uniform(0.09, 0.17)
    yellow = bool(rng.random() < 0.3)
    centre = int(rng.integers(1, lanes))
    marks = []
    for lane in range(1, lanes):
        dash = 0.0 if lane == centre and rng.random() < 0.5 else rng.uniform(4.0, 8.0)
        marks.append(Mark(left + lane * lane_m, half, dash, yellow and lane == centre))
    if rng.random() < 0.6:
        marks += [Mark(left + 0.35, half, 0.0, False), Mark(right - 0.35, half, 0.0, yellow)]
    crosswalk = rng.uniform(5.0, 13.0) if rng.random() < 0.35 else 0.0
    return Street(tuple(edges), ends, (left, right), (edges[0], edges[-1]), tuple(marks), crosswalk)

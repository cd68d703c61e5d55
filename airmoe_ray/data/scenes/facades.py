"""The lines of buildings and hedges along a street, ray-cast column by column, so all windows are in perspective."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.scenes.geometry import NEAR_M, Camera, FloatArray, Kind, Street
from airmoe_ray.data.scenes.textures import noise_tile, world_noise

REACH_M = 140.0  # the lines end here; beyond lies the distant skyline
SEGMENTS = 14  # per side
BLOCK_DEPTH_M = 16.0

IntArray = NDArray[np.intp]


@dataclass(frozen=True)
class Wall:
    """The pixels that show a wall, each with its place on the wall plane."""

    flat_L: IntArray  # index into the flattened image
    segment_L: IntArray
    z_L: FloatArray  # depth [m]
    u_L: FloatArray  # along the wall [m]
    v_L: FloatArray  # above the ground [m]


@dataclass(frozen=True)
class Layer:
    """Per column, one of the surfaces behind one another; `top_W` is the row of its upper edge."""

    z_W: FloatArray
    segment_W: IntArray
    u_W: FloatArray
    top_W: FloatArray


@dataclass(frozen=True)
class Facades:
    """Segments of the left line, then of the right line, then one for the skyline; arrays are indexed by segment."""

    walls_m: tuple[float, float]
    bounds_m: tuple[FloatArray, FloatArray]  # where each segment of a line starts, (SEGMENTS,)
    kinds: UInt8Array
    gap: NDArray[np.bool_]  # nothing there: one sees the front of the next segment
    height_m: FloatArray
    colour_3: FloatArray  # (3, segments)
    window_m: FloatArray  # (2, segments) spacing along u and v
    glazed: FloatArray  # part of the spacing that is glass
    sunny: FloatArray  # (segments,) brightness of the side wall

    def cast(self, camera: Camera, z_H: FloatArray) -> Wall:
        """Find the visible wall pixels: the near line, what rises behind it, the skyline."""
        left, right = self._line(camera, 0), self._line(camera, 1)
        nearer_W = left[0].z_W < right[0].z_W
        layers = [_pick(nearer_W, a, b) for a, b in zip(left, right, strict=True)]
        layers.append(self._skyline(camera))
        rows_H1 = np.arange(camera.height_px, dtype=np.float32)[:, None] + 0.5
        slope_H = (rows_H1[:, 0] - np.float32(camera.horizon_px)) / np.float32(camera.focal_px)
        free_HW = np.ones((camera.height_px, camera.width_px), np.bool_)
        parts = []
        for layer in layers:
            seen_HW = (rows_H1 > layer.top_W) & (z_H[:, None] > layer.z_W) & free_HW
            free_HW &= ~seen_HW
            flat_L = np.flatnonzero(seen_HW)
            row_L, column_L = np.divmod(flat_L, camera.width_px)
            z_L = layer.z_W[column_L]
            v_L = camera.eye_m - slope_H[row_L] * z_L
            parts.append((flat_L, layer.segment_W[column_L], z_L, layer.u_W[column_L], v_L))
        return Wall(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _line(self, camera: Camera, side: int) -> tuple[Layer, Layer]:
        """The near surface of one line in each column, and the front that rises behind it."""
        wall, bounds, offset = self.walls_m[side], self.bounds_m[side], side * SEGMENTS
        # invert column(z) on its monotone stretch; a bend hides what comes after
        depth_m = np.geomspace(NEAR_M, REACH_M, 160)
        outward = np.copysign(1.0, wall)
        offset_px = outward * camera.focal_px * (wall / depth_m + camera.bend_per_m * depth_m)
        monotone = slice(int(np.argmin(offset_px)), None, -1)
        columns_W = outward * (np.arange(camera.width_px) + 0.5 - camera.vanish_px)
        z_W = np.interp(columns_W, offset_px[monotone], depth_m[monotone], left=10 * REACH_M).astype(np.float32)
        here_W = np.clip(np.searchsorted(bounds, z_W, side="right") - 1, 0, SEGMENTS - 2)
        through_W = self.gap[offset + here_W]
        near_W = here_W + through_W
        front_W = bounds[near_W]
        u_W = np.where(through_W, camera.lateral(front_W), z_W)
        near = self._layer(camera, np.where(through_W, front_W, z_W), offset + near_W, u_W)

        next_W = np.minimum(near_W + 1, SEGMENTS - 1)
        next_W = np.minimum(next_W + self.gap[offset + next_W], SEGMENTS - 1)
        z_next_W = np.maximum(bounds[next_W], near.z_W)
        u_next_W = camera.lateral(z_next_W)
        behind = self._layer(camera, z_next_W, offset + next_W, u_next_W)
        behind.top_W[np.abs(u_next_W) > abs(wall) + BLOCK_DEPTH_M] = camera.height_px
        return near, behind

    def _layer(self, camera: Camera, z_W: FloatArray, segment_W: IntArray, u_W: FloatArray) -> Layer:
        ragged_W = np.where(
            self.kinds[segment_W] == Kind.VEGETATION, 0.35 * noise_tile(1.0)[0, (u_W * 4).astype(np.intp) & 511], 0.0
        )
        top_W = camera.horizon_px - camera.focal_px * (self.height_m[segment_W] + ragged_W - camera.eye_m) / z_W
        return Layer(z_W, segment_W, u_W, top_W.astype(np.float32))

    def _skyline(self, camera: Camera) -> Layer:
        columns_W = np.arange(camera.width_px, dtype=np.float32) - np.float32(camera.vanish_px)
        z_W = np.full(camera.width_px, 1.3 * REACH_M, np.float32)
        segment_W = np.full(camera.width_px, 2 * SEGMENTS, np.intp)
        layer = self._layer(camera, z_W, segment_W, columns_W * z_W / np.float32(camera.focal_px))
        roofs_W = noise_tile(0.0)[7, (layer.u_W / 9.0).astype(np.intp) & 511]
        layer.top_W[:] += 2.0 * camera.focal_px / REACH_M * roofs_W
        return layer

    def shade(self, rng: Generator, wall: Wall) -> tuple[FloatArray, FloatArray]:
        """Colour (3, L) and glow (L,) of wall pixels: plaster, brick courses, windows, shop fronts, leaves."""
        segment_L, u_L, v_L = wall.segment_L, wall.u_L, wall.v_L
        leafy = self.kinds == Kind.VEGETATION
        grain = np.where(leafy, np.float32(0.34), np.float32(0.07))
        sharp_L = np.clip(1.4 - wall.z_L / 70.0, 0.0, 1.0)
        height_L, glazed_L = self.height_m[segment_L], self.glazed[segment_L]
        shade_L = 1.0 + grain[segment_L] * sharp_L * world_noise(1.0, v_L, u_L, 20.0)
        course_L = 3.0 * v_L
        course_L = (course_L - np.floor(course_L) < 0.22) & (glazed_L < 0.55)  # brick houses have smaller windows
        shade_L -= np.float32(0.14) * course_L * sharp_L
        shade_L += np.float32(0.2) * (v_L > height_L - 0.45)  # cornice
        colour_3L = self.colour_3[:, segment_L] * (shade_L * self.sunny[segment_L])

        cu_L, cv_L = u_L / self.window_m[0, segment_L], v_L / self.window_m[1, segment_L]
        column_L, floor_L = np.floor(cu_L), np.floor(cv_L)
        shop_L = floor_L == 0
        inside_L = np.abs(cu_L - column_L - 0.5) < 0.5 * np.where(shop_L, np.float32(0.84), glazed_L)
        inside_L &= np.abs(cv_L - floor_L - 0.5) < np.where(shop_L, np.float32(0.36), np.float32(0.3))
        inside_L &= ~leafy[segment_L] & (v_L < height_L - 0.6)
        glass_L = np.flatnonzero(inside_L)

        cell_G = (37 * column_L[glass_L] + 101 * floor_L[glass_L]).astype(np.int32) + 53 * segment_L[glass_L]
        luck_G = noise_tile(0.0)[rng.integers(512), cell_G & 511]
        lit_G = luck_G > rng.uniform(0.0, 0.9)
        tone_G = 1.0 + np.float32(0.3) * luck_G
        sharp_G = sharp_L[glass_L]
        for colour_L, dark, warm in zip(colour_3L, (0.20, 0.26, 0.33), (0.62, 0.50, 0.32), strict=True):
            pane_G = np.where(lit_G, np.float32(warm), np.float32(dark)) * tone_G
            colour_L[glass_L] += (pane_G - colour_L[glass_L]) * sharp_G
        glow_L = np.zeros_like(u_L)
        glow_L[glass_L] = lit_G * sharp_G
        return colour_3L, glow_L

    def street_shadow(self, z_H: FloatArray, x_HW: FloatArray, sunny_side: float, per_m: float) -> FloatArray:
        """1 where the line on the sun's side (+1 right, -1 left) shades the ground; `per_m` is shadow per height."""
        side = int(sunny_side > 0)
        here_H = np.clip(np.searchsorted(self.bounds_m[side], z_H, side="right") - 1, 0, SEGMENTS - 1) + side * SEGMENTS
        reach_H = np.where(self.gap[here_H], 0.0, self.height_m[here_H] * per_m)
        edge_H = abs(self.walls_m[side]) - reach_H
        return (np.float32(sunny_side) * x_HW > edge_H[:, None]).astype(np.float32)


def _pick(first_W: NDArray[np.bool_], a: Layer, b: Layer) -> Layer:
    return Layer(
        np.where(first_W, a.z_W, b.z_W),
        np.where(first_W, a.segment_W, b.segment_W),
        np.where(first_W, a.u_W, b.u_W),
        np.where(first_W, a.top_W, b.top_W),
    )


def draw_facades(rng: Generator, street: Street) -> Facades:
    """Random blocks on both sides: houses of all colours and heights, hedges, gaps."""
    count = 2 * SEGMENTS + 1
    roll = rng.random(count)
    suburb = rng.uniform(0.05, 0.35)
    hedge, gap = roll < suburb, roll > 0.86
    gap[1:] &= ~gap[:-1]  # a gap shows the next segment's front, so that must be there
    gap[[SEGMENTS - 2, SEGMENTS - 1, -3, -2, -1]] = False

    length = np.where(gap, rng.uniform(3.0, 7.0, count), rng.uniform(7.0, 18.0, count))
    starts = [np.concatenate(([0.0], np.cumsum(part)[:-1])) for part in (length[:SEGMENTS], length[SEGMENTS:-1])]
    height = np.where(hedge, rng.uniform(1.0, 3.6, count), rng.uniform(4.5, 16.0, count) * rng.uniform(0.6, 1.3))
    height[-1] = rng.uniform(4.0, 14.0)

    grey = rng.uniform(0.25, 0.85, count)
    tint = rng.normal(0.0, 0.11, (3, count)) + np.array([[0.05], [0.0], [-0.05]])
    leaf = np.array([[0.20], [0.36], [0.14]]) * rng.uniform(0.6, 1.3, count) + rng.normal(0.0, 0.03, (3, count))
    sides = rng.uniform(0.62, 1.05, 2)
    return Facades(
        walls_m=street.walls_m,
        bounds_m=(starts[0].astype(np.float32), starts[1].astype(np.float32)),
        kinds=np.where(hedge, Kind.VEGETATION, Kind.BUILDING).astype(np.uint8),
        gap=gap,
        height_m=height.astype(np.float32),
        colour_3=np.clip(np.where(hedge, leaf, grey + tint), 0.05, 0.95).astype(np.float32),
        window_m=rng.uniform(((1.8,), (2.6,)), ((3.6,), (3.5,)), (2, count)).astype(np.float32),
        glazed=rng.uniform(0.35, 0.75, count).astype(np.float32),
        sunny=np.repeat(np.array([*sides, 0.9], np.float32), (SEGMENTS, SEGMENTS, 1)),
    )

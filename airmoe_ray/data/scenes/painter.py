"""Draws what stands on the street, far things first, so that near ones hide them in image, label and depth alike."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw

from airmoe_ray.data.scenes.backdrop import Layers
from airmoe_ray.data.scenes.geometry import Camera, Kind, Point
from airmoe_ray.data.scenes.textures import from_picture, leaf_masks, screen_noise, to_picture

Colour = tuple[int, int, int]
World = tuple[float, float, float]

MAX_IDS = 256  # a byte per pixel tells which thing it shows; 0 is the backdrop


class Painter:
    """Paints colour and, beside it, an id per pixel that looks up class, depth and glow."""

    def __init__(self, camera: Camera, layers: Layers) -> None:
        self.camera = camera
        self._image = to_picture(layers.albedo_3HW)
        self._ids = Image.new("L", self._image.size)
        self._shadow = Image.new("L", self._image.size)
        self._draw, self._draw_id = ImageDraw.Draw(self._image), ImageDraw.Draw(self._ids)
        self._draw_shadow = ImageDraw.Draw(self._shadow)
        self._kinds, self._depths, self._glows = [0], [0.0], [0.0]
        self._queue: list[tuple[float, Callable[[], None]]] = []

    def later(self, z_m: float, draw: Callable[[], None]) -> None:
        """Queue something to be drawn when everything behind it is."""
        self._queue.append((z_m, draw))

    def begin(self, kind: Kind, z_m: float, glow: float = 0.0) -> None:
        """All that is painted from here on is of this class and depth, and shines this much at night."""
        if len(self._kinds) == MAX_IDS:
            raise ValueError(f"more than {MAX_IDS - 1} things in one scene; draw fewer")
        self._kinds.append(kind)
        self._depths.append(z_m)
        self._glows.append(glow)

    def _flat(self, points: Sequence[Point], colour: Colour) -> None:
        """A polygon given in pixels."""
        self._draw.polygon(points, colour)
        self._draw_id.polygon(points, len(self._kinds) - 1)

    def poly(self, points: Sequence[World], colour: Colour) -> None:
        """A polygon given in the world."""
        self._flat([self.camera.project(*point) for point in points], colour)

    def card(self, z_m: float, x_m: float, outline: Sequence[Point], colour: Colour) -> None:
        """A polygon facing the camera, as (sideways from x, height) in metres."""
        column, row = self.camera.project(x_m, 0.0, z_m)
        scale = self.camera.focal_px / z_m
        self._flat([(column + scale * side, row - scale * height) for side, height in outline], colour)

    def disc(self, centre: World, radius_m: Point, colour: Colour) -> None:
        """An ellipse facing the camera."""
        column, row = self.camera.project(*centre)
        scale = self.camera.focal_px / centre[2]
        rx, ry = radius_m[0] * scale, radius_m[1] * scale
        box = (column - rx, row - ry, column + rx, row + ry)
        self._draw.ellipse(box, colour)
        self._draw_id.ellipse(box, len(self._kinds) - 1)

    def leaves(self, centre: World, radius_m: Point, colour: Colour, which: int) -> None:
        """A ragged blob."""
        column, row = self.camera.project(*centre)
        scale = self.camera.focal_px / centre[2]
        rx, ry = max(1, round(radius_m[0] * scale)), max(1, round(radius_m[1] * scale))
        mask = leaf_masks()[which].resize((2 * rx, 2 * ry), Image.Resampling.NEAREST)
        corner = (round(column) - rx, round(row) - ry)
        self._image.paste(colour, (*corner, corner[0] + 2 * rx, corner[1] + 2 * ry), mask)
        self._ids.paste(len(self._kinds) - 1, (*corner, corner[0] + 2 * rx, corner[1] + 2 * ry), mask)

    def shade_ground(self, x_m: float, z_m: float, size_m: Point, sun: Point) -> None:
        """Cast shadow of something `size_m` = (width, height); `sun` is the shadow's (x, z) run per metre of height."""
        half, (run_x, run_z) = 0.5 * size_m[0], (sun[0] * size_m[1], sun[1] * size_m[1])
        foot = [(x_m - half, 0.0, z_m), (x_m + half, 0.0, z_m)]
        head = [(x_m + half + run_x, 0.0, z_m + run_z), (x_m - half + run_x, 0.0, z_m + run_z)]
        self._draw_shadow.polygon([self.camera.project(*point) for point in foot + head], 255)

    def finish(self, rng: Generator, layers: Layers) -> None:
        """Draw the queue and fold the result into the layers."""
        for _, draw in sorted(self._queue, key=lambda entry: -entry[0]):
            draw()
        ids_HW = np.asarray(self._ids)
        flat_L = np.flatnonzero(ids_HW)
        ids_L = ids_HW.reshape(-1)[flat_L]
        kinds_L = np.array(self._kinds, np.uint8)[ids_L]
        grain_L = screen_noise(rng, 1.0, *ids_HW.shape).reshape(-1)[flat_L]
        shade_L = np.where(kinds_L == Kind.VEGETATION, np.float32(0.3), np.float32(0.05)) * grain_L
        layers.albedo_3HW[:] = from_picture(self._image)
        for albedo_HW in layers.albedo_3HW:
            albedo_HW.reshape(-1)[flat_L] *= 1.0 + shade_L
        layers.label_HW.reshape(-1)[flat_L] = kinds_L
        layers.depth_HW.reshape(-1)[flat_L] = np.array(self._depths, np.float32)[ids_L]
        layers.glow_HW.reshape(-1)[flat_L] = np.array(self._glows, np.float32)[ids_L]
        layers.ground_HW.reshape(-1)[flat_L] = False
        np.maximum(layers.shadow_HW, np.asarray(self._shadow) * np.float32(1 / 255), out=layers.shadow_HW)
        layers.shadow_HW *= layers.ground_HW

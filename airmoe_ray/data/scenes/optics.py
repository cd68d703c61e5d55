"""Pieces the weathers are made of: street light, halos, streaks, flakes, rims that catch snow."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.scenes.geometry import Camera, FloatArray, Kind, Point
from airmoe_ray.data.scenes.textures import from_picture, to_picture


def soften(image_3HW: FloatArray) -> FloatArray:
    """A wide blur, found at a quarter of the size."""
    small = to_picture(image_3HW[:, ::4, ::4]).filter(ImageFilter.BoxBlur(2)).filter(ImageFilter.BoxBlur(2))
    return from_picture(small.resize(image_3HW.shape[:0:-1], Image.Resampling.BILINEAR))


def street_light(rng: Generator, camera: Camera, lamps: list[Point], depth_HW: FloatArray) -> FloatArray:
    """Light on each pixel from lamps at (x, z) and from our own headlights, by its place in the world.

    Found on every second pixel, since light changes slowly.
    """
    z_hw = depth_HW[::2, ::2]
    columns_w = np.arange(0, camera.width_px, 2, dtype=np.float32) - np.float32(camera.vanish_px)
    x_hw = columns_w * z_hw * np.float32(1 / camera.focal_px)
    cone_hw = x_hw / (1.2 + 0.28 * z_hw)
    light_hw = rng.uniform(0.3, 0.8) * np.exp(-cone_hw * cone_hw - z_hw / np.float32(rng.uniform(9.0, 20.0)))
    reach2 = np.float32(rng.uniform(2.2, 3.6) ** 2)
    for x, z in lamps:
        distance2_hw = (x_hw - np.float32(x)) ** 2 + (z_hw - np.float32(z)) ** 2
        light_hw += np.float32(0.42) / (1.0 + (distance2_hw / reach2) ** 2)
    full_HW: FloatArray = light_hw.repeat(2, axis=0).repeat(2, axis=1)[: camera.height_px, : camera.width_px]
    return full_HW


def lamps_only(glow_HW: FloatArray, label_HW: UInt8Array) -> FloatArray:
    """Glow without the lit windows, which are many and have no halo."""
    return np.where(label_HW == Kind.BUILDING, np.float32(0.0), glow_HW)


def streaks(rng: Generator, camera: Camera) -> FloatArray:
    """(H, W) opacity of rain drops in flight, all slanted alike."""
    layer = Image.new("L", (camera.width_px, camera.height_px))
    draw = ImageDraw.Draw(layer)
    count = int(rng.integers(60, 160))
    slant, length = rng.uniform(-0.35, 0.35), camera.height_px * rng.uniform(0.05, 0.11)
    x_N, y_N = rng.uniform(0, camera.width_px, count), rng.uniform(-length, camera.height_px, count)
    run_N, strength_N = length * rng.uniform(0.5, 1.3, count), rng.integers(25, 110, count)
    for x, y, run, strength in zip(x_N.tolist(), y_N.tolist(), run_N.tolist(), strength_N.tolist(), strict=True):
        draw.line((x, y, x + slant * run, y + run), strength)
    return np.asarray(layer, np.float32) * np.float32(1 / 255)


def flakes(rng: Generator, camera: Camera) -> FloatArray:
    """(H, W) opacity of falling snow; radii follow the image size."""
    layer = Image.new("L", (camera.width_px, camera.height_px))
    draw = ImageDraw.Draw(layer)
    count = int(rng.integers(70, 200))
    x_N, y_N = rng.uniform(0, camera.width_px, count), rng.uniform(0, camera.height_px, count)
    radius_N = camera.height_px / 192 * (0.4 + 1.7 * rng.random(count) ** 3)
    for x, y, r in zip(x_N.tolist(), y_N.tolist(), radius_N.tolist(), strict=True):
        draw.ellipse((x - r, y - r, x + r, y + r), 210)
    return np.asarray(layer.filter(ImageFilter.BoxBlur(0.4)), np.float32) * np.float32(1 / 255)


def upper_rims(label_HW: UInt8Array) -> NDArray[np.bool_]:
    """Upper edges of roofs and vehicles: pixels with another class just above."""
    rise = max(1, label_HW.shape[0] // 64)
    rim_HW = np.zeros(label_HW.shape, np.bool_)
    rim_HW[rise:] = label_HW[rise:] != label_HW[:-rise]
    catches = np.isin(np.arange(len(Kind)), (Kind.BUILDING, Kind.VEHICLE))
    return rim_HW & catches[label_HW]

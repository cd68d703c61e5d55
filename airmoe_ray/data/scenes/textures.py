"""Tileable noise, made once per process from a fixed key; scenes differ by where they cut it."""

from functools import cache

import numpy as np
from numpy.random import Generator, Philox
from PIL import Image

from airmoe_ray.data.scenes.geometry import FloatArray

TILE = 512  # power of two: world coordinates wrap with a bit mask


@cache
def noise_tile(power: float) -> FloatArray:
    """(TILE, TILE) noise of amplitude spectrum 1/frequency^power, mean 0, deviation 1: 0 grain, 1 foliage, 2 cloud."""
    rng = Generator(Philox(key=int(power * 16) + 1))
    frequency = np.hypot(np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None])
    frequency[0, 0] = 1.0
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((TILE, TILE))) / frequency**power)
    tile: FloatArray = ((field - field.mean()) / field.std()).astype(np.float32)
    return tile


def screen_noise(rng: Generator, power: float, height: int, width: int, *, zoom: float = 1.0) -> FloatArray:
    """(H, W) cut of a tile at a random place; zoom > 1 stretches it sideways (clouds)."""
    row, column = rng.integers(TILE, size=2)
    rows = (np.arange(height) + row) & (TILE - 1)
    columns = (np.arange(width) / zoom + column).astype(np.intp) & (TILE - 1)
    cut: FloatArray = noise_tile(power).take(rows, axis=0).take(columns, axis=1)
    return cut


def world_noise(power: float, a_m: FloatArray, b_m: FloatArray, texels_per_m: float) -> FloatArray:
    """Noise glued to a plane with coordinates (a, b) [m]; the two broadcast."""
    rows = (a_m * np.float32(texels_per_m)).astype(np.int32) & (TILE - 1)
    columns = (b_m * np.float32(texels_per_m)).astype(np.int32) & (TILE - 1)
    cut: FloatArray = noise_tile(power).reshape(-1).take(rows * TILE + columns)
    return cut


def to_picture(image_3HW: FloatArray) -> Image.Image:
    """To bytes, where Pillow draws and blurs."""
    bytes_3HW = (np.clip(image_3HW, 0.0, 1.0) * np.float32(255.0)).astype(np.uint8)
    return Image.merge("RGB", [Image.fromarray(bytes_HW) for bytes_HW in bytes_3HW])


def from_picture(picture: Image.Image) -> FloatArray:
    """The inverse of `to_picture`, up to rounding."""
    return np.stack([np.asarray(band, np.float32) for band in picture.split()]) * np.float32(1 / 255)


@cache
def leaf_masks() -> tuple[Image.Image, ...]:
    """Ragged round blobs (64 x 64, mode L) that crowns and bushes are stamped with."""
    rng = Generator(Philox(key=99))
    axis = np.linspace(-1.25, 1.25, 64)
    radius2 = axis[:, None] ** 2 + axis[None] ** 2
    blobs = []
    for _ in range(16):
        rough = 0.16 * screen_noise(rng, 1.0, 64, 64) + 0.1 * screen_noise(rng, 1.5, 64, 64)
        blobs.append(Image.fromarray(np.where(radius2 + rough < 1.0, 255, 0).astype(np.uint8)))
    return tuple(blobs)

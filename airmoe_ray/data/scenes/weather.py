"""Light and weather: five ways to turn the layers of a street into a photograph."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import ImageFilter

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.scenes.backdrop import Layers
from airmoe_ray.data.scenes.geometry import Camera, FloatArray, Kind, Point
from airmoe_ray.data.scenes.optics import flakes, lamps_only, soften, streaks, street_light, upper_rims
from airmoe_ray.data.scenes.textures import screen_noise, to_picture


@dataclass(frozen=True)
class Stage:
    """What a weather needs beside the layers."""

    rng: Generator
    camera: Camera
    lamps: list[Point]  # (x, z) [m]

    def rgb(self, colour: tuple[float, float, float], spread: float) -> FloatArray:
        """(3, 1, 1) colour near the given one."""
        return (np.array(colour) * self.rng.uniform(1 - spread, 1 + spread, 3)).astype(np.float32)[:, None, None]


def veil(image_3HW: FloatArray, depth_HW: FloatArray, beta_per_m: float, air_311: FloatArray) -> FloatArray:
    r"""Koschmieder's law: what is seen through air that scatters light.

    .. math:: I = J\,t + A\,(1 - t),\quad t = e^{-\beta z}

    J the clear image, A the air light; contrast falls as e^{-beta z}.
    """
    t_HW = np.exp(np.float32(-beta_per_m) * depth_HW)
    veiled_3HW: FloatArray = air_311 + (image_3HW - air_311) * t_HW
    return veiled_3HW


def overcast(layers: Layers, level: float, sky_311: FloatArray) -> FloatArray:
    """Flat light: less colour, and a sky of almost one tone."""
    grey_HW = layers.albedo_3HW.sum(axis=0) * np.float32(0.3 / 3)
    image_3HW: FloatArray = (grey_HW + layers.albedo_3HW * np.float32(0.7)) * np.float32(level)
    image_3HW += (layers.label_HW == Kind.SKY) * np.float32(0.8) * (sky_311 - image_3HW)
    return image_3HW


def clear(stage: Stage, layers: Layers) -> FloatArray:
    """Sun and blue shadows."""
    lost_311 = stage.rgb((0.62, 0.56, 0.46), 0.05) * np.float32(stage.rng.uniform(0.75, 1.1))
    lit_3HW: FloatArray = layers.albedo_3HW * stage.rgb((1.24, 1.15, 1.03), 0.06)
    lit_3HW *= np.float32(1.0) - layers.shadow_HW * lost_311
    return veil(lit_3HW, layers.depth_HW, 0.0012, stage.rgb((0.72, 0.80, 0.90), 0.0))


def fog(stage: Stage, layers: Layers) -> FloatArray:
    """Thick enough that the far half of the street is gone."""
    air_311 = stage.rgb((0.78, 0.79, 0.80), 0.04) * np.float32(stage.rng.uniform(0.75, 1.05))
    return veil(overcast(layers, 0.85, air_311), layers.depth_HW, stage.rng.uniform(0.03, 0.085), air_311)


def rain(stage: Stage, layers: Layers) -> FloatArray:
    """Dark, the ground a mirror in patches, streaks across, soft focus."""
    rng, camera = stage.rng, stage.camera
    sky_311 = stage.rgb((0.52, 0.55, 0.60), 0.06)
    image_3HW = overcast(layers, rng.uniform(0.5, 0.68), sky_311)
    image_3HW += np.float32(0.7) * lamps_only(layers.glow_HW, layers.label_HW) * layers.albedo_3HW
    image_3HW = veil(image_3HW, layers.depth_HW, rng.uniform(0.006, 0.014), sky_311)
    mirrored_H = np.clip(2 * int(camera.horizon_px) - np.arange(camera.height_px), 0, camera.height_px - 1)
    puddle_HW = np.float32(0.42) + np.float32(0.3) * screen_noise(rng, 1.5, camera.height_px, camera.width_px, zoom=3.0)
    wet_HW = np.clip(puddle_HW, 0.05, 0.85) * layers.ground_HW
    image_3HW += wet_HW * (np.float32(0.9) * soften(image_3HW)[:, mirrored_H] - image_3HW)
    return image_3HW + streaks(rng, camera) * (np.float32(0.9) - image_3HW)


def night(stage: Stage, layers: Layers) -> FloatArray:
    """Deep blue, pools of light under lamps and before our own car, lit windows, halos, noise."""
    rng = stage.rng
    ambient_311 = stage.rgb((0.13, 0.16, 0.26), 0.15) * np.float32(rng.uniform(0.8, 1.4))
    light_HW = street_light(rng, stage.camera, stage.lamps, layers.depth_HW)
    light_HW *= layers.label_HW != Kind.SKY
    image_3HW = layers.albedo_3HW * (ambient_311 + light_HW * stage.rgb((1.0, 0.80, 0.52), 0.08))
    image_3HW *= 1.0 - np.float32(0.45) * (layers.label_HW == Kind.SKY)
    glow_HW = lamps_only(layers.glow_HW, layers.label_HW)
    image_3HW += layers.glow_HW * layers.albedo_3HW + np.float32(2.2) * soften(glow_HW * layers.albedo_3HW)
    grain_3HW = np.frombuffer(rng.bytes(image_3HW.size), np.uint8).reshape(image_3HW.shape)
    return image_3HW + (grain_3HW - np.float32(127.5)) * np.float32(rng.uniform(0.0002, 0.0006))


def snow(stage: Stage, layers: Layers) -> FloatArray:
    """White ground, trees and roofs, half-covered paint (which then is road), grey sky, flakes."""
    rng, label_HW = stage.rng, layers.label_HW
    sky_311 = stage.rgb((0.66, 0.68, 0.72), 0.05) * np.float32(rng.uniform(0.8, 1.1))
    drift_HW = screen_noise(rng, 1.5, stage.camera.height_px, stage.camera.width_px, zoom=2.0)
    lies = np.full(len(Kind), -9.0, np.float32)  # how much snow a class holds; vegetation here is what stands upright
    lies[[Kind.ROAD, Kind.LANE_MARK]] = rng.uniform(-0.3, 0.6)
    lies[[Kind.SIDEWALK, Kind.VEGETATION]] = rng.uniform((1.2, 0.3), (2.0, 0.75))
    cover_HW = lies[label_HW] + np.float32(0.4) * drift_HW
    cover_HW += layers.ground_HW & (label_HW == Kind.VEGETATION)
    cover_HW += np.float32(9.7) * upper_rims(label_HW)
    cover_HW = np.clip(cover_HW, 0.0, 0.94)
    label_HW[(label_HW == Kind.LANE_MARK) & (cover_HW > 0.65)] = Kind.ROAD

    image_3HW = overcast(layers, 0.85, sky_311)
    white_3HW = (np.float32(0.90) + np.float32(0.04) * drift_HW) * stage.rgb((0.97, 0.99, 1.03), 0.02)
    image_3HW += cover_HW * (white_3HW - image_3HW)
    image_3HW = veil(image_3HW, layers.depth_HW, rng.uniform(0.006, 0.02), sky_311)
    return image_3HW + flakes(rng, stage.camera) * (np.float32(0.97) - image_3HW)


WEATHERS: dict[str, Callable[[Stage, Layers], FloatArray]] = {
    "clear": clear, "fog": fog, "rain": rain, "night": night, "snow": snow,
}  # fmt: skip


def develop(rng: Generator, image_3HW: FloatArray) -> UInt8Array:
    """Random exposure, white balance, black level and a slight blur, as of different cameras. Returns (H, W, 3)."""
    gain_3 = (rng.uniform(0.78, 1.25) * rng.uniform(0.93, 1.07, 3)).astype(np.float32)
    picture = to_picture(image_3HW * gain_3[:, None, None] + np.float32(rng.uniform(-0.03, 0.05)))
    return np.array(picture.filter(ImageFilter.BoxBlur(rng.uniform(0.1, 0.5))))

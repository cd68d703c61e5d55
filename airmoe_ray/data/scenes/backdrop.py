"""The fixed part of a street: sky, ground zones with their paint, and the building lines, all in perspective."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from airmoe_ray.data.base import UInt8Array
from airmoe_ray.data.scenes.facades import Facades, draw_facades
from airmoe_ray.data.scenes.geometry import FAR_M, Camera, FloatArray, Kind, Street
from airmoe_ray.data.scenes.textures import screen_noise, world_noise


@dataclass
class Layers:
    """What is known of each pixel before light and weather; objects and weather paint on it in place."""

    albedo_3HW: FloatArray
    glow_HW: FloatArray  # light given off when lamps are on, in units of the albedo
    label_HW: UInt8Array
    depth_HW: FloatArray  # [m]
    ground_HW: NDArray[np.bool_]  # lies flat: takes shadows, reflections, snow
    shadow_HW: FloatArray  # part of the sun that is blocked


def draw_backdrop(rng: Generator, camera: Camera, street: Street) -> Layers:
    """Sky, then ground, then walls where they are nearer than the ground behind them."""
    height, width = camera.height_px, camera.width_px
    z_H, x_HW = camera.ground()
    layers = Layers(
        albedo_3HW=_sky(rng, camera),
        glow_HW=np.zeros((height, width), np.float32),
        label_HW=np.full((height, width), Kind.SKY, np.uint8),
        depth_HW=np.full((height, width), FAR_M, np.float32),
        ground_HW=np.zeros((height, width), np.bool_),
        shadow_HW=np.zeros((height, width), np.float32),
    )
    facades = draw_facades(rng, street)
    top = min(height - 1, max(0, int(camera.horizon_px) + 1))
    layers.ground_HW[top:] = True
    layers.depth_HW[top:] = z_H[top:, None]
    _ground(rng, street, z_H[top:], x_HW[top:], albedo_3HW=layers.albedo_3HW[:, top:], label_HW=layers.label_HW[top:])
    sun, per_m = (1.0 if rng.random() < 0.5 else -1.0), rng.uniform(0.0, 0.5)
    layers.shadow_HW[top:] = facades.street_shadow(z_H[top:], x_HW[top:], sun, per_m)
    _walls(rng, camera, facades, z_H, layers)
    return layers


def _sky(rng: Generator, camera: Camera) -> FloatArray:
    """Blue, milky or sunset gradient with clouds."""
    zenith = np.array(((0.22, 0.45, 0.80), (0.45, 0.60, 0.78), (0.36, 0.40, 0.62))[rng.integers(3)], np.float32)
    low = np.array(((0.70, 0.82, 0.92), (0.86, 0.87, 0.88), (0.96, 0.74, 0.54))[rng.integers(3)], np.float32)
    rows_H1 = np.arange(camera.height_px, dtype=np.float32)[:, None]
    height_H1 = np.clip(1.0 - rows_H1 / max(camera.horizon_px, 1.0), 0.0, 1.0)
    noise_HW = screen_noise(rng, 1.75, camera.height_px, camera.width_px, zoom=1.8)
    cloud_HW = np.clip(0.45 * (noise_HW - np.float32(rng.uniform(-0.8, 1.0))), 0.0, 0.85)
    white_HW = np.float32(rng.uniform(0.82, 0.97)) - np.float32(0.07) * noise_HW
    sky_3HW = np.empty((3, *noise_HW.shape), np.float32)
    for sky_HW, low_1, zenith_1 in zip(sky_3HW, low, zenith, strict=True):
        gradient_H1 = low_1 + (zenith_1 - low_1) * height_H1
        sky_HW[:] = gradient_H1 + (white_HW - gradient_H1) * cloud_HW
    return sky_3HW


def _zone_colour(rng: Generator, kind: Kind) -> tuple[float, float, float]:
    """Roads and sidewalks overlap in brightness, so that grey alone tells neither."""
    if kind is Kind.VEGETATION:
        dry = rng.uniform(0.0, 0.6)
        return 0.22 + 0.30 * dry, 0.40 + 0.06 * dry, 0.14 + 0.10 * dry
    level = rng.uniform(0.20, 0.50) if kind is Kind.ROAD else rng.uniform(0.36, 0.68)
    warm = rng.normal(0.0, 0.02) if kind is Kind.ROAD else rng.normal(0.03, 0.05)
    return level + warm, level, level - warm


def _ground(
    rng: Generator,
    street: Street,
    z_H: FloatArray,
    x_HW: FloatArray,
    *,
    albedo_3HW: FloatArray,
    label_HW: UInt8Array,
) -> None:
    zone_HW = np.zeros(x_HW.shape, np.uint8)
    for edge in street.edges_m:
        zone_HW += x_HW > edge
    colours = {kind: _zone_colour(rng, kind) for kind in Kind}
    label_HW[:] = np.array(street.kinds, np.uint8)[zone_HW]
    zone_colours = np.array([colours[kind] for kind in street.kinds], np.float32)

    z_H1 = z_H[:, None]
    sharp_H1 = 1.0 / (1.0 + z_H1 / 12.0)  # texture finer than a pixel would only be noise
    grain_HW = world_noise(1.0, z_H1, x_HW, 26.0)
    strength = np.array([0.30 if kind is Kind.VEGETATION else 0.10 for kind in street.kinds], np.float32)
    shade_HW = 1.0 + strength[zone_HW] * sharp_H1 * grain_HW
    slab = np.float32(rng.uniform(0.6, 1.4))
    slabs_HW = x_HW / slab
    joint_HW = (slabs_HW - np.floor(slabs_HW) < 0.07) | (z_H1 / slab % 1.0 < 0.09)
    shade_HW -= (joint_HW & (label_HW == Kind.SIDEWALK)) * (0.35 * sharp_H1)
    for edge in street.road_m:  # kerb stones
        shade_HW += np.float32(0.25) * (np.abs(x_HW - edge) < 0.12)
    for channel, albedo_HW in enumerate(albedo_3HW):
        np.multiply(zone_colours[:, channel][zone_HW], shade_HW, out=albedo_HW)
    _paint(rng, street, z_H, x_HW, albedo_3HW=albedo_3HW, label_HW=label_HW)


def _paint(
    rng: Generator,
    street: Street,
    z_H: FloatArray,
    x_HW: FloatArray,
    *,
    albedo_3HW: FloatArray,
    label_HW: UInt8Array,
) -> None:
    """Lane marks and crosswalk, worn; none where a line would be thinner than about two pixels."""
    first = int(np.searchsorted(-z_H, -28.0))
    z_H1, x_HW = z_H[first:, None], x_HW[first:]
    phase = rng.uniform(0.0, 8.0)
    white_HW = np.zeros(x_HW.shape, np.bool_)
    yellow_HW = np.zeros(x_HW.shape, np.bool_)
    for mark in street.marks:
        on_HW = np.abs(x_HW - mark.x_m) < mark.half_m
        if mark.dash_m:
            on_HW &= (z_H1 + phase) / mark.dash_m % 1.0 < 0.6
        target_HW = yellow_HW if mark.yellow else white_HW
        target_HW |= on_HW
    if street.crosswalk_m:
        left, right = street.road_m
        across_H1 = (z_H1 > street.crosswalk_m) & (z_H1 < street.crosswalk_m + 2.6)
        bars_HW = (x_HW - left) / 1.1
        white_HW |= across_H1 & (bars_HW - np.floor(bars_HW) < 0.5) & (x_HW > left) & (x_HW < right)
    wear = np.float32(rng.uniform(0.55, 0.95))
    for on_HW, colour in ((white_HW, (0.92, 0.92, 0.90)), (yellow_HW, (0.90, 0.70, 0.18))):
        for albedo_HW, paint in zip(albedo_3HW[:, first:], colour, strict=True):
            albedo_HW[on_HW] += (paint - albedo_HW[on_HW]) * wear
        label_HW[first:][on_HW] = Kind.LANE_MARK


def _walls(rng: Generator, camera: Camera, facades: Facades, z_H: FloatArray, layers: Layers) -> None:
    wall = facades.cast(camera, z_H)
    colour_3L, layers.glow_HW.reshape(-1)[wall.flat_L] = facades.shade(rng, wall)
    for albedo_HW, colour_L in zip(layers.albedo_3HW, colour_3L, strict=True):
        albedo_HW.reshape(-1)[wall.flat_L] = colour_L
    layers.label_HW.reshape(-1)[wall.flat_L] = facades.kinds[wall.segment_L]
    layers.depth_HW.reshape(-1)[wall.flat_L] = wall.z_L
    layers.ground_HW.reshape(-1)[wall.flat_L] = False

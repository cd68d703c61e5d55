"""People, trees, lamp posts and signs, each drawn at its place (x, z) in metres."""

from math import cos, pi, sin

from numpy.random import Generator

from airmoe_ray.data.scenes.geometry import Kind
from airmoe_ray.data.scenes.painter import Colour, Painter
from airmoe_ray.data.scenes.vehicles import rect, tone

SIGN_COLOURS: tuple[Colour, ...] = (
    (196, 30, 36), (24, 84, 170), (240, 196, 28), (18, 112, 72), (236, 236, 232), (232, 120, 24),
)  # fmt: skip
SKINS: tuple[Colour, ...] = ((238, 200, 172), (206, 158, 122), (150, 104, 74), (92, 62, 46))


def _bytes(rng: Generator, low: int, high: int) -> Colour:
    red, green, blue = rng.integers(low, high, 3).tolist()
    return red, green, blue


def person(painter: Painter, rng: Generator, x: float, z: float) -> None:
    """Head, torso, arms, two legs in mid-step."""
    h = rng.uniform(1.6, 1.95)
    coat, trousers, skin = _bytes(rng, 20, 235), _bytes(rng, 15, 130), SKINS[rng.integers(len(SKINS))]
    step, wide = rng.uniform(0.04, 0.2), rng.uniform(0.25, 0.32)
    painter.begin(Kind.PERSON, z)
    for foot, leg in ((-step, trousers), (step, tone(trousers, 0.8))):
        hip = 0.10 if foot > 0 else -0.10
        painter.card(z, x, [(foot - 0.1, 0.0), (foot + 0.12, 0.0), (hip + 0.13, 0.5 * h), (hip - 0.13, 0.5 * h)], leg)
    painter.card(z, x, [(-wide, 0.46 * h), (-wide - 0.03, 0.78 * h), (-0.14, 0.85 * h), (0.14, 0.85 * h),
                        (wide + 0.03, 0.78 * h), (wide, 0.46 * h)], coat)  # fmt: skip
    for arm in (-1.0, 1.0):
        outline = ((wide - 0.02, 0.44), (wide + 0.09, 0.45), (wide + 0.05, 0.78), (wide - 0.07, 0.78))
        painter.card(z, x, [(arm * side, part * h) for side, part in outline], tone(coat, 0.72))
    painter.disc((x, 0.92 * h, z), (0.14, 0.16), tone(skin, 0.45))
    painter.disc((x, 0.91 * h, z), (0.12, 0.13), skin)


def tree(painter: Painter, rng: Generator, x: float, z: float, h: float) -> None:
    """A trunk and a crown of overlapping blobs, lit from above."""
    wide, bare = h * rng.uniform(0.26, 0.4), h * rng.uniform(0.25, 0.38)
    autumn = rng.uniform(0.0, 1.0) ** 3
    leaf: Colour = (int(52 + 110 * autumn), int(96 - 10 * autumn), int(38 - 8 * autumn))
    leaf = tone(leaf, rng.uniform(0.65, 1.35))
    painter.begin(Kind.VEGETATION, z)
    painter.card(z, x, [(-0.19, 0.0), (0.19, 0.0), (0.11, 0.6 * h), (-0.11, 0.6 * h)], (74, 56, 42))
    middle = 0.5 * (h + bare)
    for factor, dx, dy, size in ((0.62, 0.0, 0.0, 1.0), (0.85, -0.3, 0.06, 0.66), (1.0, 0.28, 0.12, 0.62),
                                 (1.25, -0.05, 0.3, 0.5)):  # fmt: skip
        spot = (x + dx * wide, middle + dy * (h - bare), z)
        painter.leaves(spot, (1.25 * wide * size, 0.62 * (h - bare) * size), tone(leaf, factor), int(rng.integers(16)))


def bush(painter: Painter, rng: Generator, x: float, z: float) -> None:
    """Two low blobs."""
    h, leaf = rng.uniform(0.8, 1.7), tone((58, 98, 40), rng.uniform(0.6, 1.4))
    painter.begin(Kind.VEGETATION, z)
    painter.leaves((x, 0.42 * h, z), (1.3 * h, 0.75 * h), tone(leaf, 0.7), int(rng.integers(16)))
    painter.leaves((x - 0.2, 0.55 * h, z), (0.9 * h, 0.5 * h), leaf, int(rng.integers(16)))


def lamp_post(painter: Painter, x: float, z: float, paint: Colour, *, inward: float, h: float) -> None:
    """A mast with an arm over the road; the lamp itself shines at night."""
    painter.begin(Kind.POLE, z)
    painter.card(z, x, [(-0.15, 0.0), (0.15, 0.0), (0.11, h), (-0.11, h)], paint)
    painter.card(z, x, [(0.03, 0.0), (0.15, 0.0), (0.11, h), (0.03, h)], tone(paint, 0.7))
    painter.card(z, x, [(0.0, h), (inward * 1.6, h + 0.25), (inward * 1.6, h + 0.05), (0.0, h - 0.22)], paint)
    painter.begin(Kind.POLE, z, 1.4)
    near, tip = 1.1 * inward, 1.9 * inward
    painter.card(z, x, [(near, h), (tip, h + 0.05), (tip, h + 0.28), (near, h + 0.22)], (240, 218, 170))


def sign(painter: Painter, rng: Generator, x: float, z: float, paint: Colour) -> None:
    """A post with a disc, triangle, octagon, square, diamond, board or traffic light."""
    high, r = rng.uniform(2.1, 2.9), rng.uniform(0.42, 0.6)
    painter.begin(Kind.POLE, z)
    painter.card(z, x, rect(-0.1, 0.0, 0.1, high), paint)
    painter.begin(Kind.SIGN, z)
    shape, outer = int(rng.integers(6)), SIGN_COLOURS[rng.integers(len(SIGN_COLOURS))]
    inner = (240, 240, 236) if outer != SIGN_COLOURS[4] else (40, 40, 44)
    if shape == 0:
        painter.disc((x, high, z), (r, r), outer)
        painter.disc((x, high, z), (0.68 * r, 0.68 * r), inner)
        painter.card(z, x, rect(-0.11, high - 0.2, 0.11, high + 0.2), (40, 40, 44))
    elif shape == 5:
        painter.card(z, x, rect(-0.26, high - 0.1, 0.26, high + 1.1), (34, 36, 34))
        on = int(rng.integers(3))
        for k, lamp in enumerate(((40, 220, 110), (250, 190, 40), (250, 50, 40))):
            painter.begin(Kind.SIGN, z, 1.2 if k == on else 0.0)
            painter.disc((x, high + 0.12 + 0.37 * k, z), (0.16, 0.16), lamp if k == on else tone(lamp, 0.3))
    else:
        corners, turn, stretch = ((3, pi / 2, 1.25), (8, pi / 8, 1.1), (4, 0.0, 1.15), (4, pi / 4, 1.3))[shape - 1]
        for size, colour in ((1.0, outer), (0.72, inner if shape != 2 else tone(outer, 1.2))):
            ring = [(turn + 2 * pi * k / corners, size * r * stretch) for k in range(corners)]
            painter.card(z, x, [(radius * cos(angle), high + radius * sin(angle)) for angle, radius in ring], colour)
        if shape == 4:
            painter.card(z, x, rect(-0.3 * r, high - 0.3, 0.3 * r, high + 0.3), outer)

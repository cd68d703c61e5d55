"""Cars, vans and buses as boxes in perspective, and cars seen from the side."""

from math import cos, pi, sin

from numpy.random import Generator

from airmoe_ray.data.scenes.geometry import Kind, Point
from airmoe_ray.data.scenes.painter import Colour, Painter

GLASS: Colour = (52, 66, 80)
TYRE: Colour = (26, 26, 28)
HEADLIGHT: Colour = (255, 244, 214)
TAILLIGHT: Colour = (225, 30, 24)

PAINTS: tuple[Colour, ...] = (
    (190, 28, 32), (28, 70, 150), (228, 228, 226), (30, 32, 36), (142, 146, 150), (90, 96, 104),
    (210, 160, 30), (40, 110, 70), (120, 40, 50), (70, 130, 180), (200, 190, 165), (225, 105, 35),
)  # fmt: skip


def tone(colour: Colour, factor: float) -> Colour:
    """Lighter or darker, clipped to a byte."""
    red, green, blue = (min(255, int(channel * factor)) for channel in colour)
    return red, green, blue


def draw_paint(rng: Generator) -> Colour:
    """A common car colour, somewhat off."""
    return tone(PAINTS[rng.integers(len(PAINTS))], rng.uniform(0.75, 1.15))


def _ring(centre: Point, radius: float) -> list[Point]:
    return [(centre[0] + radius * cos(k * pi / 5), centre[1] + radius * sin(k * pi / 5)) for k in range(10)]


def rect(left: float, low: float, right: float, high: float) -> list[Point]:
    """Outline of a rectangle, for `Painter.card`."""
    return [(left, low), (right, low), (right, high), (left, high)]


def _lights(painter: Painter, x: float, z: float, *, half: float, oncoming: bool) -> None:
    """A pair of lamps; their own id, since they shine."""
    colour = HEADLIGHT if oncoming else TAILLIGHT
    painter.begin(Kind.VEHICLE, z, 1.2)
    for left in (-half + 0.06, half - 0.40):
        painter.card(z, x, rect(left, 0.6, left + 0.34, 0.8), colour)
    painter.begin(Kind.VEHICLE, z)


def car(painter: Painter, x: float, z: float, paint: Colour, oncoming: bool) -> None:
    """A car along the street: the end that faces us, the flank we can see, the cabin on top."""
    half, deck, roof, end = 0.9, 0.92, 1.5, z + 4.2
    flank = -half if x > 0 else half  # the flank towards the camera's axis
    inner = flank * 0.82
    painter.begin(Kind.VEHICLE, z)
    painter.poly([(x + flank, 0.25, z), (x + flank, 0.25, end), (x + flank, deck, end), (x + flank, deck, z)],
                 tone(paint, 0.72))  # fmt: skip
    for axle in (z + 0.8, end - 0.8):
        painter.poly([(x + flank, v, u) for u, v in _ring((axle, 0.33), 0.34)], TYRE)
    painter.poly([(x - half, deck, z), (x + half, deck, z), (x + half, deck, end), (x - half, deck, end)],
                 tone(paint, 1.1))  # fmt: skip
    painter.poly([(x + flank * 0.96, deck, z + 0.3), (x + flank * 0.96, deck, end - 1.0),
                  (x + inner, roof, end - 1.7), (x + inner, roof, z + 0.8)], tone(GLASS, 0.8))  # fmt: skip
    painter.poly([(x - 0.74, roof, z + 0.8), (x + 0.74, roof, z + 0.8), (x + 0.74, roof, end - 1.7),
                  (x - 0.74, roof, end - 1.7)], tone(paint, 1.2))  # fmt: skip
    painter.poly([(x - 0.87, deck, z + 0.25), (x + 0.87, deck, z + 0.25), (x + 0.74, roof, z + 0.8),
                  (x - 0.74, roof, z + 0.8)], paint)  # fmt: skip
    painter.poly([(x - 0.76, deck + 0.04, z + 0.25), (x + 0.76, deck + 0.04, z + 0.25),
                  (x + 0.66, roof - 0.08, z + 0.8), (x - 0.66, roof - 0.08, z + 0.8)], GLASS)  # fmt: skip
    for left in (-half, half - 0.24):
        painter.card(z, x, rect(left, 0.0, left + 0.24, 0.4), TYRE)
    painter.card(z, x, rect(-half, 0.24, half, deck), paint)
    painter.card(z, x, rect(-half, 0.24, half, 0.42), tone(paint, 0.55))
    painter.card(z, x, rect(-0.28, 0.44, 0.28, 0.58), (32, 32, 34) if oncoming else (225, 225, 215))
    _lights(painter, x, z, half=half, oncoming=oncoming)


def van(painter: Painter, x: float, z: float, paint: Colour, *, oncoming: bool, height: float) -> None:
    """A van, truck or bus: a tall box with a window band or doors."""
    half, end = 1.2, z + 2.4 * height
    flank = -half if x > 0 else half
    painter.begin(Kind.VEHICLE, z)
    painter.poly([(x + flank, 0.4, z), (x + flank, 0.4, end), (x + flank, height, end), (x + flank, height, z)],
                 tone(paint, 0.75))  # fmt: skip
    painter.poly([(x + flank, 0.6 * height, z + 0.4), (x + flank, 0.6 * height, end - 0.4),
                  (x + flank, 0.85 * height, end - 0.4), (x + flank, 0.85 * height, z + 0.4)],
                 tone(paint, 0.55) if not oncoming else GLASS)  # fmt: skip
    for axle in (z + 1.3, end - 1.3):
        painter.poly([(x + flank, v, u) for u, v in _ring((axle, 0.45), 0.45)], TYRE)
    for left in (-half, half - 0.3):
        painter.card(z, x, rect(left, 0.0, left + 0.3, 0.6), TYRE)
    painter.card(z, x, rect(-half, 0.4, half, height), paint)
    if oncoming:
        painter.card(z, x, rect(-half + 0.12, 0.5 * height, half - 0.12, 0.85 * height), GLASS)
        painter.card(z, x, rect(-0.6, 0.5, 0.6, 0.85), tone(paint, 0.5))
    else:
        for left in (-half + 0.15, 0.04):
            painter.card(z, x, rect(left, 0.8, left + half - 0.19, height - 0.2), tone(paint, 0.88))
        painter.card(z, x, rect(-half, 0.4, half, 0.56), (40, 40, 42))
    _lights(painter, x, z, half=half, oncoming=oncoming)


def crossing_car(painter: Painter, x: float, z: float, paint: Colour, heading: float) -> None:
    """A car across the street, seen from its side; `heading` is +1 to the right, -1 to the left."""
    body = [(-2.1, 0.28), (2.1, 0.28), (2.15, 0.7), (1.3, 0.88), (0.6, 1.45), (-1.1, 1.45), (-1.8, 0.95), (-2.15, 0.85)]
    panes = ([(-1.5, 0.93), (-0.3, 0.93), (-0.3, 1.36), (-1.0, 1.36)], [(-0.18, 0.93), (1.0, 0.93), (0.52, 1.36),
             (-0.18, 1.36)])  # fmt: skip
    painter.begin(Kind.VEHICLE, z)
    painter.card(z, x, [(heading * u, v) for u, v in body], paint)
    painter.card(z, x, [(heading * u, v) for u, v in rect(-2.1, 0.28, 2.1, 0.42)], tone(paint, 0.6))
    for pane in panes:
        painter.card(z, x, [(heading * u, v) for u, v in pane], GLASS)
    for axle in (-1.3, 1.3):
        painter.disc((x + axle, 0.34, z), (0.35, 0.35), TYRE)
        painter.disc((x + axle, 0.34, z), (0.18, 0.18), (150, 152, 156))
    painter.begin(Kind.VEHICLE, z, 1.2)
    painter.card(z, x, [(heading * u, v) for u, v in rect(1.9, 0.58, 2.12, 0.74)], HEADLIGHT)
    painter.begin(Kind.VEHICLE, z, 1.2)
    painter.card(z, x, [(heading * u, v) for u, v in rect(-2.12, 0.64, -1.92, 0.84)], TAILLIGHT)

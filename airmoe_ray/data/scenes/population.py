"""Where along the street everything stands, and in what numbers."""

from dataclasses import dataclass
from functools import partial

from numpy.random import Generator

from airmoe_ray.data.scenes.geometry import Camera, Kind, Point, Street
from airmoe_ray.data.scenes.painter import Painter
from airmoe_ray.data.scenes.street_life import bush, lamp_post, person, sign, tree
from airmoe_ray.data.scenes.vehicles import car, crossing_car, draw_paint, tone, van


@dataclass(frozen=True)
class Population:
    """Places things; depths are drawn such that the small classes are big enough to be segmented."""

    rng: Generator
    camera: Camera
    street: Street
    painter: Painter
    sun: Point  # run of shadows, (x, z) per metre of height

    def fill(self) -> list[Point]:
        """Put everything on the street; returns (x, z) of the lamps' pools of light."""
        left, right = self.street.road_m
        walks = self.street.strips(Kind.SIDEWALK) or [(left - 1.5, left), (right, right + 1.5)]
        verges = self.street.strips(Kind.VEGETATION) + [(a + 0.6 * (b - a), b) for a, b in walks]
        kerbs = [(left - 0.9, left - 0.25), (right + 0.25, right + 0.9)]
        self._traffic()
        self._people(walks)
        self._plants(verges)
        return self._posts(kerbs)

    def _place(self, z: float, strips: list[Point]) -> float | None:
        """A lateral position in one of the strips that the camera sees at depth z, if there is any."""
        for index in self.rng.permutation(len(strips)):
            x = float(self.rng.uniform(*strips[index]))
            if self.camera.sees(x, z):
                return x
        return None

    def _traffic(self) -> None:
        """Parked along the kerbs, driving in lanes both ways, now and then across."""
        rng, painter = self.rng, self.painter
        left, right = self.street.road_m
        lanes = max(2, round((right - left) / 3.0))
        lane_m = (right - left) / lanes
        taken: list[Point] = []
        for _ in range(rng.integers(4, 10)):
            lane, z = int(rng.integers(lanes)), 5.0 + 33.0 * rng.random() ** 1.5
            parked = rng.random() < 0.45 and lane in (0, lanes - 1)
            x = left + (lane + 0.5) * lane_m
            if parked:
                x += (-0.5 if lane == 0 else 0.5) * (lane_m - 2.0)
            if not self.camera.sees(x, z) or any(abs(x - a) < 2.2 and abs(z - b) < 8.0 for a, b in taken):
                continue
            taken.append((x, z))
            paint, oncoming = draw_paint(rng), lane < lanes // 2
            if rng.random() < 0.12:
                painter.later(z, partial(crossing_car, painter, x, z, paint, 1.0 if rng.random() < 0.5 else -1.0))
            elif rng.random() < 0.22 and z > 9.0:
                painter.later(z, partial(van, painter, x, z, paint, oncoming=oncoming, height=rng.uniform(2.2, 3.2)))
            else:
                painter.later(z, partial(car, painter, x, z, paint, oncoming))
            painter.shade_ground(x, z, (2.0, 1.3), self.sun)
            painter.shade_ground(x, z - 0.15, (1.9, 2.2), (0.0, 2.0))  # the dark below the car

    def _people(self, walks: list[Point]) -> None:
        for _ in range(self.rng.integers(3, 8)):
            z = self.rng.uniform(5.5, 14.0)
            strips = [self.street.road_m] if self.rng.random() < 0.3 else walks
            x = self._place(z, strips)
            if x is None and (x := self._place(z, [self.street.road_m])) is None:
                continue
            self.painter.later(z, partial(person, self.painter, self.rng, x, z))
            self.painter.shade_ground(x, z, (0.5, 1.7), self.sun)

    def _plants(self, verges: list[Point]) -> None:
        for _ in range(self.rng.integers(3, 8)):
            z, h = self.rng.uniform(7.0, 40.0), self.rng.uniform(3.5, 8.5)
            if (x := self._place(z, verges)) is None:
                continue
            if self.rng.random() < 0.25:
                self.painter.later(z, partial(bush, self.painter, self.rng, x, z))
                self.painter.shade_ground(x, z, (1.6, 1.0), self.sun)
            else:
                self.painter.later(z, partial(tree, self.painter, self.rng, x, z, h))
                self.painter.shade_ground(x, z, (0.4 * h, h), self.sun)

    def _posts(self, kerbs: list[Point]) -> list[Point]:
        metal = tone((120, 124, 124), self.rng.uniform(0.35, 1.3))
        for _ in range(self.rng.integers(2, 5)):
            z = self.rng.uniform(6.0, 13.0)
            if (x := self._place(z, kerbs)) is not None:
                self.painter.later(z, partial(sign, self.painter, self.rng, x, z, metal))
                self.painter.shade_ground(x, z, (0.4, 2.6), self.sun)
        lamps, h = [], self.rng.uniform(4.5, 7.5)
        for strip in kerbs:
            z = self.rng.uniform(5.0, 9.0)
            inward = 1.0 if strip == kerbs[0] else -1.0
            while z < 30.0:
                x = self.rng.uniform(*strip)
                lamps.append((x + 1.5 * inward, z))
                if z < 17.0:  # farther ones would be a pixel or two wide; their light still counts
                    self.painter.later(z, partial(lamp_post, self.painter, x, z, metal, inward=inward, h=h))
                    self.painter.shade_ground(x, z, (0.3, h), self.sun)
                z += self.rng.uniform(6.0, 12.0)
        return lamps

"""Procedural driving scenes in five weathers: an endless labelled dataset that needs no download."""

import numpy as np
from numpy.random import Generator, Philox

from airmoe_ray.data.base import ClassTable, Sample
from airmoe_ray.data.scenes.backdrop import draw_backdrop
from airmoe_ray.data.scenes.geometry import Kind, draw_camera, draw_street
from airmoe_ray.data.scenes.painter import Painter
from airmoe_ray.data.scenes.population import Population
from airmoe_ray.data.scenes.weather import WEATHERS, Stage, develop

SCENES_VERSION = 2  # raise it with any change that alters a pixel

CLASSES = ClassTable(
    names=tuple(kind.name.lower() for kind in Kind),
    palette=(
        (128, 64, 128),
        (255, 255, 255),
        (244, 35, 232),
        (102, 102, 156),
        (107, 142, 35),
        (70, 130, 180),
        (0, 0, 200),
        (220, 20, 60),
        (190, 160, 120),
        (250, 220, 0),
    ),
)
DOMAINS = ("clear", "fog", "rain", "night", "snow")


def render_scene(index: int, *, height: int = 192, width: int = 256, seed: int = 0) -> Sample:
    """Scene `index` of the endless series `seed`; its weather is index mod 5. Same arguments, same bytes."""
    rng = Generator(Philox(key=np.array([seed, index], np.uint64)))
    domain = index % len(DOMAINS)
    camera, street = draw_camera(rng, height, width), draw_street(rng)
    layers = draw_backdrop(rng, camera, street)
    painter = Painter(camera, layers)
    sun = (rng.uniform(-0.9, 0.9), rng.uniform(-0.25, 0.5))
    lamps = Population(rng, camera, street, painter, sun).fill()
    painter.finish(rng, layers)
    image_3HW = WEATHERS[DOMAINS[domain]](Stage(rng, camera, lamps), layers)
    return Sample(develop(rng, image_3HW), layers.label_HW, domain, f"scene_{index:07d}")


class Scenes:
    """Scenes start, start + 1, ... of a series, rendered when asked for."""

    classes = CLASSES
    domains: tuple[str, ...] = DOMAINS

    def __init__(self, start: int, count: int, *, height: int = 192, width: int = 256, seed: int = 0) -> None:
        if start < 0 or count < 0:
            raise ValueError(f"start {start} and count {count} must not be negative")
        self.start, self.count, self.height, self.width, self.seed = start, count, height, width, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return render_scene(self.start + self._checked(index), height=self.height, width=self.width, seed=self.seed)

    def domain_of(self, index: int) -> int:
        return (self.start + self._checked(index)) % len(DOMAINS)

    def fingerprint(self) -> str:
        return f"scenes-v{SCENES_VERSION}-{self.start}+{self.count}-{self.height}x{self.width}-seed{self.seed}"

    def _checked(self, index: int) -> int:
        """IndexError beyond the end also ends a plain `for` loop over the dataset."""
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        return index

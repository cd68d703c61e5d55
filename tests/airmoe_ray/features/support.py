"""Pictures to compute features of, and a place to keep these."""

import time
from collections import Counter
from pathlib import Path

import numpy as np

from airmoe_ray.config import Config
from airmoe_ray.data.base import Sample
from airmoe_ray.features.cache_folder import CHUNK
from airmoe_ray.features.cache_reader import FeatureCache

IMAGES = 2 * CHUNK + 9


class Pictures:
    """Noise of two sizes, in turns; counts how often each is decoded."""

    classes, domains = None, ("all",)

    def __init__(self, count: int = IMAGES, *, broken_at: int | None = None, delay_s: float = 0.0) -> None:
        self.count, self.broken_at, self.delay_s, self.decoded = count, broken_at, delay_s, Counter[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index == self.broken_at:
            raise KeyboardInterrupt
        time.sleep(self.delay_s)
        self.decoded[index] += 1
        rng, size = np.random.default_rng(index), ((24, 32), (32, 20))[index // 3 % 2]
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        return Sample(image, rng.integers(0, 4, size, dtype=np.uint8), 0, str(index))

    def domain_of(self, index: int) -> int:
        return 0

    def fingerprint(self) -> str:
        return f"pictures {self.count}"


def settings(folder: Path, **data: object) -> Config:
    return Config.model_validate({"data": {"image_size": 32, "cache_dir": str(folder / "cache"), **data}})


def content(cache: FeatureCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.folder.glob("*.bin"))}

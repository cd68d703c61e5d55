"""Tiny trees of images and labels, in the layouts that readers know."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike
from PIL import Image

from airmoe_ray.data.base import SegmentationDataset
from airmoe_ray.errors import DataError

HEIGHT, WIDTH = 6, 8


def put_image(path: Path, *, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 20, 30)).save(path)
    return path


def put_label(path: Path, ids: ArrayLike = 0) -> Path:
    """A PNG of one id everywhere, or of the ids given row by row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(np.asarray(ids, np.uint8), (HEIGHT, WIDTH)).copy()).save(path)
    return path


def put_flat(root: Path, *stems: str, ids: ArrayLike = 0) -> Path:
    for stem in stems:
        put_image(root / "images" / f"{stem}.jpg")
        put_label(root / "labels" / f"{stem}.png", ids)
    return root


def put_apollo(root: Path, road: str, record: str, frame: str, ids: ArrayLike) -> str:
    """Returns the pair's line in an official list."""
    image = f"{road}/ColorImage/{record}/Camera 5/{frame}.jpg"
    label = f"{road}/Label/{record}/Camera 5/{frame}_bin.png"
    put_image(root / image)
    put_label(root / label, ids)
    return f"{image}\t{label}\n"


def names(dataset: SegmentationDataset) -> list[str]:
    return [dataset[i].name for i in range(len(dataset))]


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message

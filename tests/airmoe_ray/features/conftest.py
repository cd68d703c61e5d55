"""The embedded backbone, loaded once."""

import pytest

from airmoe_ray.config import Config
from airmoe_ray.features.backbone import Backbone, load_backbone


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone(Config().backbone)

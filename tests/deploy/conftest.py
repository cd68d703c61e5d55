"""The image that tests of containers share."""

import pytest

from tests.deploy import containers


@pytest.fixture(scope="session")
def image() -> str:
    """Name of the image, as the Dockerfile builds it; layers that did not change are taken from the last time."""
    if reason := containers.why_not():
        pytest.skip(reason)
    containers.build()
    return containers.IMAGE

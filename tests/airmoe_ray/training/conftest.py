"""One trained run for all files that look at it, and copies to spoil."""

import shutil
from pathlib import Path

import pytest

from tests.airmoe_ray.training.tiny_runs import airmoe, tiny


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder in which `airmoe train` has made runs/quickstart."""
    folder = tmp_path_factory.mktemp("trained")
    result = airmoe("train", "--config", "quickstart", *tiny(), cwd=folder)
    assert result.code == 0, result.err
    return folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """The trained run, to be spoiled."""
    shutil.copytree(trained / "runs" / "quickstart", tmp_path / "r")
    return tmp_path

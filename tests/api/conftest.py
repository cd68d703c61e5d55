"""One small untrained run, and one real server of it for all test files: starting Ray and its actors takes a while."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.storage.checkpoint import ModelCard, save_checkpoint
from tests.api.support import EXPERTS, TOP_K, Server

SIZES = (f"experts.count={EXPERTS}", "experts.hidden=16", "experts.width=16", f"routing.top_k={TOP_K}")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 small experts, K = 2, on 64-pixel images."""
    config = load_config("quickstart", [*SIZES, "data.image_size=64"])
    backbone, classes = load_backbone(config.backbone), open_dataset(config.data, "test").classes
    card = ModelCard(
        classes=list(classes.names),
        palette=[list(colour) for colour in classes.palette],
        feature_dim=backbone.dim,
        dilations=[2, 4, 8],
        backbone_name=backbone.name,
        backbone_fingerprint=backbone.fingerprint,
        name="little town",
        terms="for research use only",
        clients=["clear days", "rainy streets", "night drawings"],  # nobody said what the fourth knows
    )
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(card.classes), dilations=(2, 4, 8))
    folder = tmp_path_factory.mktemp("web") / "run"
    save_checkpoint(folder / "checkpoint", model, card)
    return folder


@pytest.fixture(scope="session")
def servers() -> Iterator[list[Server]]:
    """Servers that tests of this process have had, the newest last; each has to end well, too."""
    servers: list[Server] = []
    yield servers
    left = [process for server in servers for process in server.stop()[1]]
    assert not left
    assert not any(server.is_listening() for server in servers)


@pytest.fixture(scope="module")
def server(servers: list[Server], run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A ready server of its own copy of the run: the one that is there, or a new one where a test has ended the last.

    Tests that end it come last by the names of their files: no further start is needed.
    """
    if not servers or servers[-1].process.poll() is not None:
        servers.append(Server(Path(shutil.copytree(run_folder, tmp_path_factory.mktemp("served") / "run"))))
        servers[-1].wait_until_ready()
    return servers[-1]


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client

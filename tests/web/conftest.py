"""One small untrained run, and one real server of it per test file: starting Ray and its actors takes a while."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from airmoe_ray.backbone import load_backbone
from airmoe_ray.checkpoint import ModelCard, save_checkpoint
from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.moe import AirMoE
from tests.web.support import EXPERTS, TOP_K, Server

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
    )
    model = AirMoE(config, feature_dim=backbone.dim, classes=len(card.classes), dilations=(2, 4, 8))
    folder = tmp_path_factory.mktemp("web") / "run"
    save_checkpoint(folder / "checkpoint", model, card)
    return folder


@pytest.fixture(scope="module")
def server(run_folder: Path) -> Iterator[Server]:
    """A ready server; it has to end well, too."""
    server = Server(run_folder)
    try:
        server.wait_until_ready()
        yield server
    finally:
        _, left = server.stop()
    assert not left
    assert not server.is_listening()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client

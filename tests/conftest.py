"""What tests share: a tiny AirMoE in float64 (laws hold to rounding there), real CamVid, and no silent skips."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe_ray.config import Config
from airmoe_ray.model.moe import AirMoE

THREADS = int(os.environ.get("AIRMOE_TEST_THREADS", "1"))  # pytest -n runs a process per core already
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # and so for the processes that tests start
torch.set_num_threads(THREADS)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background, where Ctrl-C would pass tests by as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

FEATURE_DIM, CLASSES = 6, 3
SMALL: dict[str, Any] = {
    "experts": {"count": 4, "hidden": 16, "width": 16},
    "frl": {"dim": 8, "prototypes": 3},
    "routing": {"top_k": 2},
    "train": {"loss_stride": 1},
}


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    """A run sets the number it is configured with; the next test has the common one again."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """Config of 4 clients, K = 2, d = 8, M = 3; each keyword is a block of settings that differ."""

    def make(**blocks: Any) -> Config:
        settings = dict(SMALL)
        for name, block in blocks.items():
            settings[name] = {**settings.get(name, {}), **block} if isinstance(block, dict) else block
        return Config.model_validate(settings)

    return make


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., Config]) -> Callable[..., AirMoE]:
    """Model of 6 feature channels and 3 classes in float64, from `make_config`'s settings or a whole Config."""

    def make(config: Config | None = None, **blocks: Any) -> AirMoE:
        config = config or make_config(**blocks)
        return AirMoE(config, feature_dim=FEATURE_DIM, classes=CLASSES, dilations=(1, 2, 3)).double()

    return make


@pytest.fixture(scope="session")
def make_features() -> Callable[..., Tensor]:
    """Random feature maps (B, 6, h, w) in float64; inputs differ in their means, as pictures do."""

    def make(batch: int, *, seed: int = 0, grid: tuple[int, int] = (3, 4)) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(batch, FEATURE_DIM, *grid, generator=draw, dtype=torch.float64)
        return noise + 2 * torch.randn(batch, FEATURE_DIM, 1, 1, generator=draw, dtype=torch.float64)

    return make


@pytest.fixture(scope="session")
def camvid() -> Path:
    """Real CamVid, where it is at hand."""
    return real_data("camvid")


@pytest.fixture(scope="session")
def labelme() -> Path:
    """Real street photographs of many places, where they are at hand."""
    return real_data("labelme")


def real_data(name: str) -> Path:
    """A folder of real images beside the repository, or where the environment says."""
    variable = f"AIRMOE_{name.upper()}"
    folder = Path(os.environ.get(variable, Path(__file__).parents[2] / "shared" / "data" / name))
    if not folder.is_dir():
        pytest.skip(f"no images at {folder}; set {variable} to a folder with images/ and labels/")
    return folder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With AIRMOE_REQUIRE_ALL set, a test skipped because a real part is missing is a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("AIRMOE_REQUIRE_ALL"):
        reason = call.excinfo.value if call.excinfo else "skipped"
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}; AIRMOE_REQUIRE_ALL wants every part present"

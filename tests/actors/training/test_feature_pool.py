"""Features by a pool of actors: the bytes of one process, also when a worker dies, and told when they cannot be."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.cluster.placement import Node
from actors.training.feature_pool import build_features, pool_size
from airmoe_ray.config import Config
from airmoe_ray.data import held_out, open_dataset
from airmoe_ray.errors import DataError, UserError
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features, cached_views
from airmoe_ray.features.cache_folder import entries
from airmoe_ray.runtime.progress import Progress, Silent


def config_of(folder: Path, **data: Any) -> Config:
    settings = {"image_size": 32, "train_count": 70, "val_count": 5, "views": ["identity", "hflip"]}
    return Config.model_validate({"data": settings | {"cache_dir": str(folder / "cache")} | data})


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.bin"))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> dict[str, bytes]:
    """All chunks of the training views and of validation, built in this process."""
    config = config_of(tmp_path_factory.mktemp("local"))
    backbone, train = load_backbone(config.backbone), open_dataset(config.data, "train")
    cached_views(train, backbone, config, Silent().progress)
    val = held_out(config.data, train)
    assert val is not None
    cached_features(val, backbone, config, "identity")
    return content(Path(config.data.cache_dir))


class Bar(Silent):
    """Remembers where the bar was, and does something at its first step."""

    def __init__(self, at_first: Any = lambda: None) -> None:
        self.steps: list[tuple[int, int]] = []
        self.at_first = at_first

    def progress(self, title: str) -> Progress:
        def move(done: int, total: int) -> None:
            if not self.steps:
                self.at_first()
            self.steps.append((done, total))

        return move


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # gone since
            found += [child] if "FeatureWor" in child.name() else []
    return found


def test_a_pool_writes_the_bytes_of_one_process_and_then_is_gone(
    own_ray: None, expected: dict[str, bytes], tmp_path: Path
) -> None:
    config, seen = config_of(tmp_path), []
    bar = Bar(lambda: seen.extend(workers()))
    build_features(config, tmp_path / "run", bar)
    left = workers()
    assert content(Path(config.data.cache_dir)) == expected
    assert len(expected) == 3 + 3 + 1
    assert bar.steps[-1] == (145, 145)
    assert seen
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
    again = Bar()
    build_features(config, tmp_path / "run", again)
    assert not again.steps


def test_a_worker_that_is_killed_is_replaced_and_its_chunk_done(
    own_ray: None, expected: dict[str, bytes], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    build_features(config, tmp_path / "run", Bar(lambda: os.kill(workers()[0].pid, signal.SIGKILL)))
    assert content(Path(config.data.cache_dir)) == expected
    assert all(entry.state == "complete" and not entry.in_use for entry in entries(Path(config.data.cache_dir)))


def test_a_broken_image_is_told_as_such_and_leaves_no_worker(own_ray: None, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("images", "labels"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            mode = "RGB" if name == "images" else "L"
            Image.new(mode, (40, 32)).save(tmp_path / "set" / name / f"s_{i}.png")
    (tmp_path / "set" / "images" / "s_2.png").write_bytes(b"not an image")
    config = config_of(tmp_path, name="camvid", root=str(tmp_path / "set"))
    with pytest.raises(DataError, match=r"s_2\.png: cannot be read as an image") as told:
        build_features(config, tmp_path / "run", Silent())
    assert "\n" not in str(told.value)
    assert list((tmp_path / "cache").iterdir()) == []
    _, alive = psutil.wait_procs(workers(), timeout=30)
    assert not alive


def test_no_feature_is_computed_for_a_run_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    config = config_of(tmp_path)
    with pytest.raises(UserError, match=r"run: checkpoints need .* MB, 0 MB are free"):
        build_features(config, tmp_path / "run", Silent())
    assert not Path(config.data.cache_dir).exists()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 8)), min_size=1, max_size=5), st.integers(1, 200))
def test_workers_are_bounded_by_work_and_cores_and_spread_over_all_gpus(sizes: Any, jobs: int) -> None:
    cluster = [Node(float(cpus), float(gpus)) for cpus, gpus in sizes]
    cpus, gpus = sum(cpus for cpus, _ in sizes), sum(gpus for _, gpus in sizes)
    count, share = pool_size(cluster, jobs)
    assert 1 <= count <= min(jobs, cpus)
    if gpus == 0:
        assert share == 0
        assert count == min(jobs, cpus)
    else:
        per_gpu = round(1 / share)
        assert per_gpu * share == pytest.approx(1)
        assert count <= per_gpu * gpus  # they fit
        assert count > (per_gpu - 1) * gpus  # and no GPU gets two more than it must

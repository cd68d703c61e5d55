"""Batches from cached features: views that change, one fetched ahead, and what the cache is worth."""

import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch

from airmoe_ray.config import Config
from airmoe_ray.errors import UserError
from airmoe_ray.features.cache_builder import cached_views
from airmoe_ray.features.sources import CachedSource, ahead
from airmoe_ray.runtime.progress import Silent
from airmoe_ray.training.run import train_run
from tests.airmoe_ray.features.support import Pictures, settings


def test_batches_are_the_cached_rows_of_views_that_change_from_epoch_to_epoch(tmp_path, backbone):
    config = settings(tmp_path, views=["identity", "hflip"])
    views = cached_views(Pictures(), backbone, config, Silent().progress)
    source, indices = CachedSource(views, config), [0, 1, 2, 6, 7, 8, 30, 31, 36]
    chosen = []
    for epoch in (0, 1, 0):
        features, labels, _ = source.batch(epoch, indices)
        assert features.dtype == torch.float32
        rows = [[np.array_equal(labels[row], view.get(i)[1]) for view in views] for row, i in enumerate(indices)]
        assert all(sum(row) == 1 for row in rows)
        chosen.append([row.index(True) for row in rows])
        for row, (i, view) in enumerate(zip(indices, chosen[-1], strict=True)):
            assert np.array_equal(features[row].numpy(), views[view].get(i)[0].astype(np.float32))
    assert chosen[0] == chosen[2] != chosen[1]


def test_fetching_in_a_thread_starts_no_second_team_of_openmp_threads(tmp_path, backbone):
    """With more of its threads than cores, OpenMP lets every barrier of a training step sleep."""
    config = settings(tmp_path)
    source = CachedSource(cached_views(Pictures(6), backbone, config, Silent().progress), config)
    process, many, grown = psutil.Process(), [0] * 2000, []

    def new_threads(work: Callable[[], object]) -> None:
        torch.set_num_threads(4)  # of the calling thread
        before = {thread.id for thread in process.threads()}
        work()
        grown.append(len({thread.id for thread in process.threads()} - before))

    for work in (lambda: source.batch(0, many), torch.ones(1 << 20).half().float):
        thread = threading.Thread(target=new_threads, args=(work,))
        thread.start()
        thread.join()
    assert grown == [0, 3]


def test_fetching_ahead_changes_no_item_and_hides_no_error():
    fetched: list[int] = []

    def items():
        for i in range(5):
            fetched.append(i)
            yield i
        raise UserError("at the end")

    several = ahead(items())
    for expected in range(5):
        assert next(several) == expected
        deadline = time.monotonic() + 5
        while len(fetched) < min(expected + 2, 5) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(fetched) == min(expected + 2, 5)  # one ahead, and only one
    with pytest.raises(UserError, match="at the end"):
        next(several)


def test_the_log_says_what_the_cache_is_worth(tmp_path):
    lines: list[str] = []

    class Listener(Silent):
        def line(self, text: str) -> None:
            lines.append(text)

    small = {"experts": {"count": 4, "hidden": 16, "width": 16}, "train": {"epochs": 2, "threads": 1}}
    data = {"image_size": 64, "train_count": 12, "val_count": 4, "cache_dir": str(tmp_path / "cache")}
    train_run(
        Config.model_validate({**small, "data": data, "routing": {"top_k": 2}}), tmp_path / "run", report=Listener()
    )
    told = [line for line in lines if "with the backbone in the loop it would take" in line]
    assert len(told) == 1
    words = told[0].split()
    cached, online = float(words[words.index("takes") + 1]), float(words[words.index("about") + 1])
    assert 0 < cached < online

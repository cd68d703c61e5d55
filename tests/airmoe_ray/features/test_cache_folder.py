"""Folders of cached features: shared by builders, kept after a kill, mended after damage, never removed in use."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from airmoe_ray.features.cache_builder import build_chunk, cached_features, plan_features, work_on
from airmoe_ray.features.cache_folder import CHUNK, chunk_file, claim, entries, hold, remove
from tests.airmoe_ray.features.support import Pictures, content, settings


def test_two_builders_at_once_share_the_work(tmp_path, backbone):
    datasets, caches = (Pictures(6 * CHUNK), Pictures(6 * CHUNK)), {}
    plan = plan_features(datasets[0], backbone, settings(tmp_path), "identity")

    def build(number: int) -> None:
        caches[number] = cached_features(datasets[number], backbone, settings(tmp_path), "identity")

    threads = [threading.Thread(target=build, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert content(caches[0]) == content(caches[1])
    assert len(content(caches[0])) == 6
    decoded = datasets[0].decoded + datasets[1].decoded
    assert all(decoded[index] == 1 for index in range(CHUNK, 6 * CHUNK))
    assert all(sum(dataset.decoded.values()) > CHUNK for dataset in datasets)
    assert {path.suffix for path in plan.folder.iterdir()} == {".bin", ".json", ""}


BUILDER = """
import sys
from pathlib import Path
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features
from tests.airmoe_ray.features.support import Pictures, settings
config = settings(Path(sys.argv[1]))
cached_features(Pictures(delay_s=0.02), load_backbone(config.backbone), config, "identity")
"""


def test_what_a_killed_process_has_done_is_kept_and_what_it_had_in_hand_is_taken_over(tmp_path, backbone):
    config = settings(tmp_path)
    plan = plan_features(Pictures(), backbone, config, "identity")
    process = subprocess.Popen([sys.executable, "-c", BUILDER, tmp_path], cwd=Path(__file__).parents[3])
    deadline = time.monotonic() + 120
    while plan.missing() == [0, 1, 2] or not list(plan.folder.glob("*.part")):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in plan.folder.glob("*.bin")}
    assert len(kept) < plan.about.chunks
    cache = cached_features(Pictures(), backbone, config, "identity")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert content(cache) == content(cached_features(Pictures(), backbone, settings(tmp_path / "x"), "identity"))


@pytest.mark.parametrize("damage", ["cut", "stump", "gone"])
def test_a_damaged_chunk_is_computed_again(tmp_path, backbone, damage):
    config = settings(tmp_path)
    before = content(cached_features(Pictures(), backbone, config, "identity"))
    path = chunk_file(plan_features(Pictures(), backbone, config, "identity").folder, 1)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -7 if damage == "cut" else 5])
    assert content(cached_features(Pictures(), backbone, config, "identity")) == before


def test_a_chunk_in_hand_is_not_begun_by_another_and_a_dead_one_is(tmp_path, backbone):
    plan = plan_features(Pictures(), backbone, settings(tmp_path), "identity")
    with work_on(plan):
        with claim(chunk_file(plan.folder, 0), done=lambda: False) as file:
            assert file is not None
            assert not build_chunk(plan, 0, Pictures(), backbone)
            file.write(b"half")
            file.flush()
            copy = chunk_file(plan.folder, 1).with_suffix(".part")
            copy.write_bytes(b"of somebody who died")  # no lock on it
        assert build_chunk(plan, 1, Pictures(), backbone)
        assert plan.sizes(1) is not None


def test_a_folder_in_use_is_not_removed(tmp_path, backbone):
    cache = cached_features(Pictures(3), backbone, settings(tmp_path), "identity")
    assert entries(tmp_path / "cache")[0].in_use
    assert not remove(cache.folder)
    assert cache.get(2)[0].any()
    folder = cache.folder
    del cache
    assert remove(folder)
    assert not entries(tmp_path / "cache")


def test_a_folder_can_be_taken_up_while_it_is_removed(tmp_path):
    folder, stop = tmp_path / "0123456789abcdef", threading.Event()

    def prune() -> None:
        while not stop.is_set():
            remove(folder)

    pruner = threading.Thread(target=prune)
    pruner.start()
    try:
        for _ in range(200):
            with hold(folder):
                (folder / "x").write_text("mine")  # nobody may take it away from under us
                assert (folder / "x").read_text() == "mine"
    finally:
        stop.set()
        pruner.join()

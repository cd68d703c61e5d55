"""Cached features: the backbone's own, computed once, whoever builds them and however a builder ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from airmoe_ray import features as module
from airmoe_ray.backbone import Backbone, load_backbone
from airmoe_ray.cache_folder import CHUNK, chunk_file, claim, entries, hold, remove
from airmoe_ray.config import Config
from airmoe_ray.data.base import Sample
from airmoe_ray.data.transforms import apply_view, fit
from airmoe_ray.errors import UserError
from airmoe_ray.feature_cache import FeatureCache
from airmoe_ray.features import build_chunk, cached_features, cached_views, plan_features, to_tensor, work_on
from airmoe_ray.reporter import Silent
from airmoe_ray.run import train_run
from airmoe_ray.sources import CachedSource, ahead

IMAGES = 2 * CHUNK + 9


class Pictures:
    """Noise of two sizes, in turns; counts how often each is decoded."""

    classes, domains = None, ("all",)

    def __init__(self, count: int = IMAGES, *, broken_at: int | None = None, delay_s: float = 0.0) -> None:
        self.count, self.broken_at, self.delay_s, self.decoded = count, broken_at, delay_s, Counter[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index == self.broken_at:
            raise KeyboardInterrupt
        time.sleep(self.delay_s)
        self.decoded[index] += 1
        rng, size = np.random.default_rng(index), ((24, 32), (32, 20))[index // 3 % 2]
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        return Sample(image, rng.integers(0, 4, size, dtype=np.uint8), 0, str(index))

    def domain_of(self, index: int) -> int:
        return 0

    def fingerprint(self) -> str:
        return f"pictures {self.count}"


def settings(folder: Path, **data: object) -> Config:
    return Config.model_validate({"data": {"image_size": 32, "cache_dir": str(folder / "cache"), **data}})


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(Config().backbone)


def content(cache: FeatureCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.folder.glob("*.bin"))}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("view", ["identity", "hflip", "scale:0.75"])
def test_a_cached_map_is_what_the_backbone_says_of_that_image(tmp_path, backbone, dtype, view):
    dataset = Pictures(CHUNK + 7)
    cache = cached_features(dataset, backbone, settings(tmp_path, cache_dtype=dtype), view)
    assert len(cache) == len(dataset)
    assert cache.sizes == [(24, 32), (32, 24)]  # 20 is padded to 24, the next multiple of the embedded ViT's patch
    for index in (0, 3, 4, CHUNK - 1, CHUNK, CHUNK + 6):
        sample = dataset[index]
        image, label = apply_view(fit(sample.image, 32), fit(sample.label, 32), view)
        width = image.shape[1]
        image = np.pad(image, [(0, 0), (0, -width % 8), (0, 0)], mode="edge")
        features, cached_label = cache.get(index)
        assert features.dtype == dtype
        expected = backbone(to_tensor([image]))[0].numpy()
        np.testing.assert_allclose(features, expected, rtol=2e-3 if dtype == "float16" else 1e-4, atol=2e-3)
        assert np.array_equal(cached_label[:, :width], label)
        assert (cached_label[:, width:] == 255).all()


def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path, backbone):
    one = cached_features(Pictures(), backbone, settings(tmp_path / "1", cache_dtype="float32"), "identity")
    torch.set_num_threads(3)
    try:
        three = cached_features(Pictures(), backbone, settings(tmp_path / "3", cache_dtype="float32"), "identity")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert content(one) == content(three)


def test_a_complete_cache_is_read_and_not_computed(tmp_path, backbone):
    config = settings(tmp_path)
    first = cached_features(Pictures(), backbone, config, "identity")
    again = Pictures(broken_at=0)
    assert cached_features(again, backbone, config, "identity").folder == first.folder
    assert not again.decoded


def test_an_interrupted_build_goes_on_where_it_was(tmp_path, backbone):
    config, whole = settings(tmp_path), cached_features(Pictures(), backbone, settings(tmp_path / "x"), "identity")
    with pytest.raises(KeyboardInterrupt):
        cached_features(Pictures(broken_at=CHUNK + 2), backbone, config, "identity")
    rest, bar = Pictures(), []
    cache = cached_features(rest, backbone, config, "identity", progress=lambda *at: bar.append(at))
    assert set(rest.decoded) - {0} == set(range(CHUNK, IMAGES))  # the first one is looked at for its size
    assert bar[0][0] > CHUNK
    assert bar[-1] == (IMAGES, IMAGES)
    assert content(cache) == content(whole)


def test_a_build_that_fails_at_once_leaves_nothing_behind(tmp_path, backbone):
    with pytest.raises(KeyboardInterrupt):
        cached_features(Pictures(broken_at=5), backbone, settings(tmp_path), "identity")
    assert list((tmp_path / "cache").iterdir()) == []


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
sys.path.insert(0, "tests")
from test_features import Pictures, cached_features, load_backbone, settings
config = settings(Path(sys.argv[1]))
cached_features(Pictures(delay_s=0.02), load_backbone(config.backbone), config, "identity")
"""


def test_what_a_killed_process_has_done_is_kept_and_what_it_had_in_hand_is_taken_over(tmp_path, backbone):
    config = settings(tmp_path)
    plan = plan_features(Pictures(), backbone, config, "identity")
    process = subprocess.Popen([sys.executable, "-c", BUILDER, tmp_path], cwd=Path(__file__).parent.parent)
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


def test_room_is_checked_for_all_views_before_any_is_computed(tmp_path, backbone, monkeypatch):
    config, dataset = settings(tmp_path, views=["identity", "hflip"]), Pictures()
    one = IMAGES * (4 * 3 * backbone.dim * 2 + 32 * 24)
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=int(1.5 * one)))
    with pytest.raises(UserError, match=rf"features of {2 * IMAGES} images needs .* GB free; make room"):
        cached_views(dataset, backbone, config, Silent().progress)
    assert set(dataset.decoded) == {0}
    cached_features(dataset, backbone, config, "identity")  # one alone fits


def test_a_cache_dir_that_cannot_be_one_is_told_in_one_line(tmp_path, backbone):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache_dir: .* cannot be used") as told:
        cached_features(Pictures(), backbone, settings(tmp_path), "identity")
    assert "\n" not in str(told.value)


def test_batches_are_the_cached_rows_of_views_that_change_from_epoch_to_epoch(tmp_path, backbone):
    config = settings(tmp_path, views=["identity", "hflip"])
    views = cached_views(Pictures(), backbone, config, Silent().progress)
    source, indices = CachedSource(views, config), [0, 1, 2, 6, 7, 8, 30, 31, 36]
    chosen = []
    for epoch in (0, 1, 0):
        features, labels = source.batch(epoch, indices)
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
    torch.set_num_threads(1)
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

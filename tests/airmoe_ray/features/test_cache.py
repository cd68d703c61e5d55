"""Cached features: the backbone's own, computed once, and room for them checked before."""

import numpy as np
import pytest
import torch

from airmoe_ray.data.transforms import apply_view, fit
from airmoe_ray.errors import UserError
from airmoe_ray.features import cache_builder as module
from airmoe_ray.features.backbone import load_training_backbone
from airmoe_ray.features.cache_builder import cached_features, cached_views
from airmoe_ray.features.cache_folder import CHUNK
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.runtime.progress import Silent
from tests.airmoe_ray.features.support import IMAGES, Pictures, content, settings


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


def test_features_in_bfloat16_are_near_those_in_float32_and_kept_apart_from_them(tmp_path):
    plain = settings(tmp_path, cache_dtype="float32")
    half = plain.model_copy(update={"train": plain.train.model_copy(update={"backbone_precision": "bfloat16"})})
    caches = [cached_features(Pictures(5), load_training_backbone(c), c, "identity") for c in (plain, half)]
    assert caches[0].folder != caches[1].folder
    expected, found = (np.concatenate([cache.get(index)[0].ravel() for index in range(5)]) for cache in caches)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 1e-5 < error < 0.05  # another format, and the same features
    again = Pictures(5, broken_at=0)  # each is found again by its own settings
    assert cached_features(again, load_training_backbone(plain), plain, "identity").folder == caches[0].folder


def test_the_bytes_do_not_depend_on_the_number_of_threads(tmp_path, backbone):
    torch.set_num_threads(1)
    one = cached_features(Pictures(), backbone, settings(tmp_path / "1", cache_dtype="float32"), "identity")
    torch.set_num_threads(3)
    three = cached_features(Pictures(), backbone, settings(tmp_path / "3", cache_dtype="float32"), "identity")
    assert torch.get_num_threads() == 3
    assert content(one) == content(three)


def test_a_complete_cache_is_read_and_not_computed(tmp_path, backbone):
    config = settings(tmp_path)
    first = cached_features(Pictures(), backbone, config, "identity")
    again = Pictures(broken_at=0)
    assert cached_features(again, backbone, config, "identity").folder == first.folder
    assert not again.decoded


def test_an_interrupted_build_goes_on_where_it_was(tmp_path, backbone):
    torch.set_num_threads(1)  # one chunk after another
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
    torch.set_num_threads(1)  # so that no other chunk is done by then
    with pytest.raises(KeyboardInterrupt):
        cached_features(Pictures(broken_at=5), backbone, settings(tmp_path), "identity")
    assert list((tmp_path / "cache").iterdir()) == []


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

"""The cloud's refiner: what it leaves alone, what reaches it, and its way through cache, checkpoint and training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from airmoe_ray.config import Config
from airmoe_ray.config_file import load_config
from airmoe_ray.data import open_dataset
from airmoe_ray.errors import CheckpointError, ConfigError
from airmoe_ray.features.backbone import load_backbone
from airmoe_ray.features.cache_builder import cached_features
from airmoe_ray.features.preprocess import prepare, to_tensor
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.refiner import Refiner
from airmoe_ray.training.run import train_run

SETTINGS = [
    "backbone.name=efficientnet_lite0",
    "data.image_size=96",
    "data.train_count=10",
    "data.val_count=4",
    "experts.count=3",
    "experts.hidden=16",
    "experts.width=16",
    "experts.refiner=16",
    "train.batch_size=4",
    "train.epochs=2",
]


def small(folder: Path, *more: str) -> Config:
    return load_config("quickstart", [*SETTINGS, f"data.cache_dir={folder / 'cache'}", *more])


def make(classes: int = 3, **more: Any) -> Refiner:
    return Refiner((4, 6), classes=classes, width=16, generator=torch.Generator().manual_seed(0), **more).double()


def maps(batch: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits at stride 16 and maps at strides 4 and 8 of an image of this size."""
    draw = torch.Generator().manual_seed(1)
    sizes = ((3, 16), (4, 4), (6, 8))
    logits, fine_4, fine_8 = (
        torch.randn(batch, c, height // s, width // s, generator=draw, dtype=torch.float64) for c, s in sizes
    )
    return logits, fine_4, fine_8


@pytest.mark.parametrize("size", [(64, 96), (32, 160)])
def test_an_untrained_refiner_only_interpolates(size: tuple[int, int]) -> None:
    logits, *fine = maps(2, *size)
    expected = interpolate(logits, size=fine[0].shape[2:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(make()(logits, fine), expected)


def test_every_weight_learns_and_logits_and_maps_all_matter() -> None:
    refiner, (logits, *fine) = make(), maps(2, 64, 96)
    with torch.no_grad():
        refiner.correct.weight.normal_(generator=torch.Generator().manual_seed(2))
    inputs = [x.requires_grad_() for x in (logits, *fine)]
    refiner(logits, fine).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in refiner.parameters())
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in inputs)


def test_it_sees_a_few_pixels_only() -> None:
    """Normalisation is over the image, so far-away logits move it a little; a foreign object there must not."""
    refiner, (logits, *fine) = make(), maps(1, 128, 128)
    with torch.no_grad():
        refiner.correct.weight.normal_(generator=torch.Generator().manual_seed(2))
    near, far = logits.clone(), logits.clone()
    near[:, :, 0, 0] += 3
    far[:, :, -1, -1] += 3
    before = refiner(logits, fine)[:, :, :4, :4]
    moved = [(refiner(changed, fine)[:, :, :4, :4] - before).abs().mean() for changed in (near, far)]
    assert moved[1] < 0.05 * moved[0]


def test_cached_fine_maps_are_the_backbones_own(tmp_path: Path) -> None:
    config = small(tmp_path, "data.cache_dtype=float32")
    dataset, backbone = open_dataset(config.data, "train"), load_backbone(config.backbone)
    cache = cached_features(dataset, backbone, config, "identity")
    plain = cached_features(
        dataset, backbone, small(tmp_path, "data.cache_dtype=float32", "experts.refiner=0"), "identity"
    )
    assert cache.folder != plain.folder
    for index in (0, 7, 9):
        padded, _ = prepare(dataset[index].image, image_size=96, multiple=backbone.pad_multiple)
        expected = backbone.maps(to_tensor([padded]), fine=True)
        np.testing.assert_array_equal(cache.get(index)[0], plain.get(index)[0])
        np.testing.assert_array_equal(cache.get(index)[1], plain.get(index)[1])
        assert [x.shape[0] for x in cache.get_fine(index)] == list(backbone.fine_dims) == [24, 40]
        for found, map_ in zip(cache.get_fine(index), expected.fine, strict=True):
            np.testing.assert_allclose(found, map_[0], rtol=1e-3, atol=1e-4)
        assert plain.get_fine(index) == []


def test_a_run_with_a_refiner_trains_saves_and_answers(tmp_path: Path) -> None:
    config = small(tmp_path)
    train_run(config, tmp_path / "run")
    segmenter = Segmenter.load(tmp_path / "run" / "checkpoint")
    refiner = segmenter.model.refiner
    assert refiner is not None
    assert refiner.correct.weight.abs().max() > 0  # it has learned
    image = segmenter.prepare(open_dataset(config.data, "test")[0].image)
    output = segmenter.run([image], [3])
    padded = image.padded.shape
    assert output.logits_BChw.shape[2:] == (padded[0] // 4, padded[1] // 4)
    assert output.coarse_BChw.shape[2:] == (padded[0] // 16, padded[1] // 16)
    without = Segmenter.load(tmp_path / "run" / "checkpoint", small(tmp_path, "experts.refiner=0"))
    assert torch.equal(without.run([image], [3]).logits_BChw, output.coarse_BChw)  # all else is as it was
    with pytest.raises(CheckpointError, match="fine_dims"):
        train_run(small(tmp_path, "experts.refiner=0", "train.epochs=3"), tmp_path / "run", resume=True)


def test_a_backbone_without_finer_maps_and_a_run_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experts.refiner = 16: embedded has no finer maps"):
        train_run(small(tmp_path, "backbone.name=embedded"), tmp_path / "vit")
    train_run(small(tmp_path, "experts.refiner=0", "train.epochs=1"), tmp_path / "plain")
    with pytest.raises(CheckpointError, match="fine_dims"):
        train_run(small(tmp_path), tmp_path / "plain", resume=True)

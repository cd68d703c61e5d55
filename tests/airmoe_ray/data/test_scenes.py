"""Laws of the procedural scenes: reproducible, balanced, physically foggy, hard for colour and place alone, quick."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from airmoe_ray.data.scenes import CLASSES, DOMAINS, Scenes, render_scene
from airmoe_ray.data.scenes.weather import veil

K = len(CLASSES.names)


def test_same_arguments_give_the_same_bytes_and_others_do_not() -> None:
    first, again = render_scene(7), render_scene(7)
    assert first.image.tobytes() == again.image.tobytes()
    assert first.label.tobytes() == again.label.tobytes()
    for other in (render_scene(12), render_scene(7, seed=1)):  # same weather, other street
        assert (first.image != other.image).mean() > 0.5
        assert (first.label != other.label).mean() > 0.1


@pytest.mark.parametrize(("height", "width"), [(192, 256), (100, 333), (333, 100), (33, 47)])
def test_any_size_renders_all_weathers(height: int, width: int) -> None:
    for index in range(2 * len(DOMAINS)):
        sample = render_scene(index, height=height, width=width)
        assert sample.image.shape == (height, width, 3)
        assert sample.label.shape == (height, width)
        assert sample.image.dtype == sample.label.dtype == np.uint8
        assert sample.label.max() < K
        assert sample.image.std() > 5  # not a blank


def test_the_layout_scales_with_the_image() -> None:
    """A scene drawn twice as large is the same scene: labels agree but for edges."""
    for index in (0, 1, 3):
        small, large = render_scene(index).label, render_scene(index, height=384, width=512).label
        assert (small == large[1::2, 1::2]).mean() > 0.9


def test_dataset_walks_the_series_with_balanced_domains() -> None:
    scenes = Scenes(13, 10, height=24, width=32)
    samples = [scenes[i] for i in range(len(scenes))]
    assert [sample.domain for sample in samples] == [scenes.domain_of(i) for i in range(10)]
    assert np.bincount([sample.domain for sample in samples]).tolist() == [2] * len(DOMAINS)
    assert samples[4].name == "scene_0000017"
    assert np.array_equal(samples[4].image, render_scene(17, height=24, width=32).image)
    with pytest.raises(IndexError):
        scenes[10]


def test_fingerprint_tells_every_parameter_apart() -> None:
    variants = [Scenes(0, 5), Scenes(1, 5), Scenes(0, 6), Scenes(0, 5, height=96), Scenes(0, 5, width=96)]
    prints = {scenes.fingerprint() for scenes in [*variants, Scenes(0, 5, seed=1)]}
    assert len(prints) == len(variants) + 1
    assert Scenes(0, 5).fingerprint() in prints


def test_every_class_has_its_share_in_every_domain() -> None:
    labels = [render_scene(1000 + i).label for i in range(50)]
    counts = np.array([np.bincount(label.ravel(), minlength=K) for label in labels])
    share = counts.sum(axis=0) / counts.sum()
    assert share.min() >= 0.007, dict(zip(CLASSES.names, share.round(4), strict=True))
    by_domain = np.array([counts[d :: len(DOMAINS)].sum(axis=0) for d in range(len(DOMAINS))])
    assert (by_domain / by_domain.sum(axis=1, keepdims=True)).min() >= 0.005
    present = (counts >= 60).mean(axis=0)  # about one cell of a stride-8 grid
    assert present.min() >= 0.7, dict(zip(CLASSES.names, present, strict=True))


def test_contrast_through_the_veil_falls_exponentially_with_depth() -> None:
    depth = np.linspace(1.0, 60.0, 40, dtype=np.float32)[None]
    air = np.full((3, 1, 1), 0.7, np.float32)
    bright, dark = (veil(np.full((3, 1, 40), level, np.float32), depth, 0.05, air) for level in (0.9, 0.1))
    slope = np.polyfit(depth[0], np.log((bright - dark)[0, 0]), 1)[0]
    assert slope == pytest.approx(-0.05, rel=1e-3)


def test_fog_hides_what_is_far() -> None:
    """Around the horizon things are far, at the bottom near: fog must take texture from the far rows."""

    def far_to_near(domain: str) -> float:
        images = [render_scene(5 * i + DOMAINS.index(domain)).image.astype(float).mean(axis=2) for i in range(12)]
        rough = np.mean([np.abs(np.diff(image, axis=1)).mean(axis=1) for image in images], axis=0)
        return float(rough[75:95].mean() / rough[115:140].mean())

    assert far_to_near("fog") < 0.75 * far_to_near("clear")


def test_domains_look_different() -> None:
    """Sky and sidewalk brightness: night is dark above and below, snow is white below."""

    def brightness(domain: str, name: str) -> float:
        samples = [render_scene(5 * i + DOMAINS.index(domain)) for i in range(12)]
        pixels = [sample.image[sample.label == CLASSES.names.index(name)] for sample in samples]
        return float(np.concatenate(pixels).mean())

    assert brightness("night", "sky") < 0.3 * brightness("clear", "sky")
    assert brightness("night", "road") < 0.7 * brightness("clear", "road")
    assert brightness("snow", "sidewalk") > 1.3 * brightness("clear", "sidewalk")


def _pixels(indices: range, stride: int) -> tuple[Tensor, Tensor]:
    """Features (r, g, b, x, y, x^2, y^2) and labels of every stride-th pixel."""
    features, labels = [], []
    for sample in (render_scene(index) for index in indices):
        label = torch.from_numpy(sample.label[::stride, ::stride]).flatten().long()
        rgb = torch.from_numpy(sample.image[::stride, ::stride]).reshape(-1, 3) / 255
        y, x = torch.meshgrid(*(torch.linspace(-1, 1, -(-n // stride)) for n in sample.label.shape), indexing="ij")
        place = torch.stack([x, y, x * x, y * y], dim=-1).reshape(-1, 4)
        features.append(torch.cat([rgb, place], dim=1))
        labels.append(label)
    return torch.cat(features), torch.cat(labels)


def logistic_miou() -> float:
    """mIoU [%] on scenes 5000.. of a multinomial logistic regression fitted on the pixels of scenes 0..64."""
    train, target = _pixels(range(65), 6)
    test, truth = _pixels(range(5000, 5040), 3)
    mean, std = train.mean(dim=0), train.std(dim=0)
    train, test = (train - mean) / std, (test - mean) / std
    weight, bias = torch.zeros(train.shape[1], K, requires_grad=True), torch.zeros(K, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(train @ weight + bias, target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        guess = (test @ weight + bias).argmax(dim=1)
    confusion = torch.bincount(truth * K + guess, minlength=K * K).reshape(K, K).double()
    hit = confusion.diagonal()
    return float(100 * (hit / (confusion.sum(dim=0) + confusion.sum(dim=1) - hit)).mean())


def test_colour_and_place_alone_do_not_tell_the_class() -> None:
    """Above 35 the dataset would not need a network; near 10 it would be unlearnable."""
    assert 12 < logistic_miou() < 35


def test_one_core_renders_fifty_scenes_a_second() -> None:
    """Best of five rounds in process time, since other work on the machine only ever slows us down."""
    rates = []
    for _ in range(5):
        start = time.process_time()
        for index in range(25):
            render_scene(index)
        rates.append(25 / (time.process_time() - start))
    assert max(rates) >= 50, rates

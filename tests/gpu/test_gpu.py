"""On a GPU: the answers are those of the CPU, memory stays bounded, and serving's bfloat16 is near; `make test-gpu`."""

import numpy as np
import pytest
import torch

from airmoe_ray import Segmenter
from airmoe_ray.data.scenes import render_scene
from airmoe_ray.features.serving_form import for_serving
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.storage.shipped import find_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair() -> dict[str, Segmenter]:
    if not torch.cuda.is_available():
        pytest.fail("torch sees no GPU; see docs/gpu.md")
    checkpoint = find_model("street").checkpoint
    found = {}
    for device in ("cpu", "cuda"):
        segmenter = Segmenter.load(checkpoint)
        segmenter.backbone.to(device)
        segmenter.model.to(device)
        found[device] = segmenter
    return found


def masks(segmenter: Segmenter, count: int) -> list[np.ndarray]:
    images = [segmenter.prepare(render_scene(990_000 + n, height=360, width=480).image) for n in range(count)]
    output = segmenter.run(images, range(count))
    return [mask_of(logits, image) for logits, image in zip(output.logits_BChw, images, strict=True)]


def test_masks_of_the_gpu_are_those_of_the_cpu(pair):
    for cpu, gpu in zip(masks(pair["cpu"], 6), masks(pair["cuda"], 6), strict=True):
        assert (cpu == gpu).mean() > 0.995  # TF32 and other orders of sums move borders by a pixel


def test_the_same_seed_routes_alike_on_both(pair):
    outputs = {}
    for device, segmenter in pair.items():
        image = segmenter.prepare(render_scene(990_007, height=360, width=480).image)
        outputs[device] = segmenter.run([image], [7])
    assert outputs["cpu"].routing.selected_BK.tolist() == outputs["cuda"].routing.selected_BK.tolist()
    assert outputs["cuda"].beta_BK.cpu() == pytest.approx(outputs["cpu"].beta_BK, abs=1e-3)


def test_bfloat16_changes_few_pixels(pair):
    segmenter = pair["cuda"]
    plain = masks(segmenter, 4)
    segmenter.backbone = for_serving(segmenter.backbone, "bfloat16")
    try:
        near = masks(segmenter, 4)
    finally:
        segmenter.backbone.precision = None
    assert np.mean([(a == b).mean() for a, b in zip(plain, near, strict=True)]) > 0.97


def test_memory_does_not_grow_with_the_number_of_images(pair):
    masks(pair["cuda"], 8)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        masks(pair["cuda"], 8)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.cuda.max_memory_allocated() < 4 << 30

"""Example pictures of a run: one row per domain."""

from PIL import Image

from airmoe_ray.data.base import SegmentationDataset
from airmoe_ray.inference.masks import mask_of
from airmoe_ray.inference.pictures import colour_mask, overlay, sheet
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.runtime.rng import evaluation_id

MOST_ROWS = 8  # Cityscapes alone has 18 cities


def example_sheet(segmenter: Segmenter, dataset: SegmentationDataset) -> Image.Image:
    """Image, truth, prediction and overlay of the first sample of each of the first few domains."""
    rows, names = [], []
    for domain, name in enumerate(dataset.domains[:MOST_ROWS]):
        index = next((i for i in range(len(dataset)) if dataset.domain_of(i) == domain), None)
        if index is None:
            continue
        sample = dataset[index]
        image = segmenter.prepare(sample.image)
        mask = mask_of(segmenter.run([image], [evaluation_id(index)]).logits_BChw[0], image)
        truth, seen = (colour_mask(ids, dataset.classes) for ids in (sample.label, mask))
        rows.append([sample.image, truth, seen, overlay(sample.image, mask, dataset.classes)])
        names.append(name)
    return sheet(rows, columns=("image", "truth", "prediction", "overlay"), names=names, classes=dataset.classes)

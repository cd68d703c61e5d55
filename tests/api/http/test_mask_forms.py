"""Masks as COCO's run lengths and polygons, against COCO's own tools; and the answers that hold them."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pycocotools import mask as coco

from api.http.codec import encode
from api.http.codec.polygons import outlines
from api.http.codec.response import labelled_masks, labelled_to_json, segment_response, to_json
from api.http.codec.rle import encode_classes
from api.http.schemas import SegmentResponse
from tests.api.http.test_response import CLASSES, IMAGE, RESULT, pixels

MASKS = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.integers(0, 2))


def blobs(height: int, width: int) -> np.ndarray:
    """Smooth regions of several classes, with holes, like those of a photo."""
    draw = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width]
    mask = np.zeros((height, width), np.uint8)
    for c in (1, 2, 3, 1, 0, 2):
        centre_y, centre_x, radius = draw.uniform(0, [height, width, height / 3])
        mask[np.hypot(x - centre_x, y - centre_y) + 9 * np.sin(x / 9 + c) * np.cos(y / 7) < radius] = c
    return mask


def drawn(polygons: list[list[int]], shape: tuple[int, ...]) -> np.ndarray:
    """What COCO's own rasteriser makes of polygons."""
    if not polygons:
        return np.zeros(shape, bool)
    return coco.decode(coco.merge(coco.frPyObjects(polygons, *shape))).astype(bool)


@settings(max_examples=200, deadline=None)
@given(MASKS)
def test_run_lengths_are_those_of_pycocotools_and_read_back(mask: np.ndarray) -> None:
    for c, ours in enumerate(encode_classes(mask, range(3))):
        theirs = coco.encode(np.asfortranarray(mask == c, dtype=np.uint8))
        assert (ours.size, ours.counts) == (theirs["size"], theirs["counts"].decode())
        assert (coco.decode(ours.model_dump()) == (mask == c)).all()


def test_long_and_shrinking_runs_are_packed_as_pycocotools_does() -> None:
    mask = np.zeros((4096, 700), np.uint8)  # runs of millions, and differences below zero
    mask[17:4000, 90] = mask[5, 91:300] = mask[:, 650:] = 1
    (ours,) = encode_classes(mask, [1])
    assert ours.counts == coco.encode(np.asfortranarray(mask))["counts"].decode()


@settings(max_examples=200, deadline=None)
@given(MASKS)
def test_polygons_enclose_the_mask_exactly_with_its_holes_and_touching_corners(mask: np.ndarray) -> None:
    for c in range(3):
        polygons = outlines(mask, c)
        assert (drawn(polygons, mask.shape) == (mask == c)).all()
        assert all(len(polygon) >= 8 and len(polygon) % 2 == 0 for polygon in polygons)
        signed = [np.dot(p[0::2], np.roll(p[1::2], -1)) - np.dot(p[1::2], np.roll(p[0::2], -1)) for p in polygons]
        assert sum(signed) == 2 * (mask == c).sum()  # each once round, holes the other way: by winding, too
        assert all(area > 0 for area in signed)


def test_a_component_is_one_polygon_and_pixels_that_touch_across_are_two() -> None:
    picture = ["##.##", "#.#.#", "##.##", "....#"]
    mask = np.array([[cell == "#" for cell in row] for row in picture], np.uint8)
    assert outlines(mask, 1)[2] == [2, 1, 3, 1, 3, 2, 2, 2]
    assert len(outlines(mask, 1)) == 3
    ring = np.ones((5, 6), np.uint8)
    ring[1:3, 2:4] = 0
    slit = [0, 1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 1, 0, 1]  # to the hole, round it, and back
    assert outlines(ring, 1) == [[0, 0, 6, 0, 6, 5, 0, 5, *slit]]


def test_polygons_of_large_smooth_regions_enclose_them_exactly() -> None:
    mask = blobs(360, 640)
    for c in range(4):
        assert (drawn(outlines(mask, c), mask.shape) == (mask == c)).all()


@pytest.mark.parametrize("form", ["png", "rle", "polygons"])
def test_each_form_differs_from_the_default_in_the_masks_of_segments_alone(form: str) -> None:
    both = []
    for asked in ("png", form):
        made = segment_response(RESULT, IMAGE, CLASSES, request_id="r", arrived=time.perf_counter(), form=asked)
        sent = to_json(made)
        assert to_json(SegmentResponse.model_validate_json(sent, strict=True)) == sent  # as documented
        both.append(json.loads(sent))
    default, other = both
    index = pixels(default["mask"])
    for plain, segment in zip(default["segments"], other["segments"], strict=True):
        own = segment.pop("mask")
        if form == "rle":
            assert (coco.decode(own) == (index == segment["id"])).all()
        elif form == "polygons":
            assert (drawn(own, index.shape) == (index == segment["id"])).all()
        assert plain.pop("mask") == own or form != "png"
    del default["timings_ms"], other["timings_ms"]
    assert default == other


def test_hugging_faces_form_is_labels_scores_and_masks_alone() -> None:
    segments = segment_response(RESULT, IMAGE, CLASSES, request_id="r", arrived=0.0).segments
    sent = json.loads(labelled_to_json(labelled_masks(RESULT, IMAGE, CLASSES)))
    assert sent == [{"label": s.label, "score": s.score, "mask": s.mask} for s in segments]


def test_a_threshold_leaves_out_segments_with_a_lower_score() -> None:
    mask = np.array([[0, 0, 2, 2]], np.uint8)
    for threshold, kept in ((None, [0, 2]), (0.6, [0, 2]), (0.61, [0]), (0.95, [])):
        found = encode.segments(mask, np.array([0.9, 0, 0.6]), np.array([2, 0, 2]), CLASSES, threshold=threshold)
        assert [segment.id for segment in found] == kept

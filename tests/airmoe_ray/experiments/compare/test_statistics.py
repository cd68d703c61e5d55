"""Intervals and differences, against other ways to get them."""

import math

import numpy as np
import pytest

from airmoe_ray.experiments.compare.records import pack, unpack
from airmoe_ray.experiments.compare.statistics import METRICS, estimate, over_seeds, paired, scores_of
from airmoe_ray.experiments.student import student_quantile
from airmoe_ray.inference.scores import ConfusionMatrix


def counts_of(matrix: np.ndarray) -> np.ndarray:
    return np.stack([matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)])


def images(rng: np.random.Generator, *, right: float, count: int = 60, classes: int = 4) -> np.ndarray:
    """Margins of images whose pixels are right with some probability."""
    rows = []
    for _ in range(count):
        truth = rng.integers(classes, size=400)
        guess = np.where(rng.random(400) < right, truth, rng.integers(classes, size=400))
        matrix = ConfusionMatrix(classes)
        matrix.add(truth, guess)
        rows.append(counts_of(matrix.counts))
    return np.stack(rows)


def test_scores_of_margins_are_those_of_the_whole_matrix():
    rng = np.random.default_rng(0)
    matrix = ConfusionMatrix(5)
    matrix.counts = rng.integers(0, 50, size=(5, 5))
    matrix.counts[3] = matrix.counts[:, 3] = 0  # absent: left out
    matrix.counts[:, 2] = 0  # never predicted: counts 0
    found = scores_of(counts_of(matrix.counts))
    for metric in METRICS:
        assert found[metric] == pytest.approx(matrix.scores()[metric])


@pytest.mark.parametrize(
    ("freedom", "value"),
    [
        (1, 12.706),
        (2, 4.303),
        (4, 2.776),
        (10, 2.228),
        (15, 2.131),
        (20, 2.086),
        (30, 2.042),
        (120, 1.980),
        (200, 1.972),
    ],
)
def test_quantiles_are_those_of_printed_tables(freedom, value):
    assert student_quantile(freedom) == pytest.approx(value, abs=6e-4)


def test_the_interval_over_seeds_covers_the_truth_nineteen_times_in_twenty():
    rng = np.random.default_rng(1)
    hits = [low <= 50 <= high for _, low, high, _, _ in (over_seeds(50 + 3 * rng.normal(size=4)) for _ in range(2000))]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)
    assert math.isnan(over_seeds([1.0]).low)


def test_one_seed_gets_an_interval_over_images_that_narrows_with_their_number():
    rng = np.random.default_rng(2)
    few, many = (estimate([images(rng, right=0.6, count=n)], "miou") for n in (20, 320))
    assert few.by == many.by == "images"
    assert few.low < few.mean < few.high
    assert (many.high - many.low) / (few.high - few.low) == pytest.approx(0.25, rel=0.5)


def test_a_real_difference_is_found_and_one_of_nothing_is_not():
    rng = np.random.default_rng(3)
    ours, better, same = ([images(rng, right=right) for _ in range(3)] for right in (0.60, 0.64, 0.60))
    gap = paired(ours, better)
    assert gap.p < 0.01
    assert gap.low > 0
    gaps = [scores_of(b.sum(0))["miou"] - scores_of(a.sum(0))["miou"] for a, b in zip(ours, better, strict=True)]
    assert gap.mean == pytest.approx(np.mean(gaps))
    assert paired(ours, same).p > 0.05
    assert paired(ours, ours) == (0.0, 0.0, 0.0, 1.0, 3, 60)


def test_p_values_of_nothing_are_even():
    """Under no difference p is uniform; a p that ignored pairs or sides would pile up at an end."""
    rng = np.random.default_rng(4)
    ps = [paired([images(rng, right=0.6, count=25)], [images(rng, right=0.6, count=25)], seed=i).p for i in range(60)]
    assert 0.35 < np.mean(ps) < 0.65
    assert np.mean(np.array(ps) < 0.1) < 0.25


def test_packed_counts_come_back():
    counts = np.random.default_rng(5).integers(0, 2**31, size=(7, 3, 11))
    assert (unpack(pack(counts)) == counts).all()

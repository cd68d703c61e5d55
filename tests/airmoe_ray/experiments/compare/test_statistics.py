"""Intervals and differences, against other ways to get them."""

import math

import numpy as np
import pytest

from airmoe_ray.experiments.compare import statistics
from airmoe_ray.experiments.compare.records import pack, unpack
from airmoe_ray.experiments.compare.statistics import (
    METRICS,
    block_sizes,
    estimate,
    holm,
    over_seeds,
    paired,
    scores_of,
)
from airmoe_ray.experiments.student import student_quantile, student_two_sided
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


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(1.0, 1, 0.5), (2.776, 4, 0.05), (4.604, 4, 0.01), (3.291, 1e9, 0.001), (2.228, 10, 0.05), (1.0, 2.5, 0.4058)],
)
def test_tails_are_those_of_printed_tables(t, freedom, p):
    assert student_two_sided(t, freedom) == pytest.approx(p, rel=0.01)
    assert student_two_sided(-t, freedom) == student_two_sided(t, freedom)
    assert student_two_sided(0.0, freedom) == pytest.approx(1)


def test_tails_between_whole_degrees_are_those_of_drawn_numbers():
    rng = np.random.default_rng(7)
    for freedom in (1.5, 3.3, 8.7):
        drawn = np.abs(rng.standard_normal(400_000) / np.sqrt(rng.chisquare(freedom, 400_000) / freedom))
        assert np.mean(drawn > 2) == pytest.approx(student_two_sided(2, freedom), rel=0.02)


def test_frames_of_a_drive_are_drawn_in_blocks_and_stills_one_by_one():
    assert block_sizes("camvid", [19, 31, 4]) == [10, 9, 11, 10, 10, 4]
    assert block_sizes("scenes", [2, 1, 3]) == [1] * 6
    rng = np.random.default_rng(8)
    copies = np.repeat(images(rng, right=0.6, count=12), 10, axis=0)  # each frame ten times
    once, blocks = estimate([copies], "miou"), estimate([copies], "miou", blocks=[10] * 12)
    assert (blocks.high - blocks.low) / (once.high - once.low) == pytest.approx(10**0.5, rel=0.25)


def test_holm_corrects_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, math.nan, 0.9])[0] == 1.0
    assert holm([]) == []


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
    assert paired(ours, ours)[:7] == (0.0, 0.0, 0.0, 1.0, 3, 60, 60)


def test_p_values_of_nothing_are_even():
    """Under no difference p is uniform; a p that ignored pairs or sides would pile up at an end."""
    rng = np.random.default_rng(4)
    ps = [paired([images(rng, right=0.6, count=25)], [images(rng, right=0.6, count=25)], seed=i).p for i in range(60)]
    assert 0.35 < np.mean(ps) < 0.65
    assert np.mean(np.array(ps) < 0.1) < 0.25


def drives(rng: np.random.Generator, seeds: int, *, image: float, run: float) -> list[np.ndarray]:
    """A method's runs on sixty frames of three drives.

    What it can do with a frame changes slowly along a drive, alike in all of its runs; each run is better or worse than
    the method's mean, and on each frame by itself.
    """
    slow_S = np.concatenate([np.repeat(rng.normal(0, image, 4), 5) for _ in range(3)])
    found = []
    for _ in range(seeds):
        logit_S = 0.8 + slow_S + rng.normal(0, run) + rng.normal(0, 0.1, 60)
        hit_SC = rng.binomial(400, 1 / (1 + np.exp(-logit_S))[:, None], size=(60, 3))
        wrong_SC = 400 - hit_SC
        predicted_SC = hit_SC + (wrong_SC[:, [1, 2, 0]] + wrong_SC[:, [2, 0, 1]]) // 2
        found.append(np.stack([hit_SC, np.full_like(hit_SC, 400), predicted_SC], axis=1))
    return found


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(("image", "run"), [(0.0, 0.1), (0.2, 0.02), (0.2, 0.05)], ids=["seeds", "images", "both"])
def test_two_methods_that_are_alike_are_told_apart_about_once_in_twenty(seeds, image, run, monkeypatch):
    """Nothing differs but luck: that of seeds, that of which frames were filmed, or both."""
    monkeypatch.setattr(statistics, "RESAMPLES", 300)
    rng = np.random.default_rng([9, seeds])
    ps = []
    for _ in range(400):
        ours, theirs = (drives(rng, seeds, image=image, run=run) for _ in range(2))
        ps.append(paired(ours, theirs, blocks=block_sizes("camvid", [20, 20, 20])).p)
    assert 0.015 <= np.mean(np.array(ps) < 0.05) <= 0.08


def test_packed_counts_come_back():
    counts = np.random.default_rng(5).integers(0, 2**31, size=(7, 3, 11))
    assert (unpack(pack(counts)) == counts).all()

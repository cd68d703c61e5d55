"""How sure a figure is: intervals over seeds, and paired differences by bootstrap over images and seeds.

Suffixes: U seeds, S samples, C classes, V resamples.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.experiments.student import student_quantile
from airmoe_ray.inference.scores import score_terms

RESAMPLES = 4000
METRICS = ("miou", "mf1", "mpre", "mrec")

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int
    by: str  # what the interval is over: seeds, or images where there is but one seed


class Difference(NamedTuple):
    """Another method's score less the reference's, on the same images and seeds."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    images: int


def scores_of(counts: NDArray[np.number]) -> dict[str, Floats]:
    """mIoU, mF1, mPre and mRec in 0-100 of summed counts (…, 3, C): hit, truth, predicted.

    A class is left out only where it is absent from truth and prediction, as in `ConfusionMatrix`.
    """
    hit, truth, predicted = (counts[..., i, :].astype(np.float64) for i in range(3))
    present = truth + predicted > 0
    classes = np.maximum(present.sum(axis=-1), 1)
    return {
        f"m{name}": 100 * np.where(present, numerator / denominator, 0).sum(axis=-1) / classes
        for name, (numerator, denominator) in score_terms(hit, truth, predicted).items()
    }


def estimate(counts: Sequence[Counts], metric: str, *, seed: int = 0) -> Estimate:
    """Mean over seeds of a dataset-level score, given each seed's counts (S, 3, C).

    Several seeds: Student's t, for what another seed would give. One: a bootstrap over images, for other images.
    """
    values = np.array([scores_of(own_S3C.sum(axis=0))[metric] for own_S3C in counts])
    if len(values) == 1:
        resampled = _resampled_scores(counts[0], _weights(len(counts[0]), seed), metric)
        low, high = np.quantile(resampled, (0.025, 0.975))
        return Estimate(float(values[0]), float(low), float(high), 1, "images")
    return over_seeds(values.tolist())


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of some seeds' figures with Student's 95 % interval; of a single seed there is no interval."""
    mean, runs = float(np.mean(values)), len(values)
    if runs == 1:
        return Estimate(mean, math.nan, math.nan, 1, "seeds")
    half = student_quantile(runs - 1) * float(np.std(values, ddof=1)) / math.sqrt(runs)
    return Estimate(mean, mean - half, mean + half, runs, "seeds")


def paired(reference: Sequence[Counts], other: Sequence[Counts], metric: str = "miou", *, seed: int = 0) -> Difference:
    """The difference on the same images and seeds: 95 % interval and two-sided p, by bootstrap over both.

    Each resample draws images with replacement, the same ones for both methods and all seeds, and seeds with
    replacement, the same ones for both methods. With few seeds the share that seeds have in the interval is too small.
    """
    assert len(reference) == len(other)
    assert all(a.shape == b.shape for a, b in zip(reference, other, strict=True)), "the same images"
    images, runs = len(reference[0]), len(reference)
    weights_VS = _weights(images, seed)
    gaps_UV = np.stack(
        [
            _resampled_scores(theirs, weights_VS, metric) - _resampled_scores(ours, weights_VS, metric)
            for ours, theirs in zip(reference, other, strict=True)
        ]
    )
    drawn_VU = np.random.default_rng([seed, 1]).integers(runs, size=(RESAMPLES, runs))
    gap_V = np.take_along_axis(gaps_UV.T, drawn_VU, axis=1).mean(axis=1)
    point = np.mean(
        [_whole(theirs, metric) - _whole(ours, metric) for ours, theirs in zip(reference, other, strict=True)]
    )
    low, high = np.quantile(gap_V, (0.025, 0.975))
    below, above = (1 + (gap_V <= 0).sum()) / (1 + RESAMPLES), (1 + (gap_V >= 0).sum()) / (1 + RESAMPLES)
    return Difference(float(point), float(low), float(high), float(min(1.0, 2 * min(below, above))), runs, images)


def _whole(counts_S3C: Counts, metric: str) -> float:
    return float(scores_of(counts_S3C.sum(axis=0))[metric])


def _weights(images: int, seed: int) -> Floats:
    """How often each image is drawn in each resample, (V, S)."""
    rng = np.random.default_rng([seed, 0])
    return rng.multinomial(images, np.full(images, 1 / images), size=RESAMPLES).astype(np.float64)


def _resampled_scores(counts_S3C: Counts, weights_VS: Floats, metric: str) -> Floats:
    summed = weights_VS @ counts_S3C.reshape(len(counts_S3C), -1).astype(np.float64)
    return scores_of(summed.reshape(len(weights_VS), *counts_S3C.shape[1:]))[metric]

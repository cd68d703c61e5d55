"""How sure a figure is: intervals over seeds, and paired differences that may be due to seeds and to images.

Suffixes: U seeds, S samples, J blocks of samples, C classes, V resamples.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.experiments.student import student_quantile, student_two_sided
from airmoe_ray.inference.scores import score_terms

RESAMPLES = 4000
_BLOCK = 10  # frames of a video that are drawn together: neighbours are near copies of each other
_STILLS = frozenset({"scenes", "labelme"})  # datasets whose images have nothing to do with their neighbours
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
    """Another method's score less the reference's, on the same images and seeds.

    Of a single seed it speaks of these two models, on other images; only of several does it speak of the methods.
    """

    mean: float
    low: float
    high: float
    p: float  # two-sided
    seeds: int
    images: int
    blocks: int  # of images that are drawn together
    freedom: float  # degrees of freedom


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


def block_sizes(dataset: str, sequences: Sequence[int]) -> list[int]:
    """Lengths of the runs of images that are drawn together: each image of stills, about ten frames of a video.

    `sequences`: how many images in a row are of one drive.
    """
    if dataset in _STILLS:
        return [1] * sum(sequences)
    parts = [np.array_split(np.arange(length), max(round(length / _BLOCK), 1)) for length in sequences if length]
    return [len(part) for own in parts for part in own]


def estimate(counts: Sequence[Counts], metric: str, *, blocks: Sequence[int] | None = None, seed: int = 0) -> Estimate:
    """Mean over seeds of a dataset-level score, given each seed's counts (S, 3, C).

    Several seeds: Student's t, for what another seed would give. One: a bootstrap over images, for other images.
    """
    values = np.array([scores_of(own_S3C.sum(axis=0))[metric] for own_S3C in counts])
    if len(values) == 1:
        summed_J3C = _by_block(counts[0], blocks)
        resampled = _resampled_scores(summed_J3C, _weights(len(summed_J3C), seed), metric)
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


def paired(
    reference: Sequence[Counts],
    other: Sequence[Counts],
    metric: str = "miou",
    *,
    blocks: Sequence[int] | None = None,
    seed: int = 0,
) -> Difference:
    """The difference on the same images and seeds, with its 95 % interval and two-sided p.

    Its variance is that of the mean over seeds, s^2 / n, plus that of the mean difference over images: a bootstrap that
    draws `blocks` of images, the same ones for both methods and all seeds. The sum is Student's, with the degrees of
    freedom of Welch and Satterthwaite. What seeds and images do together is in both terms: the interval errs on the
    wide side. A bootstrap over three seeds would err on the narrow one, as it takes s^2 for a third smaller than it is.
    """
    assert len(reference) == len(other)
    assert all(a.shape == b.shape for a, b in zip(reference, other, strict=True)), "the same images"
    runs, pairs = len(reference), list(zip(reference, other, strict=True))
    gap_U = np.array([_whole(theirs, metric) - _whole(ours, metric) for ours, theirs in pairs])
    grouped = [(_by_block(ours, blocks), _by_block(theirs, blocks)) for ours, theirs in pairs]
    groups = len(grouped[0][0])
    weights_VJ = _weights(groups, seed)
    gap_V = np.mean(
        [
            _resampled_scores(theirs, weights_VJ, metric) - _resampled_scores(ours, weights_VJ, metric)
            for ours, theirs in grouped
        ],
        axis=0,
    )
    # a bootstrap over J blocks sees (J - 1) / J of their variance
    parts = [(float(gap_V.var()) * groups / (groups - 1), groups - 1)] if groups > 1 else []
    parts += [(float(gap_U.var(ddof=1)) / runs, runs - 1)] if runs > 1 else []
    mean = float(gap_U.mean())
    half, p, freedom = _judged(mean, parts)
    return Difference(mean, mean - half, mean + half, p, runs, len(reference[0]), groups, freedom)


def _judged(mean: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float, float]:
    """Half the 95 % interval, p and degrees of freedom, given independent variances with those of their own."""
    if not parts:
        return math.nan, math.nan, 0.0
    variance = sum(own for own, _ in parts)
    if variance == 0:
        return 0.0, float(mean == 0), float(max(freedom for _, freedom in parts))
    freedom = variance**2 / sum(own**2 / free for own, free in parts)
    error = math.sqrt(variance)
    return student_quantile(freedom) * error, student_two_sided(mean / error, freedom), freedom


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979): the chance of even one false alarm among all stays what p says.

    What has no p is not counted.
    """
    order = sorted((place for place, p in enumerate(ps) if not math.isnan(p)), key=lambda place: ps[place])
    corrected, largest = [math.nan] * len(ps), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * ps[place]))
        corrected[place] = largest
    return corrected


def _whole(counts_S3C: Counts, metric: str) -> float:
    return float(scores_of(counts_S3C.sum(axis=0))[metric])


def _by_block(counts_S3C: Counts, blocks: Sequence[int] | None) -> Counts:
    """Counts (J, 3, C) of contiguous images; of each one where there are no blocks."""
    if blocks is None:
        return counts_S3C
    assert sum(blocks) == len(counts_S3C)
    return np.add.reduceat(counts_S3C, np.cumsum([0, *blocks[:-1]]), axis=0)


def _weights(items: int, seed: int) -> Floats:
    """How often each image or block is drawn in each resample, (V, J)."""
    rng = np.random.default_rng([seed, 0])
    return rng.multinomial(items, np.full(items, 1 / items), size=RESAMPLES).astype(np.float64)


def _resampled_scores(counts_J3C: Counts, weights_VJ: Floats, metric: str) -> Floats:
    summed = weights_VJ @ counts_J3C.reshape(len(counts_J3C), -1).astype(np.float64)
    return scores_of(summed.reshape(len(weights_VJ), *counts_J3C.shape[1:]))[metric]

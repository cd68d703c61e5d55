"""t-SNE of a few hundred points, exact and repeatable; small enough not to need a library.

Places in the plane have two numbers. Suffixes: T tokens, d statistic.
"""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

_EARLY, _EXAGGERATION = 100, 12.0  # steps with exaggerated affinities, which let clusters form
_MOST_HALVINGS = 64


def affinities(points_Td: Float64Array, *, perplexity: float) -> Float64Array:
    """Symmetric joint probabilities of van der Maaten and Hinton (2008); precisions are found by bisection."""
    squared = squared_distances(points_Td)
    count = len(points_Td)
    low, high, precision = np.zeros(count), np.full(count, np.inf), np.ones(count) / max(squared.mean(), 1e-12)
    target = np.log(min(perplexity, count - 1))
    conditional = np.zeros_like(squared)
    for _ in range(_MOST_HALVINGS):
        exponent = -squared * precision[:, None]
        np.fill_diagonal(exponent, -np.inf)
        conditional = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        conditional /= conditional.sum(axis=1, keepdims=True)
        entropy = -(conditional * np.log(np.maximum(conditional, 1e-300))).sum(axis=1)
        wide = entropy > target
        low, high = np.where(wide, precision, low), np.where(wide, high, precision)
        precision = np.where(np.isinf(high), 2 * low, (low + high) / 2)
    return (conditional + conditional.T) / (2 * count)


def tsne(points_Td: Float64Array, *, perplexity: float = 30.0, steps: int = 400) -> Float64Array:
    """Places in the plane: gradient descent with momentum and gains, from the two principal axes."""
    joint = affinities(points_Td, perplexity=min(perplexity, (len(points_Td) - 1) / 3))
    centred = points_Td - points_Td.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    places_T2 = 1e-2 * (left[:, :2] * singular[:2]) / max(float(np.std(left[:, 0] * singular[0])), 1e-12)
    speed, gains = np.zeros_like(places_T2), np.ones_like(places_T2)
    rate = max(len(points_Td) / _EXAGGERATION / 4, 10.0)
    for step in range(steps):
        weight = joint * (_EXAGGERATION if step < _EARLY else 1.0)
        heavy = 1 / (1 + squared_distances(places_T2))
        np.fill_diagonal(heavy, 0)
        force = (weight - heavy / heavy.sum()) * heavy
        slope = 4 * (force.sum(axis=1)[:, None] * places_T2 - force @ places_T2)
        gains = np.clip(np.where(np.sign(slope) == np.sign(speed), gains * 0.8, gains + 0.2), 0.01, None)
        speed = (0.5 if step < _EARLY else 0.8) * speed - rate * gains * slope
        places_T2 = places_T2 + speed
    return places_T2 - places_T2.mean(axis=0)


def squared_distances(points_Td: Float64Array) -> Float64Array:
    """Between all pairs."""
    length_T = (points_Td**2).sum(axis=1)
    return np.maximum(length_T[:, None] + length_T - 2 * points_Td @ points_Td.T, 0)

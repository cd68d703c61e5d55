"""Student's t, for intervals and differences over a few seeds or repetitions."""

import functools
import math

import numpy as np

_MOST_FREEDOM = 1e4  # Student's t is the normal distribution by then
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(64)  # of an integral over [-1, 1]


def student_two_sided(t: float, freedom: float) -> float:
    r"""P(|T| > t) of Student's T, for any freedom from 1 on.

    .. math:: \frac{2}{B(1/2, \nu/2)} \int_{\arctan(t/\sqrt\nu)}^{\pi/2} \cos^{\nu-1}\theta\, d\theta
    """
    freedom = min(freedom, _MOST_FREEDOM)
    begin, end = math.atan(abs(t) / math.sqrt(freedom)), math.pi / 2
    end = min(end, begin + 40 / math.sqrt(freedom))  # beyond it nothing is left of a narrow integrand
    theta = begin + (end - begin) * (_NODES + 1) / 2
    area = float((_NODE_WEIGHTS * np.cos(theta) ** (freedom - 1)).sum()) * (end - begin) / 2
    log_beta = math.lgamma(0.5) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    return min(2 * area / math.exp(log_beta), 1.0)


@functools.cache
def student_quantile(freedom: float, probability: float = 0.975) -> float:
    """Quantile of Student's t above the median, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_two_sided(middle, freedom) > 2 * (1 - probability) else (low, middle)
    return low

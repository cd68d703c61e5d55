"""Student's t, for intervals over a few seeds or repetitions."""

import functools
import math

import numpy as np


@functools.cache
def student_quantile(freedom: int, probability: float = 0.975) -> float:
    r"""Quantile of Student's t by bisection.

    With t = sqrt(n) tan u the distribution function is 1/2 + c times the integral of cos^(n-1) from 0 to u.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def below(u: float) -> float:
        grid = np.linspace(0, u, 2001)
        return 0.5 + scale * float(np.trapezoid(np.cos(grid) ** (freedom - 1), grid))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)

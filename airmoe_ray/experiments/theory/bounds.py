r"""The paper's bounds on training through a noisy channel, one function per equation.

All of them are upper bounds for updates Theta <- Theta - alpha_t H_t g_t with m I <= H_t <= M I, where H_t does not
depend on g_t (Assumption 5): SGD is such an update, Adam is not. Letters: L smoothness, Delta gap, sigma_eff^2 variance
of g_t, B_sigma distance of the two gradients, eps target for the squared gradient norm, T iterations.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.experiments.theory.settings import Constants

Array = NDArray[np.float64]

# 2 (the noiseless gradient by the smoothed one) squared, times the leading 8 of the smoothed T(eps)
COMPLEXITY_CONSTANT = 32


class Iterations(NamedTuple):
    """A certified number of iterations, or the reason why the bound gives none."""

    total: int | None
    reason: str | None = None


def worst_receive_scale(budget: float, gamma_th: float, *, largest_energy: float, largest_weight: float = 1.0) -> float:
    r"""rho_min = P0 gamma_th / (beta_max^2 E_max): what truncation and the power budget leave in the worst case.

    Follows from the power control of Eq. (22) with |gamma_j|^2 >= gamma_th; E_max is the largest ||y_j||^2.
    """
    return budget * gamma_th / (largest_weight**2 * largest_energy)


def noise_variance(constants: Constants) -> float:
    r"""sigma_c^2 / (2 rho_min), the largest variance of one element of e that Assumption 4 allows."""
    return constants.noise_power / (2 * constants.rho_min)


def smoothed(function: Callable[[Array], Array], at: Array, variance: Array | float, *, nodes: int = 24) -> Array:
    r"""E_e f(y + e) with e ~ N(0, v), element by element: the smoothing of Eq. (27).

    .. math:: \bar L(\Theta) = E_i E_e[\ell(\hat y^{(i)}(\Theta) + e^{(i)}, Y^{(i)})]

    By Gauss-Hermite quadrature, for losses that are sums over the elements of y; of the loss's derivative it gives the
    derivative of the smoothed loss. Exact for polynomials of degree below 2 `nodes`.
    """
    points, weights = np.polynomial.hermite.hermgauss(nodes)
    spread = np.sqrt(2 * np.asarray(variance))
    total = np.zeros_like(at)
    for point, weight in zip(points, weights, strict=True):
        total += weight * function(at + spread * point)
    return total / math.sqrt(math.pi)


def lemma1_kappa(constants: Constants) -> float:
    r"""kappa = G^2 L_y^2 d_y, how much of the channel's noise variance reaches the gradient at most."""
    return constants.jacobian**2 * constants.loss_smoothness**2 * constants.outputs


def effective_variance(constants: Constants) -> float:
    r"""sigma_eff^2 = sigma^2 + kappa sigma_c^2 / (2 rho_min), Eq. (29): bound on the variance of g_t."""
    return constants.data_variance + lemma1_kappa(constants) * noise_variance(constants)


def bias_bound(constants: Constants) -> float:
    r"""B_sigma = (G rho_H d_y / 2) sigma_c^2 / (2 rho_min), Eq. (30): how far the two gradients are apart at most."""
    return constants.jacobian * constants.loss_hessian * constants.outputs / 2 * noise_variance(constants)


def largest_step(constants: Constants) -> float:
    """m / (L M^2), up to which steps are within the theorems."""
    return constants.preconditioner_low / (constants.smoothness * constants.preconditioner_high**2)


def schedule_bound(constants: Constants, steps: Sequence[float] | Array) -> float:
    r"""Bound on the alpha-weighted mean of E||grad of the smoothed loss||^2 for a step schedule, Eq. (31).

    .. math:: \frac{2 \Delta}{m \sum_t \alpha_t} + \frac{L M^2 \sigma_{eff}^2 \sum_t \alpha_t^2}{m \sum_t \alpha_t}

    Every alpha_t has to lie in (0, m / (L M^2)].
    """
    alpha = np.asarray(steps, dtype=np.float64)
    if not (alpha.min() > 0 and alpha.max() <= largest_step(constants) * (1 + 1e-12)):
        raise ValueError(f"steps from {alpha.min():g} to {alpha.max():g} leave (0, {largest_step(constants):g}]")
    noise = constants.smoothness * constants.preconditioner_high**2 * effective_variance(constants)
    whole = constants.preconditioner_low * alpha.sum()
    return float((2 * constants.gap + noise * np.square(alpha).sum()) / whole)


def smoothed_rate(constants: Constants, iterations: float) -> float:
    r"""What Eq. (32) leaves in its O(.): Eq. (31) with alpha_t = alpha / sqrt(T) and the largest alpha allowed.

    .. math:: \frac{1}{m \sqrt T} \left(\frac{2 \Delta}{\alpha} + L M^2 \sigma_{eff}^2 \alpha\right)

    The paper's O(sigma_eff^2 / sqrt(T)) drops the term of Delta, which stays when all noise is gone.
    """
    alpha, high = largest_step(constants), constants.preconditioner_high
    noise = constants.smoothness * high**2 * effective_variance(constants) * alpha
    return (2 * constants.gap / alpha + noise) / (constants.preconditioner_low * math.sqrt(iterations))


def noiseless_rate(constants: Constants, iterations: float) -> float:
    r"""The same for the noiseless loss: twice the smoothed rate plus the floor 2 B_sigma^2, Eq. (33)."""
    return 2 * smoothed_rate(constants, iterations) + floor(constants)


def best_step(constants: Constants, iterations: float) -> float:
    r"""alpha = min(m / (L M^2), sqrt(2 Delta / (L M^2 sigma_eff^2 T))), Eq. (34): the constant step of Theorem 3."""
    noise = constants.smoothness * constants.preconditioner_high**2 * effective_variance(constants) * iterations
    return min(largest_step(constants), math.sqrt(2 * constants.gap / noise) if noise else math.inf)


def rate_coefficients(constants: Constants) -> tuple[float, float]:
    r"""a = 2 L M^2 Delta / m^2 and b = (2 M / m) sqrt(2 L Delta sigma_eff^2) of the bound a / T + b / sqrt(T)."""
    ratio = constants.preconditioner_high / constants.preconditioner_low
    work = 2 * constants.smoothness * constants.gap
    return work * ratio**2, 2 * ratio * math.sqrt(work * effective_variance(constants))


def smoothed_bound(constants: Constants, iterations: float) -> float:
    r"""min_t E||grad of the smoothed loss||^2 <= a / T + b / sqrt(T) with the step of Theorem 3, Eq. (35)."""
    a, b = rate_coefficients(constants)
    return a / iterations + b / math.sqrt(iterations)


def smoothed_iterations(constants: Constants, eps: float) -> Iterations:
    r"""T(eps) for the smoothed loss, Eq. (36): the smallest T with a / T + b / sqrt(T) <= eps.

    .. math:: T = \left\lceil \left(\frac{b + \sqrt{b^2 + 4 a \epsilon}}{2 \epsilon}\right)^2 \right\rceil

    The paper keeps the leading term, b^2 / eps^2 = 8 L M^2 Delta sigma_eff^2 / (m^2 eps^2), which goes to 0 with the
    noise while T does not.
    """
    if not (0 < eps < math.inf):
        raise ValueError(f"eps = {eps:g}: expected a positive number")
    a, b = rate_coefficients(constants)
    root = (b + math.sqrt(b**2 + 4 * a * eps)) / (2 * eps)
    if root > 1e150:  # its square is no longer a number
        return Iterations(
            None, f"eps - eps_floor is too small: the bound asks for more than 1e300 iterations ({eps:g})"
        )
    count = max(1, math.ceil(root**2))
    # where T is a whole number, rounding may have lifted or sunk it by one
    while count > 1 and smoothed_bound(constants, count - 1) <= eps and count < 2**52:
        count -= 1
    while smoothed_bound(constants, count) > eps and count < 2**52:
        count += 1
    return Iterations(count)


def floor(constants: Constants) -> float:
    r"""eps_floor = 2 B_sigma^2 = G^2 rho_H^2 d_y^2 sigma_c^4 / (8 rho_min^2), Eq. (37): what more iterations leave."""
    return 2 * bias_bound(constants) ** 2


def noiseless_bound(constants: Constants, iterations: float) -> float:
    """Bound on min_t E||grad of the noiseless loss||^2 with the step of Theorem 3: 2 (a/T + b/sqrt(T)) + eps_floor."""
    return 2 * smoothed_bound(constants, iterations) + floor(constants)


def noiseless_iterations(constants: Constants, eps: float) -> Iterations:
    r"""T(eps) for the noiseless loss, Eq. (38): that of the smoothed one for (eps - eps_floor) / 2.

    At and below the floor the answer is "not certified". The paper says "iff" and "no finite T suffices"; an upper
    bound cannot show that nothing gets there, only that it does not promise it.
    """
    least = floor(constants)
    if eps <= least:
        reason = f"not certified by the bound: eps = {eps:.4g} is not above eps_floor = {least:.4g}"
        return Iterations(None, reason)
    return smoothed_iterations(constants, (eps - least) / 2)


def receive_snr_db(constants: Constants) -> float:
    r"""10 log10(rho_min / sigma_c^2), the axis of panel (e); not `channel.snr_db`, which is of the transmitter."""
    return 10 * math.log10(constants.rho_min / constants.noise_power)


def floor_db(constants: Constants, snr_db: float) -> float:
    r"""10 log10 eps_floor = const - 2 SNR, Eq. (39); const = 10 log10(G^2 rho_H^2 d_y^2 / 8), SNR of the receiver."""
    steepness = constants.jacobian * constants.loss_hessian * constants.outputs
    return 20 * math.log10(steepness) - 10 * math.log10(8) - 2 * snr_db


def reachable(constants: Constants, iterations: float) -> float:
    r"""eps(T) = eps_floor + sqrt(C L M^2 Delta sigma_eff^2 / (m^2 T)), C = 32, Eq. (40).

    The leading term alone, as the paper has it: `noiseless_bound` without its 2 a / T.
    """
    ratio = constants.preconditioner_high / constants.preconditioner_low
    work = COMPLEXITY_CONSTANT * constants.smoothness * ratio**2 * constants.gap * effective_variance(constants)
    return floor(constants) + math.sqrt(work / iterations)

"""Norms of first, second and third derivatives by power iteration with autograd, without ever forming a matrix."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]  # of one tensor
ROUNDS = 12


def jacobian_norm(output: Tensor, parameters: Sequence[Tensor], *, rounds: int = ROUNDS) -> float:
    r"""Spectral norm of d output / d parameters: power iteration on J J^T.

    J^T u is a backward pass; J w is the derivative of <J^T u, w> by u, a backward pass through the first one. What is
    found never exceeds the norm, and reaches it as `rounds` grow.
    """
    seed = torch.zeros_like(output).requires_grad_()
    pulled = torch.autograd.grad(output, parameters, seed, create_graph=True, allow_unused=True)
    used = [each for each in pulled if each is not None]
    direction = _start(output)
    norm = 0.0
    for _ in range(rounds):
        toward = [
            g.detach()
            for g in torch.autograd.grad(output, parameters, direction, retain_graph=True, allow_unused=True)
            if g is not None
        ]
        (forward,) = torch.autograd.grad(used, seed, toward, retain_graph=True)
        square = float(forward.norm())
        norm = max(norm, square**0.5)
        direction = forward / max(square, 1e-300)
    return norm


def curvature(function: Scalar, at: Tensor, *, rounds: int = ROUNDS) -> float:
    """Spectral norm of the Hessian at a point: power iteration on Hessian-vector products."""
    at = at.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(at), at, create_graph=True)
    return hessian_norm(slope, [at], rounds=rounds)


def hessian_norm(slope: Tensor, parameters: Sequence[Tensor], *, rounds: int = ROUNDS) -> float:
    """Spectral norm of the derivative of `slope`, itself a gradient by `parameters` (flattened, with its graph)."""
    direction, norm = _start(slope), 0.0
    for _ in range(rounds):
        rows = torch.autograd.grad(slope, parameters, direction, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if r is None else r for p, r in zip(parameters, rows, strict=True)]
        product = torch.cat([row.flatten() for row in filled]).view_as(direction)
        norm = max(norm, float(product.norm()))
        direction = product / product.norm().clamp_min(1e-300)
    return norm


def third_derivative_norm(function: Scalar, at: Tensor, *, rounds: int = ROUNDS, starts: int = 4) -> float:
    r"""Largest |D^3 f[u, u, u]| over unit u at a point, by the power method u <- D^3 f[u, u, .].

    For a symmetric form this is its norm, and so the Lipschitz constant of the Hessian near the point. The method ends
    at some local maximum, hence several starts; the result is a lower bound.
    """
    at = at.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(at), at, create_graph=True)
    norm = 0.0
    for number in range(starts):
        direction = _start(at, number)
        for _ in range(rounds):
            (product,) = torch.autograd.grad(slope, at, direction, create_graph=True)
            (pushed,) = torch.autograd.grad((product * direction).sum(), at, retain_graph=True)
            norm = max(norm, abs(float((pushed * direction).sum())))
            direction = pushed / pushed.norm().clamp_min(1e-300)
    return norm


def _start(like: Tensor, number: int = 0) -> Tensor:
    """A random direction, the same at every call."""
    draw = torch.Generator().manual_seed(number)
    start = torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)
    return start / start.norm()

"""Convergence under channel noise: the bounds of Eq. (27)-(40), their six panels, and what a real channel gives."""

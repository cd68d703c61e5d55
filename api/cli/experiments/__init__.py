"""Verbs that make experiments: comparisons, sweeps, theory."""

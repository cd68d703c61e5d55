"""Shipped configurations, found by name: `--config quickstart`."""

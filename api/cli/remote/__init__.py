"""Verbs that talk to a running server, one a file; `connection` is how they reach it."""

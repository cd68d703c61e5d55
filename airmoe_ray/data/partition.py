"""Client data sets D_j: which training samples each client holds as its own."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from airmoe_ray.errors import ConfigError

Rule = Literal["domain", "dirichlet", "iid"]
Indices = NDArray[np.int64]


def partition(
    domains: Sequence[int], clients: int, *, rule: Rule, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Deals every sample to exactly one client, and at least one to each; `domains` holds the domain of each sample.

    - `domain`: with at least as many clients as domains, a client sees one domain only, and larger domains are shared
      by more clients; with fewer, a client holds several whole domains.
    - `dirichlet`: each domain is cut by shares drawn from Dirichlet(alpha, ..., alpha); small alpha is more skewed.
    - `iid`: a random deal in equal parts.

    The indices of a client are sorted, so that reading them in order walks along the files.
    """
    if clients < 1:
        raise ConfigError(f"{clients} clients: expected at least 1")
    if len(domains) < clients:
        raise ConfigError(
            f"{clients} clients for {len(domains)} samples: every client needs one; "
            "lower experts.count or set train.warm_start.enabled=false"
        )
    labels = np.asarray(domains, dtype=np.int64)
    groups = [rng.permutation(np.flatnonzero(labels == domain)) for domain in np.unique(labels)]
    match rule:
        case "domain":
            parts = _split_domains(groups, clients) if clients >= len(groups) else _bundle_domains(groups, clients)
        case "dirichlet":
            if not (alpha > 0 and np.isfinite(alpha)):
                raise ConfigError(f"alpha {alpha}: expected a positive number; 0.1 is skewed, 100 nearly even")
            parts = _dirichlet(groups, clients, alpha, rng)
        case "iid":
            parts = np.array_split(rng.permutation(len(labels)), clients)
        case _:
            raise ConfigError(f"partition rule {rule!r}: expected one of {', '.join(get_args(Rule))}")
    return [np.sort(part) for part in parts]


def _split_domains(groups: list[Indices], clients: int) -> list[Indices]:
    """Each further client joins the domain with the most samples per client (D'Hondt's rule for seats)."""
    shares = [1] * len(groups)
    for _ in range(clients - len(groups)):
        # More clients than samples in a domain would leave one empty; an average above 1 rules that out, and the
        # largest average is above 1 as long as samples outnumber the clients dealt so far.
        busiest = max(range(len(groups)), key=lambda i: len(groups[i]) / shares[i])
        shares[busiest] += 1
    return [part for group, share in zip(groups, shares, strict=True) for part in np.array_split(group, share)]


def _bundle_domains(groups: list[Indices], clients: int) -> list[Indices]:
    """Largest domain first, each to the client that holds the least so far."""
    bundles: list[list[Indices]] = [[] for _ in range(clients)]
    loads = [0] * clients
    for group in sorted(groups, key=len, reverse=True):
        lightest = loads.index(min(loads))
        bundles[lightest].append(group)
        loads[lightest] += len(group)
    return [np.concatenate(bundle) for bundle in bundles]


def _dirichlet(groups: list[Indices], clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    pieces: list[list[Indices]] = [[] for _ in range(clients)]
    for group in groups:
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(group)).astype(np.int64)
        for held, piece in zip(pieces, np.split(group, cuts), strict=True):
            held.append(piece)
    parts = [np.concatenate(held) for held in pieces]
    for j in range(clients):
        if len(parts[j]) == 0:  # skewed shares leave clients with nothing; the richest gives one sample
            richest = max(range(clients), key=lambda i: len(parts[i]))
            parts[j], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts

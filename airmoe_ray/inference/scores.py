"""Scores: segmentation from one dataset-level confusion matrix, and figures of the router's health.

Suffixes: B inputs, N clients, K routed, M prototypes, Z domains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from airmoe_ray.data.base import IGNORE
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.model.statistics import entropy
from airmoe_ray.runtime.workers import Workers

Counts = NDArray[np.int64]


class ConfusionMatrix:
    """Pixels by (truth, prediction), summed over a dataset; void pixels are left out."""

    def __init__(self, classes: int) -> None:
        self.counts: Counts = np.zeros((classes, classes), dtype=np.int64)

    def add(self, truth: NDArray[np.integer], prediction: NDArray[np.integer]) -> None:
        """Count one image or batch; both hold class ids."""
        classes, seen = len(self.counts), truth != IGNORE
        pairs = truth[seen].astype(np.int64) * classes + prediction[seen]
        self.counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    def add_others(self, workers: Workers) -> None:
        """The sum over workers, on every worker."""
        self.counts = workers.total(torch.from_numpy(self.counts)).numpy()

    def scores(self) -> dict[str, float]:
        """mIoU, mF1, mPre, mRec in 0-100; see `per_class` for absent classes."""
        per_class = self.per_class()
        return {f"m{name}": _mean(values) for name, values in per_class.items()}

    def per_class(self) -> dict[str, list[float | None]]:
        """iou, f1, pre, rec of each class in 0-100.

        None (left out of the mean) only where a class is absent from truth and prediction; present but never
        predicted counts 0.
        """
        hit = self.counts.diagonal().astype(np.float64)
        truth, predicted = self.counts.sum(axis=1), self.counts.sum(axis=0)
        present = truth + predicted > 0

        def ratio(numerator: NDArray[np.float64], denominator: NDArray[np.number]) -> list[float | None]:
            values = 100 * numerator / denominator
            return [float(v) if here else None for v, here in zip(values, present, strict=True)]

        return {name: ratio(*terms) for name, terms in score_terms(hit, truth, predicted).items()}


def score_terms(
    hit: NDArray[np.float64], truth: NDArray[np.number], predicted: NDArray[np.number]
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.number]]]:
    """Numerator and denominator of each score, from pixels by class: hit, of the truth, predicted.

    A denominator is at least 1: a class that is nowhere has the score 0, which the caller leaves out.
    """
    terms: dict[str, tuple[NDArray[np.float64], NDArray[np.number]]] = {
        "iou": (hit, truth + predicted - hit),
        "f1": (2 * hit, truth + predicted),
        "pre": (hit, predicted),
        "rec": (hit, truth),
    }
    return {name: (numerator, np.maximum(denominator, 1)) for name, (numerator, denominator) in terms.items()}


def confusion_tables(
    names: Sequence[str], classes: Sequence[Sequence[str]], matrices: Sequence[ConfusionMatrix]
) -> list[dict[str, Any]]:
    """What `eval` reports under `confusion`: classes and pixels by (truth, prediction) of each part of a dataset."""
    return [
        {"part": name, "classes": list(own), "pixels": matrix.counts.tolist()}
        for name, own, matrix in zip(names, classes, matrices, strict=True)
    ]


@dataclass
class RoutingStats:
    """Load, attention and specialisation over a dataset."""

    clients: int
    domains: int
    selected_N: Counts = field(init=False)  # how often each client was in S, before truncation
    top_ZN: Counts = field(init=False)  # inputs by (domain, best client)
    attention_entropy: float = 0.0  # summed over inputs and clients [nats]
    attention_NM: Tensor | None = None  # alpha, summed over inputs
    nmse: float = 0.0
    truncated: int = 0
    inputs: int = 0

    def __post_init__(self) -> None:
        self.selected_N = np.zeros(self.clients, dtype=np.int64)
        self.top_ZN = np.zeros((self.domains, self.clients), dtype=np.int64)

    def add(self, output: AirMoEOutput[Any], domain_B: NDArray[np.integer]) -> None:
        """Count one batch."""
        chosen = output.routing.selected_BK.cpu().numpy()
        self.selected_N += np.bincount(chosen.ravel(), minlength=self.clients)
        np.add.at(self.top_ZN, (domain_B, chosen[:, 0]), 1)
        if output.alpha_BNM is not None:
            alpha_BNM = output.alpha_BNM.detach()
            self.attention_entropy += float(entropy(alpha_BNM).sum())
            self.attention_NM = alpha_BNM.sum(dim=0) + (0 if self.attention_NM is None else self.attention_NM)
        self.nmse += float(output.nmse_B.sum())
        self.truncated += int((~output.routing.active_BK).sum())
        self.inputs += len(chosen)

    def add_others(self, workers: Workers) -> None:
        """The sum over workers, on every worker."""
        self.selected_N, self.top_ZN = (
            workers.total(torch.from_numpy(counts)).numpy() for counts in (self.selected_N, self.top_ZN)
        )
        if self.attention_NM is not None:
            self.attention_NM = workers.total(self.attention_NM)
        sums = torch.tensor([self.attention_entropy, self.nmse, self.truncated, self.inputs], dtype=torch.float64)
        self.attention_entropy, self.nmse, truncated, inputs = workers.total(sums).tolist()
        self.truncated, self.inputs = int(truncated), int(inputs)

    def summary(self) -> dict[str, object]:
        """What `eval` reports under `routing`."""
        load = self.selected_N / max(self.selected_N.sum(), 1) * self.clients
        return {
            "load": [round(float(x), 4) for x in load],  # over the fair share; 1 is even
            "balancedness": balancedness(self.selected_N),
            "least_load": float(load.min()),
            # per read, exp(H(alpha)): near M, the bank acts as one averaged prototype
            "effective_prototypes": self._prototypes_per_read(),
            "prototypes_used": self._prototypes_used(),
            "nmi_domain_expert": normalised_mutual_information(self.top_ZN),
            "nmse_db": 10 * math.log10(self.nmse / self.inputs) if self.nmse else None,  # None: an exact sum
            "truncated_share": self.truncated / max(int(self.selected_N.sum()), 1),
            "top_by_domain": self.top_ZN.tolist(),  # images by (domain, best client)
        }

    def _prototypes_per_read(self) -> float | None:
        if self.attention_NM is None:
            return None
        return math.exp(self.attention_entropy / max(self.inputs * self.clients, 1))

    def _prototypes_used(self) -> float | None:
        """exp of the entropy of a client's mean attention, averaged: how many prototypes ever answer."""
        if self.attention_NM is None:
            return None
        return float(entropy(self.attention_NM / self.inputs).exp().mean())


def balancedness(selected_N: Counts) -> float:
    """Mean load over the largest load: 1 is even, 1/N is everything on one client."""
    return float(selected_N.mean() / max(selected_N.max(), 1))


def normalised_mutual_information(table: Counts) -> float:
    """I(row; column) / sqrt(H(row) H(column)) of a contingency table, in [0, 1]; 0 where either side is constant."""
    joint = table / max(table.sum(), 1)
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    entropy_rows, entropy_columns = _entropy(rows), _entropy(columns)
    if min(entropy_rows, entropy_columns) < 1e-12:
        return 0.0
    information = entropy_rows + entropy_columns - _entropy(joint.ravel())
    return float(np.clip(information / math.sqrt(entropy_rows * entropy_columns), 0.0, 1.0))


def _entropy(probabilities: NDArray[np.float64]) -> float:
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log(positive)).sum())


def _mean(values: list[float | None]) -> float:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else 0.0

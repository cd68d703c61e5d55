"""Weights of rare and frequent classes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe_ray.data.base import IGNORE, ClassTable
from airmoe_ray.training.batches import labelling_of
from airmoe_ray.training.pixel_losses import Labelling
from tests.airmoe_ray.training.support import SEEDS, random_labels


class Labels:
    """A source as far as class weights look at it."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels.numpy()
        self.shape_of = self.labels[:, 0, 0]

    def plain(self, index: int) -> tuple[None, Any]:
        return None, self.labels[index]


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, balance=st.floats(0.1, 1.0))
def test_class_weights_are_powers_of_the_frequency_with_mean_one_over_pixels(seed: int, balance: float) -> None:
    labels = random_labels(seed, batch=3)
    labels[labels == 1] = 0  # make one class twice as frequent
    labels[0, 0, 0] = 1
    table = ClassTable(("a", "b", "c"), ((0, 0, 0),) * 3, unions=((0, 1),))  # no pixel has the union
    weight, unions = labelling_of(Labels(labels), table, balance)  # type: ignore[arg-type]
    assert weight is not None
    assert unions == table.unions
    seen = labels[labels != IGNORE].long()
    assert float(weight.double()[seen].mean()) == pytest.approx(1, rel=1e-5)
    count = torch.bincount(seen, minlength=4).double()
    ratio = float(weight[0] / weight[1])
    assert ratio == pytest.approx(float(count[0] / count[1]) ** -balance, rel=1e-4)
    assert weight.isfinite().all()
    assert labelling_of(Labels(labels), table, 0.0) == Labelling(unions=((0, 1),))  # type: ignore[arg-type]

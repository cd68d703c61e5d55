"""Segmentation scores against torchmetrics, the policy for absent classes, and the router's health."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import airmoe_ray.runtime.torchvision_import  # noqa: F401  torchmetrics imports torchvision: the cure comes first
from airmoe_ray.data.base import IGNORE
from airmoe_ray.inference.scores import ConfusionMatrix, RoutingStats, balancedness, normalised_mutual_information

Array = NDArray[np.int64]
C = 4


def random_maps(seed: int) -> tuple[Array, Array]:
    """Truth with void, and a prediction that is right about half the time; all classes occur in both."""
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, C, (3, 8, 8)), rng.integers(0, C, (3, 8, 8))
    prediction = np.where(rng.random(truth.shape) < 0.4, truth, guess)
    truth[rng.random(truth.shape) < 0.2] = IGNORE
    truth[0, 0, :C] = prediction[0, 0, :C] = np.arange(C)
    return truth, prediction


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_scores_equal_those_of_torchmetrics_however_the_images_are_fed(seed: int) -> None:
    from torchmetrics.functional.classification import (
        multiclass_f1_score,
        multiclass_jaccard_index,
        multiclass_precision,
        multiclass_recall,
    )

    truth, prediction = random_maps(seed)
    matrix = ConfusionMatrix(C)
    for image in range(3):
        matrix.add(truth[image].astype(np.uint8), prediction[image].astype(np.uint8))
    peers = {
        "miou": multiclass_jaccard_index,
        "mf1": multiclass_f1_score,
        "mpre": multiclass_precision,
        "mrec": multiclass_recall,
    }
    for name, peer in peers.items():
        theirs = peer(
            torch.from_numpy(prediction), torch.from_numpy(truth), num_classes=C, average="macro", ignore_index=IGNORE
        )
        assert matrix.scores()[name] == pytest.approx(100 * float(theirs), rel=1e-5)


def test_rows_are_truth_and_columns_prediction_and_void_is_left_out() -> None:
    matrix = ConfusionMatrix(3)
    matrix.add(np.array([0, 0, 1, IGNORE]), np.array([0, 2, 1, 1]))
    assert matrix.counts.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_a_class_is_left_out_only_where_truth_and_prediction_both_lack_it() -> None:
    matrix = ConfusionMatrix(4)  # class 2: true but never predicted; class 1: predicted but never true; class 3: absent
    matrix.add(np.array([0, 0, 0, 2]), np.array([0, 0, 1, 0]))
    per_class = matrix.per_class()
    assert per_class["iou"] == [50.0, 0.0, 0.0, None]
    assert per_class["pre"] == [pytest.approx(200 / 3), 0.0, 0.0, None]
    assert per_class["rec"] == [pytest.approx(200 / 3), 0.0, 0.0, None]
    assert per_class["f1"] == [pytest.approx(200 / 3), 0.0, 0.0, None]
    assert matrix.scores()["miou"] == pytest.approx(50 / 3)


def test_precision_looks_at_predictions_and_recall_at_truth() -> None:
    matrix = ConfusionMatrix(2)
    matrix.add(np.array([0, 0, 0, 0, 1]), np.array([0, 1, 1, 1, 1]))
    assert matrix.per_class()["pre"] == [100.0, 25.0]
    assert matrix.per_class()["rec"] == [25.0, 100.0]


def test_an_empty_matrix_scores_zero() -> None:
    assert ConfusionMatrix(3).scores() == {"miou": 0, "mf1": 0, "mpre": 0, "mrec": 0}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([[5, 0], [0, 5]], 1.0),
        ([[0, 7, 0], [0, 0, 2], [4, 0, 0]], 1.0),
        ([[4, 4], [4, 4]], 0.0),
        ([[1, 2], [2, 4], [3, 6]], 0.0),
        ([[3, 0], [5, 0]], 0.0),  # one side constant
        ([[0, 0], [0, 0]], 0.0),
        ([[2, 0], [1, 1]], None),
    ],
)
def test_mutual_information_is_one_for_a_matching_and_zero_for_independence(
    table: list[list[int]], expected: float | None
) -> None:
    if expected is None:  # joint (1/2, 0; 1/4, 1/4), by hand
        information = 0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375) + 0.25 * math.log(0.25 / 0.125)
        columns = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
        expected = information / math.sqrt(math.log(2) * columns)
    assert normalised_mutual_information(np.array(table)) == pytest.approx(expected, abs=1e-12)
    assert normalised_mutual_information(np.array(table).T) == pytest.approx(expected, abs=1e-12)


def test_balancedness_is_one_for_even_load_and_one_over_n_for_one_client() -> None:
    assert balancedness(np.array([3, 3, 3, 3])) == 1
    assert balancedness(np.array([12, 0, 0, 0])) == 0.25
    assert balancedness(np.array([4, 2, 0])) == 0.5
    assert balancedness(np.zeros(3, dtype=np.int64)) == 0


def summary(alpha_BNM: torch.Tensor) -> dict[str, object]:
    """Three inputs of two domains, two of three clients each, in two batches."""
    stats = RoutingStats(clients=3, domains=2)
    selected = torch.tensor([[0, 1], [1, 0], [0, 2]])
    active = torch.tensor([[True, True], [False, True], [True, True]])
    for part in (slice(1), slice(1, 3)):
        routing = SimpleNamespace(selected_BK=selected[part], active_BK=active[part])
        output = SimpleNamespace(routing=routing, alpha_BNM=alpha_BNM[part], nmse_B=torch.tensor([0.1, 0.2, 0.6])[part])
        stats.add(output, np.array([0, 1, 0])[part])  # type: ignore[arg-type]
    return stats.summary()


def test_effective_prototypes_are_m_for_even_attention_and_one_for_one_hot() -> None:
    even, one_hot = torch.full((3, 3, 5), 0.2), torch.eye(5)[torch.zeros(3, 3, dtype=torch.long)]
    assert summary(even)["effective_prototypes"] == pytest.approx(5)
    assert summary(one_hot)["effective_prototypes"] == pytest.approx(1)


def test_prototypes_used_tells_one_winner_from_a_different_one_each_time() -> None:
    always_first = torch.eye(5)[torch.zeros(3, 3, dtype=torch.long)]
    in_turn = torch.eye(5)[torch.arange(3)[:, None].expand(3, 3)]
    assert summary(always_first)["prototypes_used"] == pytest.approx(1)
    assert summary(in_turn)["prototypes_used"] == pytest.approx(3)


def test_the_routing_summary_by_hand() -> None:
    result = summary(torch.full((3, 3, 5), 0.2))
    assert result["load"] == pytest.approx([1.5, 1.0, 0.5])
    assert result["least_load"] == pytest.approx(0.5)
    assert result["balancedness"] == pytest.approx(2 / 3)
    assert result["truncated_share"] == pytest.approx(1 / 6)
    assert result["nmse_db"] == pytest.approx(10 * math.log10(0.3))
    assert result["nmi_domain_expert"] == pytest.approx(1)  # domain 0 to client 0, domain 1 to client 1

"""Scores of a mix: each part in its own classes, by summed probabilities, what it lacks cannot be predicted there."""

import numpy as np
import pytest
import torch

from airmoe_ray.data.base import IGNORE, ClassTable, Sample
from airmoe_ray.data.class_map import map_classes
from airmoe_ray.data.mix import Mix, Part, meaning_of
from airmoe_ray.errors import DataError, UserError
from airmoe_ray.inference.evaluate import leave_refiner_alone
from airmoe_ray.inference.masks import Prepared, mask_of
from airmoe_ray.inference.scoreboard import PartScores, Scoreboard

COMMON = ClassTable(("road", "lane_mark", "vehicle", "sky"), ((0, 0, 0),) * 4)
SIZE = (6, 8)


class Pictures:
    """Random labels of some classes, some of them void."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        self.classes, self.domains = ClassTable(names, ((0, 0, 0),) * len(names)), ("here", "there")
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, len(names), size=(count, *SIZE)).astype(np.uint8)
        self.labels[rng.random(self.labels.shape) < 0.2] = IGNORE

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.zeros((*SIZE, 3), np.uint8), self.labels[index], index % 2, str(index))

    def domain_of(self, index: int) -> int:
        return index % 2

    def fingerprint(self) -> str:
        return "pictures"


def two_worlds() -> Mix:
    """One part tells roads and cars apart, the other lane marks, trucks and sky, and has a class of its own."""
    first, second = Pictures(("road", "car"), 3, 0), Pictures(("truck", "lane", "sky", "fog"), 2, 1)
    return Mix(
        [
            Part("a", first, map_classes(first.classes, COMMON, source="a")),
            Part("b", second, map_classes(second.classes, COMMON, given={"fog": "void"}, source="b")),
        ],
        COMMON,
    )


def by_hand(dataset: Mix, logits: np.ndarray, part: int, groups: list[list[int]]) -> float:
    """mIoU of a part in percent, pixel by pixel; `groups` are the common classes of its classes, without void ones."""
    hits, union = np.zeros(len(groups)), np.zeros(len(groups))
    for index in range(len(dataset)):
        if dataset.part_of(index) != part:
            continue
        labels = dataset.parts[part].dataset[index - (0 if part == 0 else 3)].label
        odds = np.exp(logits[index].astype(np.float64))
        guess = np.argmax([odds[group].sum(axis=0) for group in groups], axis=0)
        seen = labels < len(groups)
        for k in range(len(groups)):
            hits[k] += ((guess == k) & (labels == k)).sum()
            union[k] += (((guess == k) | (labels == k)) & seen).sum()
    return float(100 * np.mean(hits / union))


def test_each_part_is_scored_in_its_own_classes_by_summed_probabilities() -> None:
    dataset = two_worlds()
    logits = np.random.default_rng(5).normal(size=(len(dataset), 4, *SIZE)).astype(np.float32)
    image = Prepared(np.zeros((*SIZE, 3), np.uint8), SIZE, SIZE)
    scores = PartScores(dataset)
    for index in range(len(dataset)):
        mask = mask_of(torch.from_numpy(logits[index]), image, meaning_of(dataset, index))
        scores.add(index, mask, dataset[index].label)
    first, second = by_hand(dataset, logits, 0, [[0, 1], [2]]), by_hand(dataset, logits, 1, [[2], [1], [3]])
    assert scores.per_part()["a"]["miou"] == pytest.approx(first)
    assert scores.per_part()["b"]["miou"] == pytest.approx(second)
    assert scores.scores()["miou"] == pytest.approx((first + second) / 2)
    assert list(scores.per_class()) == ["a/road", "a/car", "b/truck", "b/lane", "b/sky"]


def test_domains_of_a_mix_have_the_classes_of_their_part() -> None:
    board = Scoreboard(two_worlds(), clients=3)
    assert [len(matrix.counts) for matrix in board.by_domain] == [2, 2, 3, 3]


def test_a_dataset_that_is_no_mix_is_its_own_only_part() -> None:
    plain = Pictures(("road", "car"), 3, 0)
    scores = PartScores(plain)
    for index in range(3):
        scores.add(index, np.where(plain.labels[index] == IGNORE, 0, plain.labels[index]), plain.labels[index])
    assert scores.scores()["miou"] == 100
    assert scores.per_part() == {}
    assert list(scores.per_class()) == ["road", "car"]


def test_a_refiner_left_alone_sees_logits_of_zero_and_there_must_be_one() -> None:
    class Model:
        refiner: torch.nn.Module | None = torch.nn.Identity()

    class Holder:
        model = Model()

    leave_refiner_alone(Holder())  # type: ignore[arg-type]
    assert Holder.model.refiner is not None
    assert (Holder.model.refiner(torch.ones(2, 3)) == 0).all()
    Holder.model.refiner = None
    with pytest.raises(UserError, match="no refiner"):
        leave_refiner_alone(Holder())  # type: ignore[arg-type]


def test_classes_that_no_label_stands_for_are_told() -> None:
    dataset = two_worlds()
    dataset.parts[1].dataset.labels[:] = 0  # type: ignore[attr-defined]  # trucks alone
    board = Scoreboard(dataset, clients=1)
    for index in range(len(dataset)):
        board.add(None, [index], [np.zeros(SIZE, np.int64)], [dataset[index].label])
    result = board.result()
    assert result["not_scored"] == {"parts": [], "classes": ["sky"]}  # the first part's road holds lane marks
    assert {name: row["images"] for name, row in result["per_domain"].items()} == {
        "a/here": 2,
        "a/there": 1,
        "b/here": 1,
        "b/there": 1,
    }


def test_labels_that_are_all_void_are_no_score_of_zero() -> None:
    dataset = Pictures(("road", "car"), 2, 0)
    dataset.labels[:] = IGNORE
    board = Scoreboard(dataset, clients=1)
    board.add(None, [0, 1], [np.zeros(SIZE, np.int64)] * 2, list(dataset.labels))
    with pytest.raises(DataError, match=r"every pixel of the 2 images is void, so there is nothing to score; [^\n]+$"):
        board.result()

"""Losses over pixels: plain readings of their definitions, void, unions of classes, parts of a batch, gradients."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from airmoe_ray.data.base import IGNORE
from airmoe_ray.runtime.workers import OneWorker
from airmoe_ray.training.losses import objective
from airmoe_ray.training.pixel_losses import PLAIN, Labelling, Pixels, cross_entropy, lovasz_softmax, sample_pixels
from tests.airmoe_ray.training.support import SEEDS, Configs, Features, Model, random_labels, random_logits

UNIONS = Labelling(unions=((0, 1), (1, 2)))  # labels 3 and 4, beside three classes
SETS = ({0}, {1}, {2}, {0, 1}, {1, 2})


class Halves:
    """Two workers of a batch in one process: each finds the other's rows where it left them."""

    size = 2

    def __init__(self, rank: int, left: list[list[Tensor]]) -> None:
        self.rank, self.left, self.calls = rank, left, 0

    def concatenated(self, rows: Tensor) -> Tensor:
        self.left[self.rank].append(rows.detach())
        self.calls += 1
        parts = [part[self.calls - 1] if len(part) >= self.calls else rows[:0].detach() for part in self.left]
        return torch.cat(parts)


def jaccard_loss(truth: np.ndarray, wrong: set[int]) -> float:
    """1 - IoU of a class whose pixels are `truth`, when the prediction is wrong exactly at `wrong`."""
    predicted = np.array([is_class != (i in wrong) for i, is_class in enumerate(truth)])
    return 1 - (truth & predicted).sum() / (truth | predicted).sum()


def by_definition(probabilities_CX: np.ndarray, labels_X: np.ndarray) -> float:
    """Mean over the labels present of the Lovasz extension, set after set of mispredicted pixels."""
    losses = []
    for label in np.unique(labels_X[labels_X != IGNORE]):
        row = SETS[label]
        judged = np.array([y != IGNORE and (SETS[y] <= row or not SETS[y] & row) for y in labels_X])
        truth = np.array([SETS[y] <= row for y in labels_X[judged]])
        errors = np.abs(truth - probabilities_CX[sorted(row)].sum(axis=0)[judged])
        order = np.argsort(-errors, kind="stable")
        steps = [jaccard_loss(truth, set(order[:n].tolist())) for n in range(len(order) + 1)]
        losses.append(
            sum(errors[i] * (after - before) for i, (before, after) in zip(order, pairwise(steps), strict=True))
        )
    return float(np.mean(losses))


def some_labels(seed: int, labelling: Labelling) -> Tensor:
    """Random labels, some void; with unions some pixels have those."""
    labels = random_labels(seed)
    if labelling.unions:
        draw = np.random.default_rng(seed).integers(6, size=tuple(labels.shape))
        labels = torch.where((labels != IGNORE) & torch.from_numpy(draw < 2), torch.from_numpy(draw + 3), labels)
    return labels


def some_pixels(seed: int, labelling: Labelling = PLAIN) -> Pixels:
    return sample_pixels(random_logits(seed), some_labels(seed, labelling), labelling, stride=1)


@settings(deadline=None, max_examples=15)
@given(seed=SEEDS)
@pytest.mark.parametrize("labelling", [PLAIN, UNIONS], ids=["classes", "unions"])
def test_the_lovasz_loss_is_that_of_its_definition(labelling: Labelling, seed: int) -> None:
    pixels = some_pixels(seed, labelling)
    probabilities = pixels.log_prob_BRyx[:, :3].exp().movedim(1, 0).flatten(1).numpy()
    assert float(lovasz_softmax(pixels, labelling)) == pytest.approx(
        by_definition(probabilities, pixels.labels_Byx.flatten().numpy())
    )


@settings(deadline=None, max_examples=15)
@given(seed=SEEDS)
def test_of_hard_predictions_it_is_one_minus_the_iou(seed: int) -> None:
    labels = random_labels(seed)
    guess = sample_pixels(random_logits(seed), labels, stride=1).log_prob_BRyx.argmax(dim=1)
    hard = 1e4 * torch.nn.functional.one_hot(guess, 3).movedim(-1, 1).double()
    loss = lovasz_softmax(sample_pixels(hard, labels, stride=1))
    seen, ious = labels != IGNORE, []
    for c in labels[seen].unique():
        hit = ((guess == c) & (labels == c)).sum()
        ious.append(hit / (((guess == c) & seen) | (labels == c)).sum())
    assert float(loss) == pytest.approx(1 - float(torch.stack(ious).mean()))


@settings(deadline=None, max_examples=15)
@given(seed=SEEDS)
def test_cross_entropy_of_a_union_is_that_of_the_summed_probability(seed: int) -> None:
    weight = torch.tensor([0.5, 1.0, 4.0, 2.0, 3.0], dtype=torch.float64)
    labelling = UNIONS._replace(weight_R=weight)
    logits, labels = random_logits(seed), some_labels(seed, labelling)
    ours = cross_entropy(sample_pixels(logits, labels, labelling, stride=1), labelling)
    up = torch.nn.functional.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    probabilities = torch.softmax(up, dim=1)
    total = count = 0.0
    for b, y, x in (labels != IGNORE).nonzero().tolist():
        label = int(labels[b, y, x])
        chance = sum(float(probabilities[b, c, y, x]) for c in SETS[label])
        total -= float(weight[label]) * np.log(chance)
        count += float(weight[label])
    assert float(ours) == pytest.approx(total / count)


@pytest.mark.parametrize("loss", [cross_entropy, lovasz_softmax])
def test_void_pixels_do_not_matter_and_a_batch_of_void_alone_loses_nothing(loss: Any) -> None:
    labels, logits = random_labels(3), random_logits(3).repeat_interleave(6, 2).repeat_interleave(6, 3)
    logits = logits[..., : labels.shape[1], : labels.shape[2]]
    void = (labels == IGNORE)[:, None]
    assert void.any()
    elsewhere = torch.where(void, torch.randn_like(logits), logits)
    assert logits.shape[2:] == labels.shape[1:]
    torch.testing.assert_close(
        loss(sample_pixels(logits, labels, stride=1)), loss(sample_pixels(elsewhere, labels, stride=1))
    )
    logits = logits.clone().requires_grad_()
    nothing = loss(sample_pixels(logits, torch.full_like(labels, IGNORE), stride=1))
    assert nothing.item() == 0
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert (gradient == 0).all()


@pytest.mark.parametrize("labelling", [PLAIN, UNIONS], ids=["classes", "unions"])
def test_the_gradient_is_that_of_finite_differences(labelling: Labelling) -> None:
    labels = some_labels(1, labelling)
    loss = lambda logits: lovasz_softmax(sample_pixels(logits, labels, labelling, stride=1), labelling)  # noqa: E731
    assert torch.autograd.gradcheck(loss, random_logits(1).requires_grad_())


@pytest.mark.parametrize("cut", [0, 1])
def test_parts_of_a_batch_add_up_to_the_whole_in_value_and_gradient(cut: int) -> None:
    """Also where one worker has nothing to do."""
    logits, labels = random_logits(5).requires_grad_(), random_labels(5)
    whole = lovasz_softmax(sample_pixels(logits, labels, stride=1), workers=OneWorker())
    (expected,) = torch.autograd.grad(whole, logits)
    parts = (slice(0, cut), slice(cut, None))
    left: list[list[Tensor]] = [[], []]
    for rank, part in enumerate(parts):  # the first turn leaves rows for the second, in which both see all
        lovasz_softmax(sample_pixels(logits[part], labels[part], stride=1), workers=Halves(rank, left))
    losses = [
        lovasz_softmax(sample_pixels(logits[part], labels[part], stride=1), workers=Halves(rank, left))
        for rank, part in enumerate(parts)
    ]
    torch.testing.assert_close(losses[0] + losses[1], whole)
    (gradient,) = torch.autograd.grad(losses[0] + losses[1], logits)
    torch.testing.assert_close(gradient, expected)


def test_the_objective_adds_it_to_the_fused_output_alone(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    train = {"lambda_iou": 0.7, "lambda_shared": 0.3, "lambda_align": 0.0, "lambda_lb": 0.0, "lambda_frl": 0.0}
    config = make_config(train=train, experts={"shared": True})
    model, labels = make_model(config), random_labels(0)
    output = model(make_features(2), range(2))
    terms = objective(output, labels, model.clients.frl, config=config)

    def iou(logits: Tensor) -> Tensor:
        return lovasz_softmax(sample_pixels(logits, labels, stride=1))

    without = make_config(train={**train, "lambda_iou": 0.0}, experts={"shared": True})
    plain = objective(output, labels, model.clients.frl, config=without)
    torch.testing.assert_close(terms.iou, iou(output.logits_BChw))
    torch.testing.assert_close(terms.shared, plain.shared)
    torch.testing.assert_close(terms.total, plain.total + 0.7 * iou(output.logits_BChw))
    assert plain.iou == 0

"""Losses over labelled pixels: cross-entropy, and the Lovasz-softmax surrogate of IoU.

Labels cover the padded image, void in the padding. A label names a class, or a union of several where whoever labelled
the image did not tell them apart; its probability is then their sum. Every loss of one worker is its part of the loss
of the whole batch.
Suffixes: B inputs, C classes, R labels (classes, then unions), H W image, h w grid, y x another grid (sampled pixels),
X pixels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, log_softmax, nll_loss

from airmoe_ray.data.base import IGNORE
from airmoe_ray.runtime.workers import OneWorker, Workers


class Labelling(NamedTuple):
    """What labels mean and weigh."""

    weight_R: Tensor | None = None  # in the cross-entropy
    unions: tuple[tuple[int, ...], ...] = ()  # the classes that each label from C on stands for

    def to(self, device: torch.device | str) -> "Labelling":
        """The same on a device."""
        return self if self.weight_R is None else self._replace(weight_R=self.weight_R.to(device))


PLAIN = Labelling()  # every label a class, all of one weight


class Pixels(NamedTuple):
    """Log-probabilities of all labels, and the true labels, of the same pixels."""

    log_prob_BRyx: Tensor
    labels_Byx: Tensor


def sample_pixels(logits_BChw: Tensor, labels_BHW: Tensor, labelling: Labelling = PLAIN, *, stride: int) -> Pixels:
    """Every `stride`-th pixel of the label; logits go up to them bilinearly, once."""
    labels_Byx = labels_BHW[:, stride // 2 :: stride, stride // 2 :: stride].long()
    logits_BCyx = interpolate(logits_BChw, size=labels_Byx.shape[1:], mode="bilinear", align_corners=False)
    log_prob_BCyx = log_softmax(logits_BCyx, dim=1)
    sums = [log_prob_BCyx[:, list(union)].logsumexp(dim=1, keepdim=True) for union in labelling.unions]
    return Pixels(torch.cat([log_prob_BCyx, *sums], dim=1) if sums else log_prob_BCyx, labels_Byx)


def cross_entropy(pixels: Pixels, labelling: Labelling = PLAIN, workers: Workers | None = None) -> Tensor:
    """Mean of -log of a label's probability over non-void pixels, weighted by label."""
    (log_prob, labels), weight_R = pixels, labelling.weight_R
    total = nll_loss(log_prob, labels, weight=weight_R, ignore_index=IGNORE, reduction="sum")
    seen = labels[labels != IGNORE]
    count = seen.new_tensor(len(seen), dtype=total.dtype) if weight_R is None else weight_R[seen].sum()
    return total / (workers or OneWorker()).total(count).clamp_min(1.0)


def lovasz_softmax(pixels: Pixels, labelling: Labelling = PLAIN, workers: Workers | None = None) -> Tensor:
    r"""Mean Lovasz-softmax loss over the labels present in the batch.

    The convex extension of 1 - IoU (Berman et al., CVPR 2018): with a label's errors m_i = |[y_i = r] - p_i(r)| over
    all pixels of the batch sorted downwards, the loss is <m, g>, where g_i is how much 1 - IoU grows when pixel i joins
    the mispredicted ones. g is that of the pixels of all workers, each of which multiplies it with its own errors.
    Pixels that a label does not judge (void; the union of road and lane mark for the label road) get an error of 0 and
    so come last, where they add nothing.
    """
    workers = workers or OneWorker()
    log_prob_BRyx, labels_Byx = pixels
    prob_RX = log_prob_BRyx.exp().movedim(1, 0).flatten(1)
    labels_X = labels_Byx.flatten()
    inside_RR, outside_RR = _relations(len(prob_RX), labelling.unions, labels_X.device)
    # void points behind the last label, at a column that is neither inside nor outside of any
    column_X = torch.where(labels_X == IGNORE, len(inside_RR), labels_X)
    truth_RX, judged_RX = inside_RR[:, column_X], (inside_RR | outside_RR)[:, column_X]
    errors_RX = torch.where(judged_RX, (truth_RX.to(prob_RX.dtype) - prob_RX).abs(), 0.0)
    with torch.no_grad():
        every_error_RX = workers.concatenated(errors_RX.T).T
        every_truth_RX = workers.concatenated(truth_RX.T).T
        present_R = every_truth_RX.any(dim=-1)
        slope_RX = _iou_slope(every_error_RX[present_R], every_truth_RX[present_R])
        before = _pixels_of_earlier_workers(len(labels_X), workers)
        own_RX = slope_RX[:, before : before + len(labels_X)]
    return (errors_RX[present_R] * own_RX).sum() / present_R.sum().clamp_min(1)


def _relations(labels: int, unions: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each label r (row) and the label of a pixel (column): whether it lies within r, and whether outside of it.

    A last column, for void, is neither.
    """
    classes = labels - len(unions)
    members = torch.eye(labels, classes, dtype=torch.bool)
    for row, union in enumerate(unions, start=classes):
        members[row, list(union)] = True
    common = members.float() @ members.T.float()
    inside, outside = common == members.sum(dim=1).float(), common == 0
    void = torch.zeros(len(members), 1, dtype=torch.bool)
    return torch.cat([inside, void], dim=1).to(device), torch.cat([outside, void], dim=1).to(device)


def _pixels_of_earlier_workers(own: int, workers: Workers) -> int:
    counts = workers.concatenated(torch.tensor([own]))
    return int(counts[: workers.rank].sum())


def _iou_slope(errors_RX: Tensor, truth_RX: Tensor) -> Tensor:
    """g: differences of 1 - IoU as the pixels, worst first, become mispredictions one by one; in the pixels' order."""
    order_RX = _worst_first(errors_RX)
    true_RX = truth_RX.gather(-1, order_RX).to(errors_RX.dtype)
    whole_R1 = true_RX.sum(dim=-1, keepdim=True)
    hit_RX = whole_R1 - true_RX.cumsum(dim=-1)
    union_RX = whole_R1 + (1 - true_RX).cumsum(dim=-1)
    loss_RX = 1 - hit_RX / union_RX
    steps_RX = torch.cat([loss_RX[:, :1], loss_RX.diff(dim=-1)], dim=-1)
    return torch.empty_like(steps_RX).scatter(-1, order_RX, steps_RX)


def _worst_first(errors_RX: Tensor) -> Tensor:
    """Order of the pixels by error, downwards.

    On a CPU numpy's radix sort of 16-bit keys takes a sixteenth of the time of torch's comparisons. The bits of a float
    that is not negative sort like the float: the lower half first, then, stably, the upper half.
    """
    if errors_RX.is_cuda or errors_RX.dtype != torch.float32:
        return errors_RX.argsort(dim=-1, descending=True)
    keys_RX = ~errors_RX.contiguous().numpy().view(np.uint32)
    by_lower_RX = (keys_RX & 0xFFFF).astype(np.uint16).argsort(axis=-1, kind="stable")
    upper_RX = np.take_along_axis((keys_RX >> 16).astype(np.uint16), by_lower_RX, axis=-1)
    order_RX = np.take_along_axis(by_lower_RX, upper_RX.argsort(axis=-1, kind="stable"), axis=-1)
    return torch.from_numpy(order_RX)

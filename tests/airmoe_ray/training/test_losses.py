"""The objective and its terms, Eq. (24)-(26)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from airmoe_ray.config import FrlConfig
from airmoe_ray.data.base import IGNORE
from airmoe_ray.model.frl import FeatureRetrievalLibrary
from airmoe_ray.model.statistics import js_divergence
from airmoe_ray.training.losses import alignment, frl_regulariser, load_balance, objective
from airmoe_ray.training.pixel_losses import PLAIN, Labelling, cross_entropy, sample_pixels
from tests.airmoe_ray.training.support import SEEDS, Configs, Features, Model, random_labels, random_logits


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, weighted=st.booleans())
def test_cross_entropy_at_every_pixel_is_torchs_mean_without_the_void(seed: int, weighted: bool) -> None:
    labels, logits = random_labels(seed), random_logits(seed)
    weight = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64) if weighted else None
    loss = cross_entropy(sample_pixels(logits, labels, stride=1), Labelling(weight))
    full = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(loss, F.cross_entropy(full, labels.long(), weight=weight, ignore_index=IGNORE))


def test_cross_entropy_by_hand_on_a_grid_of_the_labels_own_size() -> None:
    labels = torch.tensor([[[0, 2], [IGNORE, 1]]], dtype=torch.uint8)
    logits = random_logits(0, batch=1, grid=(2, 2))
    weight = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    log_p = (logits[0] - logits[0].exp().sum(dim=0).log()).numpy()
    by_hand = -(0.5 * log_p[0, 0, 0] + 4 * log_p[2, 0, 1] + log_p[1, 1, 1])
    loss = cross_entropy(sample_pixels(logits, labels, stride=1), Labelling(weight))
    assert float(loss) == pytest.approx(by_hand / 5.5)


def bilinear_at(values_Chw: np.ndarray, y: float, x: float) -> np.ndarray:
    """A map's values at a place given as shares of its height and width: each cell's value sits at its centre."""
    (_, h, w), corners = values_Chw.shape, []
    for share, cells in ((y, h), (x, w)):
        place = min(max(share * cells - 0.5, 0), cells - 1)
        low = int(place)
        corners.append([(low, 1 - (place - low)), (min(low + 1, cells - 1), place - low)])
    return sum(a * b * values_Chw[:, row, column] for row, a in corners[0] for column, b in corners[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [(16, 32), (48, 16)])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_cross_entropy_with_a_stride_looks_at_every_nth_row_and_column(
    stride: int, size: tuple[int, int], weighted: bool
) -> None:
    """Pixel by pixel: of each block of stride x stride pixels the label behind the middle, the logits at the middle."""
    labels, logits = random_labels(0, height=size[0], width=size[1]), random_logits(0)
    weight_C = [0.5, 1.0, 4.0] if weighted else [1.0] * 3
    expected_total = expected_count = 0.0
    for i, row, column in np.ndindex(len(labels), size[0] // stride, size[1] // stride):
        truth = int(labels[i, row * stride + stride // 2, column * stride + stride // 2])
        if truth != IGNORE:
            middle = ((row + 0.5) * stride / size[0], (column + 0.5) * stride / size[1])
            logit_C = bilinear_at(logits[i].numpy(), *middle)
            expected_total += weight_C[truth] * (np.log(np.exp(logit_C).sum()) - logit_C[truth])
            expected_count += weight_C[truth]
    labelling = Labelling(torch.tensor(weight_C, dtype=torch.float64)) if weighted else PLAIN
    loss = cross_entropy(sample_pixels(logits, labels, stride=stride), labelling)
    assert float(loss) == pytest.approx(expected_total / max(expected_count, 1), rel=1e-9)


def test_with_an_even_stride_labels_between_the_taken_rows_and_columns_do_not_matter() -> None:
    labels, logits = random_labels(0, height=8, width=8), random_logits(0, grid=(4, 4))
    other = random_labels(1, height=8, width=8)
    other[:, 1::2, 1::2] = labels[:, 1::2, 1::2]
    expected = F.cross_entropy(logits, labels[:, 1::2, 1::2].long(), ignore_index=IGNORE)
    for truth in (labels, other):
        torch.testing.assert_close(cross_entropy(sample_pixels(logits, truth, stride=2)), expected)


@pytest.mark.parametrize("n", [1, 4, 10])
def test_load_balance_is_zero_at_even_load_and_log_n_at_one_client(n: int) -> None:
    assert float(load_balance(torch.full((n,), 1 / n, dtype=torch.float64))) == pytest.approx(0, abs=1e-12)
    assert float(load_balance(torch.eye(n, dtype=torch.float64)[0])) == pytest.approx(math.log(n))


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_load_balance_has_the_gradient_of_the_papers_formula_and_lies_between_zero_and_log_n(seed: int) -> None:
    u = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(5))).requires_grad_()
    (gradient,) = torch.autograd.grad(load_balance(u), u)
    (papers,) = torch.autograd.grad((u * u.log()).sum() - math.log(5), u)
    torch.testing.assert_close(gradient, papers)
    torch.testing.assert_close(gradient, u.detach().log() + 1)
    assert 0 <= load_balance(u).item() <= math.log(5)


def test_load_balance_has_a_finite_gradient_where_a_probability_underflows() -> None:
    scores = torch.tensor([[0.0, -1.0, -2000.0]], requires_grad=True)
    load_balance(scores.softmax(dim=-1).mean(dim=0)).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def make_frl(counts: list[int], **options: Any) -> FeatureRetrievalLibrary:
    config = FrlConfig.model_validate({"dim": 4, **options})
    frl = FeatureRetrievalLibrary(config, counts, generator=torch.Generator().manual_seed(1)).double()
    frl.importance_NM.copy_(torch.rand(frl.importance_NM.shape, generator=torch.Generator().manual_seed(2)))
    return frl


@pytest.mark.parametrize("sparsity", ["l1", "entropy"])
def test_the_frl_term_by_hand_leaves_padding_out(sparsity: str) -> None:
    counts, batch = [3, 1], 5
    frl = make_frl(counts, sparsity=sparsity, sim_scale=2.0)
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=batch))).alpha_BNM
    expected = 0.0
    for j, count in enumerate(counts):
        for k in range(count):
            expected += float(frl.prototypes_NMd[j, k].detach() @ frl.prototypes_NMd[j, k].detach())
            expected += float(frl.importance_NM[j, k]) ** 2
            for a in alpha[:, j, k].tolist():
                expected += a if sparsity == "l1" else -a * math.log(a)
    assert frl_regulariser(frl, alpha).item() == pytest.approx(expected)
    if sparsity == "l1":
        size = frl.prototypes_NMd.detach().square().sum(-1) + frl.importance_NM.square()
        assert frl_regulariser(frl, alpha).item() == pytest.approx(float(size[frl.valid_NM].sum()) + 2 * batch)


def test_the_l1_frl_term_pulls_prototypes_to_zero_by_twice_themselves() -> None:
    frl = make_frl([3, 1])
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=3))).alpha_BNM
    (gradient,) = torch.autograd.grad(frl_regulariser(frl, alpha), frl.prototypes_NMd)
    expected = 2 * frl.prototypes_NMd.detach() * frl.valid_NM[..., None]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("counts", "scale"), [([3, 3], 20.0), ([3, 1], 20.0), ([3, 3], 1000.0)])
def test_the_entropy_frl_term_has_a_finite_gradient_with_padding_and_with_sharp_attention(
    counts: list[int], scale: float
) -> None:
    frl = make_frl(counts, sparsity="entropy", sim_scale=scale)
    alpha = frl.read(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), size=3))).alpha_BNM
    (gradient,) = torch.autograd.grad(frl_regulariser(frl, alpha), frl.prototypes_NMd)
    assert gradient.isfinite().all()


def test_alignment_is_the_mean_divergence_over_active_clients_and_pulls_psi_but_never_the_query() -> None:
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.dirichlet(np.ones(4), size=2)).requires_grad_()
    psi = torch.from_numpy(rng.normal(size=(2, 2, 4))).requires_grad_()
    value = alignment(q, psi, torch.tensor([[True, True], [True, False]]), temperature=2.0)
    r = (psi / 2).softmax(dim=-1)
    expected = sum(js_divergence(q[i], r[i, k]) for i, k in ((0, 0), (0, 1), (1, 0))) / 3
    torch.testing.assert_close(value, expected)
    value.backward()
    assert q.grad is None
    assert psi.grad is not None
    assert (psi.grad.abs().amax(dim=-1) > 0).tolist() == [[True, True], [True, False]]


def test_the_objective_is_the_weighted_sum_of_its_terms_on_the_received_logits(
    make_config: Configs, make_model: Model, make_features: Features
) -> None:
    train = {"lambda_lb": 0.3, "lambda_frl": 0.02, "lambda_align": 0.7}
    config = make_config(train=train, channel={"gamma_th": 0.3, "snr_db": 0})
    model, labels = make_model(config), random_labels(0)
    output = model(make_features(2), range(2))
    terms = objective(output, labels, model.clients.frl, config=config)
    y_ota = F.interpolate(output.logits_BChw, size=(6, 8), mode="bilinear", align_corners=False)
    u = output.routing.prob_BN.mean(dim=0)
    torch.testing.assert_close(terms.ce, F.cross_entropy(y_ota, labels.long(), ignore_index=IGNORE))
    torch.testing.assert_close(terms.lb, (u * u.log()).sum() + math.log(4))
    torch.testing.assert_close(terms.frl, model.clients.frl.prototypes_NMd.square().sum() + 2 * 4)
    torch.testing.assert_close(terms.align, output.delta_BK[output.routing.active_BK].mean())
    torch.testing.assert_close(terms.total, terms.ce + 0.3 * terms.lb + 0.02 * terms.frl + 0.7 * terms.align)

r"""The constants of Assumptions 1-3 at a trained run, and what the bounds then say.

Measured at a few training images, so each is the largest value *there*: a constant that holds everywhere, as the
theorems want, can only be larger, and the floor with it. Experts have ReLUs, so derivatives exist almost everywhere
only. Only the cross-entropy is looked at, without class weights: other terms of the training loss do not see the
channel's noise, or (Lovasz) have no second derivative. Parameters are all but the FRLs, which the theorems hold fixed.
Fading is left out, so that S is TopK.

Suffixes: B inputs (one), D features, C classes, h w grid, H W image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from airmoe_ray.config import Config
from airmoe_ray.data import open_dataset
from airmoe_ray.data.base import IGNORE, Sample
from airmoe_ray.data.transforms import fit, pad_to_multiple
from airmoe_ray.errors import CheckpointError
from airmoe_ray.experiments.theory.bounds import worst_receive_scale
from airmoe_ray.experiments.theory.derivatives import (
    curvature,
    hessian_norm,
    jacobian_norm,
    third_derivative_norm,
)
from airmoe_ray.experiments.theory.settings import Constants
from airmoe_ray.features.preprocess import to_tensor
from airmoe_ray.inference.segmenter import Segmenter
from airmoe_ray.model.local_clients import LocalRound
from airmoe_ray.model.seam import AirMoEOutput
from airmoe_ray.radio.channel import noise_power
from airmoe_ray.radio.power import energy_budget
from airmoe_ray.runtime.progress import Progress
from airmoe_ray.runtime.rng import evaluation_id
from airmoe_ray.training.pixel_losses import Labelling, cross_entropy, sample_pixels


@dataclass(frozen=True)
class RunConstants:
    """What was measured at a run."""

    constants: Constants
    smoothness_everywhere: float | None  # L_y that no logits exceed; None behind a refiner, which is no plain sum
    hessian_everywhere: float | None  # rho_H likewise
    squared_gradient: float  # of the noiseless cross-entropy, over these images
    cells: int
    images: int


def measure_run(checkpoint: Path, config: Config, *, images: int, progress: Progress | None = None) -> RunConstants:
    """G, L_y, rho_H, L and sigma^2 of a checkpoint at training images spread over the dataset."""
    segmenter = Segmenter.load(checkpoint, config)
    segmenter.model.double()
    dataset = open_dataset(config.data, "train")
    if list(dataset.classes.names) != segmenter.card.classes:
        raise CheckpointError(f"{checkpoint.parent}: was trained on other classes than {config.data.name} has")
    labelling = Labelling(unions=dataset.classes.unions)
    chosen = np.unique(np.linspace(0, len(dataset) - 1, images).round().astype(int)).tolist()
    found = []
    for done, index in enumerate(chosen, start=1):
        found.append(_measure(segmenter, dataset[index], labelling, evaluation_id(index)))
        if progress:
            progress(done, len(chosen))
    return _summary(found, config)


@dataclass(frozen=True)
class _Found:
    jacobian: float
    loss_smoothness: float
    loss_hessian: float
    everywhere: float | None  # ||A||^2 / pixels, A the way from logits to pixels
    smoothness: float
    energy: float
    gradient: Tensor
    shape: torch.Size  # C, h, w


def _summary(found: Sequence[_Found], config: Config) -> RunConstants:
    gradients = torch.stack([each.gradient for each in found])
    mean = gradients.mean(dim=0)
    outputs = max(each.shape.numel() for each in found)
    energy = max(each.energy for each in found)
    widest = [each.everywhere for each in found if each.everywhere is not None]
    variance = float(gradients.var(dim=0).sum()) if len(found) > 1 else 0.0
    constants = Constants(
        smoothness=max(each.smoothness for each in found),
        gap=math.log(found[0].shape[0]),  # an even guess loses ln C, and nothing loses less than 0
        data_variance=variance,
        jacobian=max(each.jacobian for each in found),
        loss_smoothness=max(each.loss_smoothness for each in found),
        loss_hessian=max(each.loss_hessian for each in found),
        outputs=outputs,
        noise_power=noise_power(config.channel),
        rho_min=worst_receive_scale(
            energy_budget(config.channel, outputs), config.channel.gamma_th, largest_energy=energy
        ),
    )
    return RunConstants(
        constants,
        smoothness_everywhere=max(widest) / 2 if widest else None,
        hessian_everywhere=max(widest) * math.sqrt(2 / 27) if widest else None,
        squared_gradient=float(mean.square().sum()),
        cells=outputs // found[0].shape[0],
        images=len(found),
    )


def _measure(segmenter: Segmenter, sample: Sample, labelling: Labelling, id: int) -> _Found:
    """All of it at one image."""
    features_BDhw, labels_BHW, fine = _inputs(segmenter, sample)
    model, stride = segmenter.model, segmenter.config.train.loss_stride
    parameters = [p for name, p in model.named_parameters() if "frl" not in name]
    ideal = segmenter.config.channel.model_copy(update={"kind": "ideal"})
    output: AirMoEOutput[LocalRound] = model(features_BDhw, [id], fine=fine, channel=ideal)
    fused_BChw, refine = output.coarse_BChw, model.cloud.refine(fine)

    def loss(logits_BChw: Tensor) -> Tensor:
        refined_BChw = logits_BChw if refine is None else refine(logits_BChw)
        return cross_entropy(sample_pixels(refined_BChw, labels_BHW, labelling, stride=stride), labelling)

    rows = torch.autograd.grad(loss(fused_BChw), parameters, create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(parameters, rows, strict=True) if g is not None]
    slope = torch.cat([g.flatten() for _, g in pairs])
    whole = torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, rows, strict=True)]
    )
    return _Found(
        jacobian=jacobian_norm(fused_BChw, parameters),
        loss_smoothness=curvature(loss, fused_BChw),
        loss_hessian=third_derivative_norm(loss, fused_BChw),
        everywhere=None if refine is not None else _spread(fused_BChw, labels_BHW, stride=stride),
        smoothness=hessian_norm(slope, [p for p, _ in pairs]),
        energy=float(output.round.on_air.logits_BKChw.detach().square().sum(dim=(2, 3, 4)).max()),
        gradient=whole.detach(),
        shape=fused_BChw.shape[1:],
    )


def _spread(fused_BChw: Tensor, labels_BHW: Tensor, *, stride: int) -> float:
    r"""Bound on ||A||^2 / pixels, with A the bilinear way from logits to the labelled pixels; about 1 / cells.

    The mean cross-entropy over pixels of A y has a Hessian of at most ||A||^2 / (2 pixels), as softmax has 1/2, and a
    third derivative of at most sqrt(2/27) ||A||^2 / pixels: softmax has sqrt(2/27) (a third central moment of numbers
    within sqrt(2) of each other), and bilinear weights never lift a pixel above the largest of its cells. Each row of A
    sums to 1, so ||A||^2 is at most its largest column sum: the pixels' weight of one cell.
    """
    labels_Byx = labels_BHW[:, stride // 2 :: stride, stride // 2 :: stride]
    counted_Byx = (labels_Byx != IGNORE).to(fused_BChw)
    cells_B1hw = torch.zeros_like(fused_BChw[:, :1]).requires_grad_()  # classes do not mix
    raised = interpolate(cells_B1hw, size=labels_Byx.shape[1:], mode="bilinear", align_corners=False)
    (columns,) = torch.autograd.grad(raised, cells_B1hw, counted_Byx[:, None])
    return float(columns.max() / counted_Byx.sum().clamp_min(1))


def _inputs(segmenter: Segmenter, sample: Sample) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Features, padded label and finer maps of one image."""
    size, multiple = segmenter.config.data.image_size, segmenter.backbone.pad_multiple
    padded, label = (pad_to_multiple(fit(pixels, size), multiple)[0] for pixels in (sample.image, sample.label))
    device = segmenter.backbone.mean.device
    maps = segmenter.backbone.maps(to_tensor([padded], device), fine=segmenter.model.refiner is not None)
    fine = tuple(map_BDyx.double() for map_BDyx in maps.fine)
    return maps.features_BDhw.double(), torch.from_numpy(label)[None].to(device), fine

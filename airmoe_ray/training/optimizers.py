"""What moves the weights: Adam for modules, plain SGD for prototypes, one schedule of the learning rate."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from airmoe_ray.config import Config, TrainConfig
from airmoe_ray.model.frl import FeatureRetrievalLibrary


def optimizers(
    parts: Sequence[tuple[nn.Module, float]], frl: FeatureRetrievalLibrary | None, config: Config
) -> tuple[torch.optim.Adam, torch.optim.SGD | None]:
    """Adam for modules, each with its factor of the learning rate, and SGD for the prototypes where they learn."""
    groups = [{"params": list(part.parameters()), "factor": factor} for part, factor in parts]
    # L2 in the gradient (Adam as the paper names it), not decoupled; fused is the fast kernel on CPU and GPU alike
    adam = torch.optim.Adam(groups, lr=config.train.lr, weight_decay=config.train.weight_decay, fused=True)
    # Adam would rescale lambda_FRL away, and renewal would make its moments stale
    learns = frl is not None and frl.prototypes_NMd.requires_grad
    return adam, torch.optim.SGD([frl.prototypes_NMd], lr=config.frl.lr) if frl is not None and learns else None


def stored_moments(module: nn.Module, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Adam's moments by the names of the module's parameters."""
    return {
        f"{name}/{key}": value
        for name, parameter in module.named_parameters()
        for key, value in adam.state.get(parameter, {}).items()
    }


def restore_moments(module: nn.Module, adam: torch.optim.Adam, moments: dict[str, Tensor]) -> None:
    """Put stored moments back."""
    parameters = dict(module.named_parameters())
    for key, value in moments.items():
        name, moment = key.rsplit("/", 1)
        parameter = parameters[name]
        dtype = value.dtype if moment == "step" else parameter.dtype
        adam.state[parameter][moment] = value.to(parameter.device, dtype)


def forget_gradients(adam: torch.optim.Adam, sgd: torch.optim.SGD | None) -> None:
    """Before a backward pass: None, not 0, since an expert without a sample must not move."""
    for optimizer in (adam, sgd):
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)


def descend(adam: torch.optim.Adam, sgd: torch.optim.SGD | None, *, rate: float) -> None:
    """One step of both; Adam's at `rate` times each part's own factor, SGD's at its own rate."""
    for group in adam.param_groups:
        group["lr"] = rate * group["factor"]
    for optimizer in (adam, sgd):
        if optimizer is not None:
            optimizer.step()


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Adam's learning rate at a step of a run of so many."""
    return config.lr * learning_rate_factor(step, total, config)


def learning_rate_factor(step: int, total: int, config: TrainConfig) -> float:
    """1, or a linear warm-up over the first 3 % of the run and a cosine down to 1 %."""
    if config.schedule == "constant":
        return 1.0
    warm_up = max(1, round(0.03 * total))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(total - warm_up, 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

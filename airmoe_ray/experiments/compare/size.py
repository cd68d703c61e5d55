"""What a model weighs: parameters that are trained and that answer an image, and the arithmetic of one image."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from airmoe_ray.model.experts import Expert
from airmoe_ray.model.moe import AirMoE


def parameters(module: nn.Module | None) -> int:
    """Numbers in a module."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def model_size(model: AirMoE) -> dict[str, float]:
    """Trained parameters, and those that take part in answering one image.

    What a rule never looks at is not counted: psi_j where nobody weighs by divergence, query and FRLs where clients
    are not chosen by statistics. Every client reads its FRL for every image, so all of them are active.
    """
    routing, (expert, *_) = model.config.routing, model.clients.experts
    assert isinstance(expert, Expert)
    each = parameters(expert.encoder) + parameters(expert.decoder)
    each += parameters(expert.psi) if routing.fusion == "divergence" else 0
    common = sum(parameters(part) for part in (model.shared, model.refiner, model.gate))
    clients = len(model.clients.experts)
    if routing.rule == "js" and routing.top_k < clients:
        common += int(model.clients.frl.valid_NM.sum()) * model.config.frl.dim
    if routing.fusion == "divergence" or (routing.rule == "js" and routing.top_k < clients):
        common += parameters(model.query)
    return {"trained": clients * each + common, "active": min(routing.top_k, clients) * each + common}


def network_size(network: nn.Module) -> dict[str, float]:
    """Of a single model: what training holds, and without auxiliary heads, which answers do not need."""
    spare = sum(p.numel() for name, p in network.named_parameters() if name.startswith("aux."))
    whole = parameters(network)
    return {"trained": whole, "active": whole - spare, "frozen": 0}


def flops_of(answer: Callable[[], Any]) -> float:
    """Floating-point operations of one call, two to a multiplication with addition."""
    with FlopCounterMode(display=False) as counter:
        answer()
    return float(counter.get_total_flops())

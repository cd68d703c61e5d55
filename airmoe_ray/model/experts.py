"""A client's expert: ASPP encoder, 1x1 decoder and the statistic head psi, Eq. (17)-(19)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from airmoe_ray.config import ExpertsConfig
from airmoe_ray.model.frl import clip_norm
from airmoe_ray.runtime.device import pick_precision

_LARGE_GRID = 36  # cells; beyond it DeepLabv3's dilations (6, 12, 18) fit


def dilations_for(config: ExpertsConfig, grid: int) -> tuple[int, int, int]:
    """Dilations of the three 3x3 branches for a feature grid of `grid` cells on its longer side."""
    return config.dilations or ((2, 4, 8) if grid <= _LARGE_GRID else (6, 12, 18))


class ExpertOutput(NamedTuple):
    """One expert on its routed samples."""

    logits_BChw: Tensor  # y_j, what is transmitted
    psi_Bd: Tensor  # psi_j(h_j), the pre-image of R_j


class ConvNormRelu(nn.Module):
    """Convolution, GroupNorm(8), ReLU. No batch statistics: an expert may see a single sample."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False)
        self.group_norm = nn.GroupNorm(8, outputs)

    def forward(self, x_BDhw: Tensor) -> Tensor:
        return relu(self.group_norm(self.conv(x_BDhw)))


class Encoder(nn.Module):
    """h_j = Enc_j(F), Eq. (17): reduction to d_h, five ASPP branches, concatenation, 1x1 to d_h."""

    def __init__(self, feature_dim: int, hidden: int, width: int, dilations: tuple[int, int, int]) -> None:
        super().__init__()
        self.reduce = ConvNormRelu(feature_dim, hidden)
        self.pointwise = ConvNormRelu(hidden, width)
        self.dilated = nn.ModuleList(ConvNormRelu(hidden, width, kernel=3, dilation=rate) for rate in dilations)
        self.pooled = ConvNormRelu(hidden, width)
        self.merge = ConvNormRelu(5 * width, hidden)

    def forward(self, features_BDhw: Tensor) -> Tensor:
        x = self.reduce(features_BDhw)
        branches = [self.pointwise(x), *(branch(x) for branch in self.dilated)]
        pooled = self.pooled(x.mean(dim=(2, 3), keepdim=True)).expand_as(branches[0])
        hidden: Tensor = self.merge(torch.cat([*branches, pooled], dim=1))
        return hidden


class Head(nn.Module):
    """Encoder and decoder: all that the cloud's own head is (`experts.shared`)."""

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        feature_dim: int,
        classes: int,
        dilations: tuple[int, int, int],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(feature_dim, config.hidden, config.width, dilations)
        self.decoder = nn.Conv2d(config.hidden, classes, 1)
        initialise(self, generator)

    def forward(self, features_BDhw: Tensor) -> Tensor:
        """Logits at feature resolution, (B, C, h, w)."""
        logits_BChw: Tensor = self.decoder(self.encoder(features_BDhw))
        return logits_BChw

    def faint_copy(self, size: float) -> dict[str, Tensor]:
        """The state of a head that gives `size` times these logits."""
        state = self.state_dict()
        return {name: size * value if name.startswith("decoder.") else value for name, value in state.items()}


class Expert(nn.Module):
    """Enc_j, Dec_j and psi_j of one client; y_j = Dec_j(h_j), Eq. (18)."""

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        feature_dim: int,
        classes: int,
        dim: int,
        bound: float,
        dilations: tuple[int, int, int],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.bound = bound
        self.low_precision: torch.dtype | None = None  # of the convolutions in training; set by whoever trains
        self.encoder = Encoder(feature_dim, config.hidden, config.width, dilations)
        self.decoder = nn.Conv2d(config.hidden, classes, 1)
        self.psi = nn.Linear(config.hidden, dim)
        initialise(self, generator)
        if config.shared:  # small, not zero: silence has no energy, and power control divides by it
            self.decoder.weight.data *= config.shared_start

    def forward(self, features_BDhw: Tensor) -> ExpertOutput:
        r"""h_j = Enc_j(F), y_j = Dec_j(h_j), psi_j(h_j) with norm clipped to C_p, Eq. (17)-(19)."""
        low = self.low_precision if self.training else None
        with torch.autocast(features_BDhw.device.type, low, enabled=low is not None):
            hidden_BDhw = self.encoder(features_BDhw)
            logits_BChw = self.decoder(hidden_BDhw)
        full = self.psi.weight.dtype  # statistics and whatever goes on the air are computed in it
        psi_Bd = clip_norm(self.psi(hidden_BDhw.mean(dim=(2, 3), dtype=full)), self.bound)
        return ExpertOutput(logits_BChw.to(full), psi_Bd)


@torch.no_grad()
def initialise(model: Head | Expert, generator: torch.Generator) -> None:
    """He initialisation from the given stream; biases zero. Draws happen in a fixed order of parameters."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            gain = 2.0 if isinstance(module, nn.Conv2d) and module is not model.decoder else 1.0
            module.weight.normal_(std=(gain / fan_in) ** 0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()


def set_precision(experts: nn.ModuleList, name: str) -> None:
    """`train.precision` for all of them, resolved on the device they are on."""
    for expert in experts:
        assert isinstance(expert, Expert)
        expert.low_precision = pick_precision(name, expert.psi.weight.device)

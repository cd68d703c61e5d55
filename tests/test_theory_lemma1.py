r"""Lemma 1 with rho frozen: gradients through the noisy channel are unbiased for the smoothed loss

.. math:: F(\theta) = E_e[\ell(\hat y(\theta) + e)],\quad e \sim N(0, \sigma_c^2 / (2 \rho) I)

and their variance is at most kappa sigma_c^2 / (2 rho_min), kappa = G^2 L_y^2 d_y. Here G is the computed spectral
norm of dy^/dtheta, and L_y the known smoothness of the loss in y: 1 for half the squared error, 1 / (2 cells) for
cross-entropy.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from airmoe_ray.channel import noise_power
from airmoe_ray.config import ChannelConfig
from airmoe_ray.moe import AirMoE

Loss = Callable[[Tensor], Tensor]  # of (B, C, h, w), mean over B
GRID, D_Y = (2, 2), 12
LABELS = torch.tensor([[0, 1], [2, 1]])
TARGET = torch.linspace(-1, 1, D_Y, dtype=torch.float64).view(3, *GRID)


def half_squared_error(y_BChw: Tensor) -> Tensor:
    return 0.5 * (y_BChw - TARGET).square().sum(dim=(1, 2, 3)).mean()


def cell_cross_entropy(y_BChw: Tensor) -> Tensor:
    return cross_entropy(y_BChw, LABELS.expand(len(y_BChw), -1, -1))


SMOOTHNESS = {half_squared_error: 1.0, cell_cross_entropy: 1 / (2 * LABELS.numel())}
LOSSES = pytest.mark.parametrize("loss", list(SMOOTHNESS))


class Setup:
    """One input, a model, and the parameters theta that the lemma speaks of: decoders and psi of all experts."""

    def __init__(self, model: AirMoE, features: Tensor) -> None:
        self.model, self.features = model, features
        self.theta = [p for e in model.clients.experts for p in (*e.decoder.parameters(), *e.psi.parameters())]

    def forward(self, ids: Sequence[int], **channel: object) -> Tensor:
        """y^_ota of the one input under each id, (B, C, h, w)."""
        setting = ChannelConfig.model_validate({**self.model.config.channel.model_dump(), **channel})
        output = self.model(self.features.expand(len(ids), -1, -1, -1), ids, channel=setting)
        self.rho_B, self.routing = output.rho_B, output.routing
        self.largest_energy = float(output.round.logits_BKChw.detach().square().sum(dim=(2, 3, 4)).max())
        return output.logits_BChw

    def gradient(self, scalar: Tensor) -> Tensor:
        grads = torch.autograd.grad(scalar, self.theta, allow_unused=True, retain_graph=True)
        rows = [torch.zeros_like(p) if g is None else g for p, g in zip(self.theta, grads, strict=True)]
        return torch.cat([row.flatten() for row in rows])

    def jacobian(self) -> Tensor:
        """dy^/dtheta without any channel, (d_y, theta)."""
        return self.jacobian_of(self.forward([0], kind="ideal"))

    def jacobian_of(self, y: Tensor) -> Tensor:
        return torch.stack([self.gradient(element) for element in y.flatten()])


@pytest.fixture
def setup(make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]) -> Setup:
    channel = {"snr_db": -6, "fading": "none"}
    return Setup(make_model(channel=channel), make_features(1, grid=GRID))


def noise_variance(setup: Setup) -> float:
    """sigma_c^2 / (2 rho) per real element, at the setup's own rho."""
    setup.forward([0])
    return noise_power(setup.model.config.channel) / (2 * float(setup.rho_B[0]))


def test_the_mean_gradient_of_the_squared_error_is_that_of_the_loss_without_noise(setup: Setup) -> None:
    many = 4000
    variance, exact = noise_variance(setup), setup.gradient(half_squared_error(setup.forward([0], kind="ideal")))
    mean = setup.gradient(half_squared_error(setup.forward(range(many))))
    spread = (variance * setup.jacobian().square().sum(dim=0) / many).sqrt()  # of each component of the mean
    assert ((mean - exact).abs() <= 5 * spread + 1e-12).all()
    assert float((mean - exact).square().sum() / spread.square().sum()) < 3
    assert float(exact.norm()) > 20 * float(spread.max())


def test_the_mean_gradient_of_the_cross_entropy_is_the_slope_of_the_smoothed_loss(setup: Setup) -> None:
    """The slope comes from its own noise: antithetic draws, central differences, no gradient at all."""
    many, step = 4000, 1e-4
    deviation = noise_variance(setup) ** 0.5
    draws = deviation * torch.from_numpy(np.random.default_rng(0).normal(size=(20_000, 3, *GRID)))
    stream = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=stream, dtype=p.dtype) for p in setup.theta]

    @torch.no_grad()
    def smoothed(amount: float) -> float:
        for p, d in zip(setup.theta, direction, strict=True):
            p.add_(amount * d)
        y = setup.forward([0], kind="ideal")
        for p, d in zip(setup.theta, direction, strict=True):
            p.sub_(amount * d)
        return float(cell_cross_entropy(torch.cat([y + draws, y - draws])))

    along = torch.cat([d.flatten() for d in direction])
    noisy = setup.forward(range(many))
    mean = float(setup.gradient(cell_cross_entropy(noisy)) @ along)
    slope = (smoothed(step) - smoothed(-step)) / (2 * step)
    without_noise = float(setup.gradient(cell_cross_entropy(setup.forward([0], kind="ideal"))) @ along)
    push = setup.jacobian() @ along  # dy^ along the direction
    per_draw = torch.autograd.grad(cell_cross_entropy(noisy), noisy)[0].flatten(1) * many @ push
    error = 4.5 * float(per_draw.std()) * (1 / many + 1 / 40_000) ** 0.5
    assert abs(mean - slope) < error
    assert abs(mean - without_noise) > 2 * error  # smoothing is no small matter here


@LOSSES
def test_the_gradients_variance_is_within_kappa_times_the_noise(loss: Loss, setup: Setup) -> None:
    variance, spectral = noise_variance(setup), float(torch.linalg.matrix_norm(setup.jacobian(), ord=2))
    gradients = torch.stack([setup.gradient(loss(setup.forward([i]))) for i in range(200)])
    measured = float(gradients.var(dim=0).sum())
    kappa = spectral**2 * SMOOTHNESS[loss] ** 2 * D_Y
    assert 0 < measured <= kappa * variance
    if loss is half_squared_error:  # here the variance is known exactly: sigma_c^2 / (2 rho) ||J||_F^2
        exact = variance * float(setup.jacobian().square().sum())
        assert measured == pytest.approx(exact, rel=0.25)


@LOSSES
def test_under_rayleigh_fading_the_bound_holds_with_the_worst_rho(
    loss: Loss, make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    """Each id's fading and set stay; only its noise is switched off for the gradient it is compared with."""
    setup = Setup(make_model(channel={"snr_db": 3, "gamma_th": 0.2}), make_features(1, grid=GRID))
    squares: list[float] = []
    spectral: dict[tuple[bool, ...], float] = {}
    smallest_rho, largest = np.inf, 0.0
    for i in range(80):
        quiet = setup.forward([i], snr_db=120)
        if setup.routing.all_faded_B[0]:  # the strongest stays below the threshold: outside the lemma's premises
            continue
        clean, active = setup.gradient(loss(quiet)), tuple(setup.routing.active_BK[0].tolist())
        if active not in spectral:
            spectral[active] = float(torch.linalg.matrix_norm(setup.jacobian_of(quiet), ord=2))
        noisy = setup.gradient(loss(setup.forward([i])))
        squares.append(float((noisy - clean).square().sum()))
        smallest_rho = min(smallest_rho, float(setup.rho_B[0]))
        largest = max(largest, setup.largest_energy)
    rho_min = D_Y * 0.2 / largest  # P0 gamma_th / (beta_max^2 E_max), beta_max = 1
    kappa = max(spectral.values()) ** 2 * SMOOTHNESS[loss] ** 2 * D_Y
    assert smallest_rho >= rho_min
    assert 0 < float(np.mean(squares)) <= kappa * noise_power(setup.model.config.channel) / (2 * rho_min)
    assert len(spectral) == 3  # both, the first alone, the second alone

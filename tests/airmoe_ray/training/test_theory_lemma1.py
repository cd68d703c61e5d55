r"""Lemma 1 with rho frozen: gradients through the noisy channel are unbiased for the smoothed loss

.. math:: F(\theta) = E_e[\ell(\hat y(\theta) + e)],\quad e \sim N(0, \sigma_c^2 / (2 \rho) I)

and their variance is at most kappa sigma_c^2 / (2 rho_min), kappa = G^2 L_y^2 d_y. Here G is the computed spectral
norm of dy^/dtheta, and L_y the known smoothness of the loss in y: 1 for half the squared error, 1 / (2 cells) for
cross-entropy. The bound is far above what happens (20 to 80 times with the cross-entropy), so what happens is predicted
as well: from dy^/dtheta, the loss's slope in closed form, rho by hand, and noise of the tests' own.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from airmoe_ray.config import ChannelConfig
from airmoe_ray.model.moe import AirMoE
from airmoe_ray.radio.channel import draw_gamma

Loss = Callable[[Tensor], Tensor]  # of (B, C, h, w), mean over B
GRID, D_Y = (2, 2), 12
LABELS = torch.tensor([[0, 1], [2, 1]])
TARGET = torch.linspace(-1, 1, D_Y, dtype=torch.float64).view(3, *GRID)


def half_squared_error(y_BChw: Tensor) -> Tensor:
    return 0.5 * (y_BChw - TARGET).square().sum(dim=(1, 2, 3)).mean()


def cell_cross_entropy(y_BChw: Tensor) -> Tensor:
    return cross_entropy(y_BChw, LABELS.expand(len(y_BChw), -1, -1))


def slope_in_y(loss: Loss, y: np.ndarray) -> np.ndarray:
    """d loss / dy of each row of y (n, C, h, w), in closed form: (n, d_y)."""
    if loss is half_squared_error:
        return (y - TARGET.numpy()).reshape(len(y), D_Y)
    probability = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    truth = np.moveaxis(np.eye(3)[LABELS.numpy()], -1, 0)
    return (probability - truth).reshape(len(y), D_Y) / LABELS.numel()


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
        self.output = self.model(self.features.expand(len(ids), -1, -1, -1), ids, channel=setting)
        return self.output.logits_BChw

    def energies(self) -> np.ndarray:
        """||y_j||^2 of the first input's routed clients, (K,)."""
        return self.output.round.on_air.logits_BKChw[0].detach().square().sum(dim=(1, 2, 3)).numpy()

    def noise_variance(self, id: int) -> float:
        """sigma_c^2 / (2 rho) per real element, by hand from the id's fading and who transmits what, Eq. (22)."""
        config, routing = self.model.config, self.output.routing
        gamma_N = draw_gamma([id], config.experts.count, config=config.channel, seed=config.seed)[0]
        gain_K = np.abs(gamma_N[routing.transmit_BK[0]].numpy()) ** 2
        active_K, beta_K = routing.active_BK[0].numpy(), self.output.beta_BK[0].detach().numpy()
        budget = config.channel.power * D_Y
        rho = (budget * gain_K[active_K] / (beta_K**2 * self.energies())[active_K]).min()
        return config.channel.power * 10 ** (-config.channel.snr_db / 10) / (2 * rho)

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


def test_the_mean_gradient_of_the_squared_error_is_that_of_the_loss_without_noise(setup: Setup) -> None:
    many = 4000
    exact = setup.gradient(half_squared_error(setup.forward([0], kind="ideal")))
    variance = setup.noise_variance(0)
    mean = setup.gradient(half_squared_error(setup.forward(range(many))))
    spread = (variance * setup.jacobian().square().sum(dim=0) / many).sqrt()  # of each component of the mean
    assert ((mean - exact).abs() <= 5 * spread + 1e-12).all()
    assert float((mean - exact).square().sum() / spread.square().sum()) < 3
    assert float(exact.norm()) > 20 * float(spread.max())


def test_the_mean_gradient_of_the_cross_entropy_is_the_slope_of_the_smoothed_loss(setup: Setup) -> None:
    """The slope comes from its own noise: antithetic draws, central differences, no gradient at all."""
    many, step = 4000, 1e-4
    setup.forward([0])
    deviation = setup.noise_variance(0) ** 0.5
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


def test_the_slope_in_closed_form_is_the_losses_own() -> None:
    y = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3, *GRID))).requires_grad_()
    for loss in SMOOTHNESS:
        (by_autograd,) = torch.autograd.grad(loss(y) * len(y), y)
        np.testing.assert_allclose(slope_in_y(loss, y.detach().numpy()), by_autograd.flatten(1), rtol=1e-12, atol=1e-15)


def noisy_slopes(loss: Loss, y: Tensor, variance: float, draws: np.ndarray) -> np.ndarray:
    """Slopes at y^ + e for standard normal draws of e, (n, d_y)."""
    return slope_in_y(loss, y.detach().numpy() + variance**0.5 * draws)


def squared_lengths(slopes: np.ndarray, jacobian: Tensor) -> np.ndarray:
    """||J^T s||^2 of each row s."""
    return np.einsum("ni,ij,nj->n", slopes, (jacobian @ jacobian.T).numpy(), slopes)


@LOSSES
def test_the_gradients_variance_is_as_predicted_and_within_kappa_times_the_noise(loss: Loss, setup: Setup) -> None:
    many, jacobian, clean = 500, setup.jacobian(), setup.forward([0], kind="ideal")
    variance = setup.noise_variance(0)
    slopes = noisy_slopes(loss, clean, variance, np.random.default_rng(0).normal(size=(20_000, 3, *GRID)))
    lengths = squared_lengths(slopes - slopes.mean(axis=0), jacobian)
    predicted, error = lengths.mean(), lengths.std() * (1 / many + 1 / len(lengths)) ** 0.5
    gradients = torch.stack([setup.gradient(loss(setup.forward([i]))) for i in range(many)])
    measured = float(gradients.var(dim=0).sum())
    assert abs(measured - predicted) < 4 * error < 0.2 * predicted  # a quarter more or less noise would show
    if loss is half_squared_error:
        assert predicted == pytest.approx(variance * float(jacobian.square().sum()), rel=0.03)
    kappa = float(torch.linalg.matrix_norm(jacobian, ord=2)) ** 2 * SMOOTHNESS[loss] ** 2 * D_Y
    assert measured <= kappa * variance


@LOSSES
def test_under_rayleigh_fading_the_variance_is_as_predicted_and_the_bound_holds_with_the_worst_rho(
    loss: Loss, make_model: Callable[..., AirMoE], make_features: Callable[..., Tensor]
) -> None:
    """Each id's fading and set stay; only its noise is switched off for the gradient it is compared with."""
    config = {"snr_db": 3, "gamma_th": 0.2}
    setup = Setup(make_model(channel=config), make_features(1, grid=GRID))
    draws = np.random.default_rng(0).normal(size=(1000, 3, *GRID))
    measured, predicted, spread, variances, energies = [], [], [], [], []
    jacobians: dict[tuple[bool, ...], Tensor] = {}
    for i in range(300):
        quiet = setup.forward([i], snr_db=120)
        if setup.output.routing.all_faded_B[0]:  # the strongest is below the threshold: outside the lemma's premises
            continue
        clean, active = setup.gradient(loss(quiet)), tuple(setup.output.routing.active_BK[0].tolist())
        if active not in jacobians:
            jacobians[active] = setup.jacobian_of(quiet)
        variances.append(setup.noise_variance(i))
        energies.append(setup.energies().max())
        slopes = noisy_slopes(loss, quiet, variances[-1], draws) - slope_in_y(loss, quiet.detach().numpy())
        lengths = squared_lengths(slopes, jacobians[active])
        predicted.append(lengths.mean())
        spread.append(lengths.std())
        measured.append(float((setup.gradient(loss(setup.forward([i]))) - clean).square().sum()))
    error = np.linalg.norm(spread) / len(spread)
    assert abs(np.mean(measured) - np.mean(predicted)) < 4 * error < 0.3 * np.mean(predicted)
    rho_min = D_Y * 0.2 / max(energies)  # P0 gamma_th / (beta_max^2 E_max), beta_max = 1
    worst = 10**-0.3 / (2 * rho_min)
    spectral = max(float(torch.linalg.matrix_norm(jacobian, ord=2)) for jacobian in jacobians.values())
    assert max(variances) <= worst
    assert np.mean(measured) <= spectral**2 * SMOOTHNESS[loss] ** 2 * D_Y * worst
    assert len(jacobians) == 3  # both, the first alone, the second alone

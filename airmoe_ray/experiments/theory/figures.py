"""Every figure of `airmoe theory` under a name of its own: `name -> {value, unit, ...}`.

A value is None, with a reason, where a bound gives no number. `target` and `pass` stand where a figure is checked.
"""

from typing import Any

import numpy as np

from airmoe_ray.experiments.theory.bounds import (
    bias_bound,
    effective_variance,
    floor,
    floor_db,
    lemma1_kappa,
    noise_variance,
    noiseless_iterations,
    reachable,
    receive_snr_db,
    smoothed_iterations,
)
from airmoe_ray.experiments.theory.measured import GradientNoise, MeasuredFloor, NoiseSlope, NoiseVariance, interval
from airmoe_ray.experiments.theory.panels import snr_line
from airmoe_ray.experiments.theory.run_constants import RunConstants
from airmoe_ray.experiments.theory.settings import TheorySettings

Figure = dict[str, Any]
_SQUARED = "squared gradient norm"


def figure(value: float | None, unit: str, **more: Any) -> Figure:
    """One entry; numbers are rounded to six digits, which is more than any of them is worth."""
    rounded = None if value is None else float(f"{value:.6g}")
    return {"value": rounded, "unit": unit, **more}


def formula_figures(settings: TheorySettings) -> dict[str, Figure]:
    """What the formulas say at the given constants, and the slopes of their curves."""
    noisy = settings if settings.noise_power else settings.but(noise_power=1e-3)
    snr_db, level_db = snr_line(noisy)
    budget = np.geomspace(1e2, 1e6, 9)
    rate = [reachable(settings, float(t)) - floor(settings) for t in budget]
    times_ten_db = floor_db(settings.but(outputs=10 * settings.outputs), 0.0) - floor_db(settings, 0.0)
    found = {
        "floor_slope_formula": figure(float(np.polyfit(snr_db, level_db, 1)[0]), "dB per dB", equation="Eq. (39)"),
        "floor_per_decade_of_outputs": figure(times_ten_db, "dB", equation="Eq. (39)"),
        "transient_exponent": figure(_exponent(budget, rate), "d log(eps - eps_floor) / d log T", equation="Eq. (40)"),
        "sigma_eff2": figure(effective_variance(settings), "gradient variance", equation="Eq. (29)"),
        "bias_bound": figure(bias_bound(settings), "gradient norm", equation="Eq. (30)"),
        "eps_floor": figure(floor(settings), _SQUARED, equation="Eq. (37)"),
    }
    if settings.noise_power:
        found["receive_snr_db"] = figure(receive_snr_db(settings), "dB")
    for name, equation, answer in (
        ("iterations_smoothed", "Eq. (36)", smoothed_iterations(settings, settings.eps)),
        ("iterations_noiseless", "Eq. (38)", noiseless_iterations(settings, settings.eps)),
    ):
        more = {} if answer.reason is None else {"reason": answer.reason}
        found[name] = figure(answer.total, "iterations", eps=settings.eps, equation=equation, **more)
    return found


def _exponent(x: Any, y: Any) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def noise_figures(noise: NoiseVariance) -> dict[str, Figure]:
    """Measured noise variance over sigma_c^2 / (2 rho)."""
    met = abs(noise.ratio - 1) <= 0.03
    told = {"target": "1 +- 0.03", "pass": met, "elements": noise.elements, "equation": "Eq. (23)"}
    return {"noise_variance_ratio": figure(noise.ratio, "measured / predicted", **told)}


def gradient_figures(noise: GradientNoise) -> dict[str, Figure]:
    """Lemma 1 on the controlled problem: unbiased for the smoothed objective, variance within the bound."""
    bound = effective_variance(noise.constants)
    by_rho = lemma1_kappa(noise.constants) * noise.mean_variance
    unbiased = noise.to_smoothed < 3
    return {
        "gradient_variance_measured": figure(noise.total, "gradient variance"),
        "gradient_variance_bound": figure(bound, "gradient variance", equation="Eq. (29)"),
        "gradient_variance_over_bound": figure(
            noise.total / bound, "measured / sigma_eff^2", target="<= 1", **{"pass": noise.total <= bound}
        ),
        "channel_variance_over_kappa": figure(
            noise.channel / by_rho,
            "channel's part / (kappa sigma_c^2 / (2 rho)), rho as it was",
            target="<= 1",
            **{"pass": noise.channel <= by_rho},
        ),
        "gradient_bias_to_smoothed": figure(
            noise.to_smoothed,
            "squared distance of means / chance",
            target="about 1, below 3",
            equation="Eq. (28)",
            **{"pass": unbiased},
        ),
        "gradient_bias_to_noiseless": figure(noise.to_noiseless, "squared distance of means / chance"),
    }


def noise_slope_figures(measured: NoiseSlope) -> dict[str, Figure]:
    """The slope of gradient noise over SNR, beside that of Eq. (29)."""
    slopes = measured.slopes()
    low, high = interval(slopes)
    mean = float(slopes.mean())
    told = {
        "target": "-1 +- 0.1",
        "pass": abs(mean + 1) <= 0.1,
        "interval_95": [round(low, 4), round(high, 4)],
        "per_seed": [round(float(slope), 4) for slope in slopes],
        "snr_db": list(measured.snr_db),
    }
    return {
        "gradient_noise_slope_formula": figure(-1.0, "dB per dB, kappa sigma_c^2 / (2 rho)", equation="Eq. (29)"),
        "gradient_noise_slope_measured": figure(mean, "dB per dB", **told),
    }


def floor_figures(measured: MeasuredFloor, *, steps: int) -> dict[str, Figure]:
    """The slope of the measured floor, and how far below the bound it lies."""
    slopes = measured.slopes()
    low, high = interval(slopes)
    mean = float(slopes.mean())
    bound_db = np.array(
        [[floor_db(c, x) for c, x in zip(measured.constants, row, strict=True)] for row in measured.receive_snr_db]
    )
    over_db = 10 * np.log10(measured.squared_norm) - bound_db
    told = {
        "target": "-2 +- 0.2",
        "pass": abs(mean + 2) <= 0.2,
        "interval_95": [round(low, 4), round(high, 4)],
        "per_seed": [round(float(slope), 4) for slope in slopes],
        "snr_db": list(measured.snr_db),
        "squared_norm_db": (10 * np.log10(measured.squared_norm)).mean(axis=1).round(2).tolist(),
        "steps": steps,
    }
    return {
        "floor_slope_measured": figure(mean, "dB per dB", **told),
        "floor_measured_over_first_order": figure(
            float(np.mean(10 * np.log10(measured.squared_norm / measured.predicted))), "dB, mean over SNRs and seeds"
        ),
        "floor_measured_over_bound": figure(
            float(over_db.max()), "dB, the largest", target="<= 0", **{"pass": bool(over_db.max() <= 0)}
        ),
    }


def run_figures(run: RunConstants) -> dict[str, Figure]:
    """Constants of a trained run and what the bounds say with them."""
    c = run.constants
    least, now = floor(c), run.squared_gradient
    vacuous = least >= now
    says = (
        "vacuous: the floor is above the squared gradient norm that the run has reached"
        if vacuous
        else "not vacuous: the floor is below the squared gradient norm of the run"
    )
    answer = noiseless_iterations(c, now)
    told = {"eps": float(f"{now:.6g}"), **({} if answer.reason is None else {"reason": answer.reason})}
    at = {"images": run.images}
    return {
        "run_jacobian": figure(c.jacobian, "G, spectral norm of dy^/dTheta", **at),
        "run_loss_smoothness": figure(c.loss_smoothness, "L_y, at these logits", everywhere=run.smoothness_everywhere),
        "run_loss_hessian": figure(c.loss_hessian, "rho_H, at these logits", everywhere=run.hessian_everywhere),
        "run_smoothness_of_mean": figure(
            1 / (2 * run.cells), "1 / (2 cells), L_y of a mean over cells", cells=run.cells
        ),
        "run_outputs": figure(c.outputs, "d_y"),
        "run_smoothness": figure(c.smoothness, "L, largest curvature in Theta", **at),
        "run_rho_min": figure(c.rho_min, "rho_min = P0 gamma_th / E_max"),
        "run_receive_snr_db": figure(receive_snr_db(c), "dB, rho_min / sigma_c^2"),
        "run_kappa": figure(lemma1_kappa(c), "G^2 L_y^2 d_y"),
        "run_channel_variance": figure(lemma1_kappa(c) * noise_variance(c), "kappa sigma_c^2 / (2 rho_min)"),
        "run_data_variance": figure(c.data_variance, "sigma^2, between images", **at),
        "run_squared_gradient": figure(now, _SQUARED, **at),
        "run_eps_floor": figure(least, _SQUARED, equation="Eq. (37)"),
        "run_floor_over_gradient": figure(least / now, "eps_floor / squared gradient norm", says=says),
        "run_iterations": figure(answer.total, "iterations to the gradient norm of the run", **told),
    }


def misses(figures: dict[str, Figure]) -> list[str]:
    """Names of figures that miss their target."""
    return [name for name, each in figures.items() if each.get("pass") is False]

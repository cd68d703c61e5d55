"""The numbers behind the six panels of the paper's complexity figure, and their JSON and CSV forms."""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from airmoe_ray.experiments.theory.bounds import (
    floor,
    floor_db,
    noiseless_iterations,
    reachable,
    receive_snr_db,
)
from airmoe_ray.experiments.theory.measured import MeasuredFloor
from airmoe_ray.experiments.theory.settings import Constants, TheorySettings

NOISE_FACTORS = (0.0, 0.3, 1.0, 3.0, 10.0)  # of `noise_power`, one curve each
_POINTS = 241


@dataclass(frozen=True)
class Curve:
    """One line of a panel; y is None where the bound certifies nothing."""

    label: str
    x: list[float]
    y: list[float | None]
    asymptote: float | None = None  # the floor that it ends at, or approaches
    kind: str = "formula"  # `mean`: of a loss that is a mean over cells; `own bound`, `measured`: controlled problem


@dataclass(frozen=True)
class Panel:
    """Axes and curves."""

    key: str  # a to f
    title: str
    x_label: str
    y_label: str
    x_log: bool
    curves: list[Curve]
    target: float | None = None  # eps, where a panel marks it


def six_panels(settings: TheorySettings, measured: MeasuredFloor | None = None) -> list[Panel]:
    """Panels (a)-(f); (e) takes the measured floor and its problem's own bound along."""
    return [
        _against_target(settings),
        _against_noise(settings),
        _against_scale(settings),
        _against_outputs(settings),
        _floor_against_snr(settings, measured),
        _against_budget(settings),
    ]


def _axis(low: float, high: float) -> list[float]:
    return [float(x) for x in np.geomspace(low, high, _POINTS)]


def _axis_to(end: float | None, low: float, high: float, *, above: bool = False) -> list[float]:
    """An axis with more points where a curve shoots up: just below `end`, or just above it."""
    near: list[float] = []
    if end:
        near = [end * (1 + x) if above else end / (1 + x) for x in np.geomspace(1e-5, 1, _POINTS).tolist()]
    return sorted(x for x in {*_axis(low, high), *near} if low <= x <= high)


def _curve(label: str, xs: Iterable[float], y: Callable[[float], float | None], **more: Any) -> Curve:
    points = [(x, y(x)) for x in xs]
    return Curve(label, [x for x, _ in points], [value for _, value in points], **more)


def _iterations(constants: Constants, eps: float) -> float | None:
    return noiseless_iterations(constants, eps).total


def _noise_levels(settings: TheorySettings) -> list[Constants]:
    return [settings.but(noise_power=factor * settings.noise_power) for factor in NOISE_FACTORS]


def _noise_label(constants: Constants) -> str:
    return rf"$\sigma_c^2$ = {constants.noise_power:.3g}"


def _against_target(settings: TheorySettings) -> Panel:
    def of(level: Constants) -> Curve:
        least = floor(level) or None
        xs = _axis_to(least, settings.eps / 1e3, settings.eps * 30, above=True)
        return _curve(_noise_label(level), xs, lambda eps: _iterations(level, eps), asymptote=least)

    curves = [of(level) for level in _noise_levels(settings)]
    return Panel("a", "target accuracy", r"target $\epsilon$", "iterations $T$", True, curves)


def _against_noise(settings: TheorySettings) -> Panel:
    unit = settings.but(noise_power=1.0)
    low = (settings.noise_power or 1.0) * 1e-2

    def of(eps: float) -> Curve:
        end = (eps / floor(unit)) ** 0.5  # the floor goes with the square of the noise
        xs = _axis_to(end, low, low * 1e4)
        label = rf"$\epsilon$ = {eps:.3g}"
        return _curve(label, xs, lambda power: _iterations(unit.but(noise_power=power), eps), asymptote=end)

    curves = [of(eps) for eps in (settings.eps / 10, settings.eps, settings.eps * 10)]
    return Panel("b", "channel noise", r"noise power $\sigma_c^2$", "iterations $T$", True, curves)


def _against_scale(settings: TheorySettings) -> Panel:
    def of(level: Constants) -> Curve:
        end = settings.rho_min * (floor(level) / settings.eps) ** 0.5 or None
        xs = _axis_to(end, settings.rho_min * 1e-2, settings.rho_min * 1e3, above=True)
        label = _noise_label(level)
        return _curve(label, xs, lambda rho: _iterations(level.but(rho_min=rho), settings.eps), asymptote=end)

    curves = [of(level) for level in _noise_levels(settings)]
    return Panel(
        "c",
        rf"receive scaling, $\epsilon$ = {settings.eps:g}",
        r"smallest scaling $\rho_{\min}$",
        "iterations $T$",
        True,
        curves,
    )


def _against_outputs(settings: TheorySettings) -> Panel:
    """d_y alone, as in the paper; and beside it a loss that is a mean over cells.

    L_y and rho_H of a mean fall as the number of cells grows, so that kappa goes with 1 / d_y and the floor stays.
    """
    most = settings.outputs * 1e2

    def summed(level: Constants) -> Curve:
        end = settings.outputs * (settings.eps / floor(level)) ** 0.5 if floor(level) else None
        # whole numbers would end the curve far below its asymptote; the formulas take any
        xs = _axis_to(end, 1, most)
        return _curve(_noise_label(level), xs, lambda d: _iterations(level.but(outputs=d), settings.eps), asymptote=end)

    def averaged(level: Constants, outputs: float) -> float | None:
        share = settings.outputs / outputs
        slopes = {"loss_smoothness": level.loss_smoothness * share, "loss_hessian": level.loss_hessian * share}
        return _iterations(level.but(outputs=outputs, **slopes), settings.eps)

    curves = [summed(level) for level in _noise_levels(settings)[1:4]]
    curves.append(
        _curve(f"{_noise_label(settings)}, mean", _axis(1, most), lambda d: averaged(settings, d), kind="mean")
    )
    return Panel(
        "d",
        rf"output dimension, $\epsilon$ = {settings.eps:g}",
        "output dimension $d_y$",
        "iterations $T$",
        True,
        curves,
    )


def _floor_against_snr(settings: TheorySettings, measured: MeasuredFloor | None) -> Panel:
    xs = [float(x) for x in np.linspace(-10, 40, 51)]

    def line(label: str, constants: Constants, snrs_db: list[float], kind: str = "formula") -> Curve:
        return _curve(label, snrs_db, lambda snr_db: 10 ** (floor_db(constants, snr_db) / 10), kind=kind)

    curves = [line(f"$d_y$ = {n:g}", settings.but(outputs=n), xs) for n in settings.outputs * np.array([1, 10, 100])]
    if measured is not None:
        # seeds differ in their constants by a few dB: the bound is that of the first, points are geometric means
        mean_snr_db = [float(x) for x in measured.receive_snr_db.mean(axis=1)]
        level_db = np.log10(measured.squared_norm).mean(axis=1)
        own = measured.constants[0]
        curves.append(line("controlled problem: bound", own, mean_snr_db, "own bound"))
        points: list[float | None] = [float(10**y) for y in level_db]
        curves.append(Curve("controlled problem: measured", mean_snr_db, points, kind="measured"))
    label = r"receive SNR $\rho_{\min}/\sigma_c^2$ [dB]"
    return Panel("e", "the floor", label, r"$\epsilon_{\mathrm{floor}}$", False, curves, target=settings.eps)


def _against_budget(settings: TheorySettings) -> Panel:
    curves = [
        _curve(_noise_label(level), _axis(1, 1e8), partial(reachable, level), asymptote=floor(level) or None)
        for level in _noise_levels(settings)
    ]
    return Panel("f", "iteration budget", "iterations $T$", r"best certified $\epsilon(T)$", True, curves)


def as_json(panels: list[Panel]) -> list[dict[str, Any]]:
    """Panels as plain values."""
    return [asdict(panel) for panel in panels]


def as_csv(panels: list[Panel]) -> str:
    """One row per point; y is empty and `certified` 0 where the bound gives no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["panel", "x_name", "y_name", "curve", "kind", "x", "y", "certified"])
    for panel in panels:
        for curve in panel.curves:
            for x, y in zip(curve.x, curve.y, strict=True):
                shown = ["", 0] if y is None else [f"{y:.8g}", 1]
                names = map(_plain, (panel.x_label, panel.y_label, curve.label))
                writer.writerow([panel.key, *names, curve.kind, f"{x:.8g}", *shown])
    return text.getvalue()


def _plain(label: str) -> str:
    """A label without the signs of formulas."""
    for sign in ("$", "\\", "{", "}", "mathrm"):
        label = label.replace(sign, "")
    return label


def snr_line(constants: Constants, span_db: float = 20.0) -> tuple[list[float], list[float]]:
    """Receive SNR and eps_floor [dB] over some decibels from the setting's own on, by Eq. (37) as sigma_c^2 falls."""
    xs, ys = [], []
    for drop_db in np.linspace(0, span_db, 11):
        level = constants.but(noise_power=constants.noise_power * 10 ** (-drop_db / 10))
        xs.append(receive_snr_db(level))
        ys.append(float(10 * np.log10(floor(level))))
    return xs, ys

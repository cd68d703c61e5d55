"""The six panels: their slopes, their asymptotes, and what the files say where nothing is certified."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from airmoe_ray.errors import ConfigError, UserError
from airmoe_ray.experiments.theory import bounds
from airmoe_ray.experiments.theory.panels import Curve, Panel, as_csv, as_json, six_panels
from airmoe_ray.experiments.theory.plot import draw
from airmoe_ray.experiments.theory.settings import TheorySettings, parse_settings

SETTINGS = TheorySettings()


@pytest.fixture(scope="module")
def panels() -> dict[str, Panel]:
    return {panel.key: panel for panel in six_panels(SETTINGS)}


def certified(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    x, y = np.array(pairs).T
    return x, y


def test_there_are_six(panels: dict[str, Panel]) -> None:
    assert list(panels) == list("abcdef")


def test_far_from_the_floor_iterations_go_with_the_square_of_the_target(panels: dict[str, Panel]) -> None:
    x, y = certified(panels["a"].curves[0])  # no channel noise
    assert np.polyfit(np.log(x[:80]), np.log(y[:80]), 1)[0] == pytest.approx(-2, abs=0.02)


def test_every_curve_of_panel_a_ends_just_above_its_floor_and_shoots_up_there(panels: dict[str, Panel]) -> None:
    for curve in panels["a"].curves[1:]:
        x, y = certified(curve)
        assert curve.asymptote is not None
        assert curve.asymptote < x.min() < 1.01 * curve.asymptote
        assert y.max() > 1e3 * y[len(y) // 2]
        assert all(value is None for at, value in zip(curve.x, curve.y, strict=True) if at <= curve.asymptote)


@pytest.mark.parametrize(("key", "end"), [("b", max), ("c", min), ("d", max)])
def test_the_other_panels_of_iterations_end_at_their_asymptotes(panels: dict[str, Panel], key: str, end) -> None:
    checked = 0
    for curve in panels[key].curves:
        x, y = certified(curve)
        rising = np.diff(y) >= 0 if key in "bd" else np.diff(y) <= 0
        if curve.kind == "formula":
            assert rising.all()
        if curve.asymptote is not None and min(curve.x) < curve.asymptote < max(curve.x):
            assert end(x) == pytest.approx(curve.asymptote, rel=1e-3)
            checked += 1
    assert checked >= 2


def test_a_mean_over_cells_knows_no_curse_of_the_output_dimension(panels: dict[str, Panel]) -> None:
    (mean,) = (curve for curve in panels["d"].curves if curve.kind == "mean")
    _, y = certified(mean)
    assert len(y) == len(mean.y)
    assert (np.diff(y) <= 0).all()


def test_the_floor_falls_by_two_decibels_per_decibel_and_rises_by_twenty_per_decade(panels: dict[str, Panel]) -> None:
    level_db = [10 * np.log10(np.array(certified(curve)[1])) for curve in panels["e"].curves]
    for each in level_db:
        assert np.polyfit(panels["e"].curves[0].x, each, 1)[0] == pytest.approx(-2, abs=1e-9)
    np.testing.assert_allclose(level_db[1] - level_db[0], 20)
    assert panels["e"].target == SETTINGS.eps


def test_the_accuracy_falls_with_the_root_of_the_budget_and_flattens_at_the_floor(panels: dict[str, Panel]) -> None:
    for curve in panels["f"].curves:
        x, y = certified(curve)
        above = y - (curve.asymptote or 0.0)
        assert np.polyfit(np.log(x), np.log(above), 1)[0] == pytest.approx(-0.5, abs=1e-6)
        assert (y > (curve.asymptote or 0.0)).all()


def test_the_files_have_every_point_and_no_number_where_nothing_is_certified(panels: dict[str, Panel]) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(list(panels.values())))))
    points = sum(len(curve.x) for panel in panels.values() for curve in panel.curves)
    assert len(rows) == points
    silent = [row for row in rows if row["certified"] == "0"]
    assert silent
    assert all(row["y"] == "" for row in silent)
    told = json.loads(json.dumps(as_json(list(panels.values())), allow_nan=False))
    assert sum(y is None for panel in told for curve in panel["curves"] for y in curve["y"]) == len(silent)
    row = next(row for row in rows if row["panel"] == "a" and row["certified"] == "1")
    level = SETTINGS.but(noise_power=float(row["curve"].split("=")[1]))
    assert float(row["y"]) == bounds.noiseless_iterations(level, float(row["x"])).total


def test_the_picture_has_six_panels_and_is_small(panels: dict[str, Panel], tmp_path: Path) -> None:
    draw(list(panels.values()), tmp_path / "theory.png")
    with Image.open(tmp_path / "theory.png") as picture:
        assert picture.width > picture.height > 600
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 16  # not blank
    assert (tmp_path / "theory.png").stat().st_size < 200_000


def test_panels_without_channel_noise_have_no_floor() -> None:
    quiet = six_panels(TheorySettings(noise_power=0.0))
    assert all(curve.asymptote is None for panel in quiet if panel.key in "acf" for curve in panel.curves)


def test_a_missing_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"airmoe-ray\[experiments\]"):
        draw([], tmp_path / "theory.png")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("theory.epsilon=1", "did you mean theory.eps?"),
        ("theory.eps=0", "theory.eps = 0: input should be greater than 0"),
        ("theory.eps=.nan", "theory.eps"),
        ("theory.outputs=1.5", "theory.outputs = 1.5"),
        ("theory.rho_min=x", "theory.rho_min = 'x'"),
        ("theory.seeds=1", "theory.seeds = 1"),
        ("theory.preconditioner_low=2", "m <= M"),
        ("theory.eps", "expected KEY=VALUE"),
    ],
)
def test_bad_constants_are_one_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings([override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_constants_are_taken_over() -> None:
    settings = parse_settings(["theory.eps=1e-3", "theory.outputs=640"])
    assert (settings.eps, settings.outputs) == (1e-3, 640)
    assert math.isclose(bounds.floor(settings), 100 * bounds.floor(SETTINGS))

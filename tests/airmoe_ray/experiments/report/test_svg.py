from xml.etree import ElementTree

import numpy as np
import pytest

from airmoe_ray.experiments.report.svg import Line, bar_chart, heat_map, interval_chart, line_chart, scatter, ticks

HOSTILE = '<b>&"'


def texts(svg: str) -> str:
    return " ".join(ElementTree.fromstring(svg).itertext())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (27.5, 27.6), (-3, 140), (5, 5), (1e-4, 3e-4)])
def test_ticks_cover_the_range_in_equal_round_steps(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 7
    steps = np.diff(found)
    assert np.allclose(steps, steps[0])
    assert f"{steps[0]:e}"[0] in "125"


def test_a_curve_rises_where_its_values_do_and_the_interval_encloses_it():
    line = Line(HOSTILE, [1, 2, 3], [1.0, 4.0, 2.0], low=[0.5, 3.0, 1.0], high=[2.0, 5.0, 3.0])
    svg = line_chart([line], title="t", x_label="epoch", y_label="mIoU, %")
    tree = ElementTree.fromstring(svg)
    (curve,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [-float(point.split(",")[1]) for point in curve.get("points").split()]
    assert heights[0] < heights[2] < heights[1]
    (band,) = tree.iter("{http://www.w3.org/2000/svg}polygon")
    rim = [-float(point.split(",")[1]) for point in band.get("points").split()]
    upper, lower = rim[:3], rim[3:][::-1]
    assert all(a < b < c for a, b, c in zip(lower, heights, upper, strict=True))
    assert HOSTILE in texts(svg)


def test_a_logarithmic_axis_gives_equal_ratios_equal_steps():
    svg = line_chart([Line("l", [1, 2, 3], [0.01, 0.1, 1.0])], title="t", x_label="x", y_label="y", log=True)
    (curve,) = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in curve.get("points").split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)


def test_ink_of_a_heat_map_is_the_share_and_names_are_escaped():
    svg = heat_map([[0.25, 0.75], [1, 0]], ["a", HOSTILE], ["x", "y"], title="t", x_label="c", y_label="r")
    rects = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    assert [float(r.get("fill-opacity")) for r in rects if r.get("fill-opacity")] == [0.25, 0.75, 1, 0]
    assert "25" in texts(svg)
    assert HOSTILE in texts(svg)


def test_bars_are_as_high_as_their_values():
    svg = bar_chart([1.0, 2.0, 0.0], ["0", "1", "2"], title="Load", y_label="share", mark=1.0)
    rects = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"))
    heights = [float(rect.get("height")) for rect in rects]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[2] == 0


def test_every_point_and_cross_is_within_the_frame():
    draw = np.random.default_rng(0)
    svg = scatter(draw.normal(size=(30, 2)) * (9, 1), draw.normal(size=(4, 2)), np.zeros(2), title="t")
    circles = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 31
    assert all(0 < float(c.get("cx")) < 230 and 21 < float(c.get("cy")) < 252 for c in circles)


def test_an_interval_right_of_nought_is_drawn_right_of_it():
    svg = interval_chart([("ours", 2.0, 1.0, 3.0)], title="t", x_label="x")
    lines = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}line"))
    (nought,) = (float(line.get("x1")) for line in lines if line.get("class") == "mark")
    (span,) = ((float(line.get("x1")), float(line.get("x2"))) for line in lines if line.get("class") == "curve")
    assert nought < span[0] < span[1]

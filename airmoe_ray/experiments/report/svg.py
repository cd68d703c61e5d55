"""Charts as SVG text: lines, bars, heat maps, scatter, intervals. Colours are CSS variables: a page may be dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

SERIES = 6  # colours that page.css has, --c1 … --c6, after Okabe and Ito; dashes tell them apart as well
_DASHES = ("", "7 3", "2 2", "9 3 2 3", "4 2", "1 3")


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None  # an interval around it
    high: Sequence[float] | None = None


def line_chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str, log: bool = False) -> str:
    """Curves with axes, ticks and a legend below."""
    width, height, left, right, top = 420, 250, 56, 12, 26
    beside = 2 if max(len(line.label) for line in lines) <= 22 else 1  # entries of the legend in a row
    legend_rows = -(-len(lines) // beside)
    total = height + 18 * legend_rows + 10
    drawn = [value for line in lines for value in (*line.y, *(line.low or ()), *(line.high or ()))]
    values = [math.log10(max(value, 1e-12)) if log else value for value in drawn]
    xs = [x for line in lines for x in line.x]
    y_ticks = _log_ticks(min(values), max(values)) if log else ticks(min(values), max(values))
    (x0, x1), (y0, y1) = _span(xs), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        level = math.log10(max(y, 1e-12)) if log else y
        return (
            left + (x - x0) / (x1 - x0) * (width - left - right),
            height - 38 - (level - y0) / (y1 - y0) * (height - 38 - top),
        )

    parts = [_text(left, 14, title, "title")]
    for tick in y_ticks:
        _, y = place(x0, 10**tick if log else tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{10**tick:g}" if log else f"{tick:g}", "tick end"))
    for tick in [t for t in ticks(x0, x1) if x0 <= t <= x1 and float(t).is_integer()]:
        x, _ = place(tick, 10**y0 if log else y0)
        parts.append(_text(x, height - 22, f"{tick:g}", "tick middle"))
    parts.append(_text((left + width - right) / 2, height - 6, x_label, "label middle"))
    parts.append(
        f'<text class="label middle" transform="translate(13 {(height - 12) / 2}) rotate(-90)">{escape(y_label)}</text>'
    )
    for number, line in enumerate(lines):
        colour, dash = f"var(--c{number % SERIES + 1})", _DASHES[number % len(_DASHES)]
        if line.low is not None and line.high is not None:
            rim = [place(*p) for p in zip(line.x, line.high, strict=True)]
            rim += [place(*p) for p in zip(line.x, line.low, strict=True)][::-1]
            parts.append(f'<polygon fill="{colour}" opacity="0.15" points="{_points(rim)}"/>')
        spots = [place(*p) for p in zip(line.x, line.y, strict=True)]
        parts.append(f'<polyline class="curve" stroke="{colour}" stroke-dasharray="{dash}" points="{_points(spots)}"/>')
        if len(spots) <= 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in spots]
        x, y = left + (number % beside) * 180, height + 14 + 18 * (number // beside)
        parts.append(
            f'<line class="curve" stroke="{colour}" stroke-dasharray="{dash}" '
            f'x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}"/>'
        )
        parts.append(_text(x + 32, y, line.label, "tick"))
    return _svg(width, total, title, parts)


def bar_chart(values: Sequence[float], labels: Sequence[str], *, title: str, y_label: str, mark: float) -> str:
    """Bars with a line at `mark`, which is what would be even."""
    width, height, left, top = 420, 230, 50, 26
    high = max(*values, mark) * 1.1
    step = (width - left - 10) / len(values)

    def level(value: float) -> float:
        return height - 40 - value / high * (height - 40 - top)

    parts = [_text(left, 14, title, "title")]
    for tick in [t for t in ticks(0, high) if 0 <= t <= high]:
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{level(tick):.1f}" y2="{level(tick):.1f}"/>'
        )
        parts.append(_text(left - 6, level(tick) + 4, f"{tick:g}", "tick end"))
    for number, (value, label) in enumerate(zip(values, labels, strict=True)):
        x = left + number * step
        parts.append(
            f'<rect fill="var(--c1)" x="{x + step * 0.15:.1f}" y="{level(value):.1f}" width="{step * 0.7:.1f}" '
            f'height="{level(0) - level(value):.1f}"><title>{escape(label)}: {value:.2f}</title></rect>'
        )
        if len(values) <= 24 or number % 4 == 0:
            parts.append(_text(x + step / 2, height - 24, label, "tick middle"))
    parts.append(f'<line class="mark" x1="{left}" x2="{width - 10}" y1="{level(mark):.1f}" y2="{level(mark):.1f}"/>')
    parts.append(_text((left + width) / 2, height - 7, "client", "label middle"))
    parts.append(
        f'<text class="label middle" transform="translate(13 {(height - 14) / 2}) rotate(-90)">{escape(y_label)}</text>'
    )
    return _svg(width, height, title, parts)


def heat_map(
    shares: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str,
) -> str:
    """Shares in [0, 1] as per cents; a cell's ink grows with its share."""
    margin = min(190, 26 + 7 * max(len(name) for name in rows))
    upright = max(len(name) for name in columns) <= 3
    head = 44 if upright else 40 + min(120, 6 * max(len(name) for name in columns))
    cell_w, cell_h = max(26, min(46, 620 // len(columns))), 24
    width, height = margin + cell_w * len(columns) + 12, head + cell_h * len(rows) + 26
    parts = [_text(4, 14, title, "title")]
    for c, name in enumerate(columns):
        x = margin + (c + 0.5) * cell_w
        turn = f"translate({x:.1f} {head - 6})" + ("" if upright else " rotate(-55)")
        parts.append(f'<text class="tick {"middle" if upright else ""}" transform="{turn}">{escape(name)}</text>')
    for r, (name, row) in enumerate(zip(rows, shares, strict=True)):
        y = head + r * cell_h
        parts.append(_text(margin - 6, y + 16, name, "tick end"))
        for c, share in enumerate(row):
            x = margin + c * cell_w
            parts.append(f'<rect class="empty" x="{x}" y="{y}" width="{cell_w - 1}" height="{cell_h - 1}"/>')
            parts.append(
                f'<rect fill="var(--c1)" fill-opacity="{share:.3f}" x="{x}" y="{y}" width="{cell_w - 1}" '
                f'height="{cell_h - 1}"><title>{escape(name)}, {escape(columns[c])}: {100 * share:.1f} %</title></rect>'
            )
            if share >= 0.005:
                ink = "strong" if share > 0.55 else "soft"
                parts.append(_text(x + cell_w / 2, y + 16, f"{100 * share:.0f}", f"cell {ink}"))
    parts.append(_text(4, height - 6, f"{x_label} (columns); {y_label} (rows)", "label"))
    return _svg(max(width, 260), height, title, parts)


def scatter(points: np.ndarray, crosses: np.ndarray, ring: np.ndarray, *, title: str) -> str:
    """Points in the plane, larger crosses, and one ring; axes of t-SNE have no units, so there are none."""
    side, pad = 230, 14
    both = np.concatenate([points, crosses, ring[None]])
    middle, span = (both.min(axis=0) + both.max(axis=0)) / 2, max(float(np.ptp(both, axis=0).max()), 1e-9)

    def place(spot: np.ndarray) -> tuple[float, float]:
        x, y = side / 2 + (spot - middle) / span * (side - 2 * pad)
        return float(x), float(y) + 21

    parts = [_text(4, 14, title, "title"), f'<rect class="frame" x="1" y="21" width="{side - 2}" height="{side - 2}"/>']
    parts += [f'<circle class="token" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in map(place, points)]
    arms = [f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10" for x, y in map(place, crosses)]
    parts += [f'<path class="halo" d="{"".join(arms)}"/>', f'<path class="cross" d="{"".join(arms)}"/>']
    x, y = place(ring)
    parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
    return _svg(side, side + 22, title, parts)


def interval_chart(rows: Sequence[tuple[str, float, float, float]], *, title: str, x_label: str) -> str:
    """Differences with their intervals, one below the other; the line at nought is no difference."""
    margin, width, line = min(260, 20 + 7 * max(len(name) for name, *_ in rows)), 640, 20
    height = 34 + line * len(rows) + 40
    marks = ticks(min(0.0, *(low for _, _, low, _ in rows)), max(0.0, *(high for *_, high in rows)))

    def across(value: float) -> float:
        return margin + (value - marks[0]) / (marks[-1] - marks[0]) * (width - margin - 14)

    bottom = 30 + line * len(rows)
    parts = [_text(4, 14, title, "title")]
    for mark in marks:
        kind = "mark" if mark == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{across(mark):.1f}" x2="{across(mark):.1f}" y1="26" y2="{bottom}"/>')
        parts.append(_text(across(mark), bottom + 15, f"{mark:g}", "tick middle"))
    for number, (name, value, low, high) in enumerate(rows):
        y = 38 + number * line
        parts.append(_text(margin - 8, y + 4, name, "tick end"))
        parts.append(
            f'<line class="curve" stroke="var(--c1)" x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y}" y2="{y}"/>'
        )
        told = f"<title>{escape(name)}: {value:.2f} [{low:.2f}, {high:.2f}]</title>"
        parts.append(f'<circle fill="var(--c1)" cx="{across(value):.1f}" cy="{y}" r="4">{told}</circle>')
    parts.append(_text((margin + width) / 2, height - 6, x_label, "label middle"))
    return _svg(width, height, title, parts)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover a range, about five."""
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 4
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(low), math.ceil(high)
    return [float(n) for n in range(first, max(last, first + 1) + 1)]


def _span(xs: Sequence[float]) -> tuple[float, float]:
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 1, high + 1)


def _points(spots: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'

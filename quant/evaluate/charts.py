"""Charts as inline SVG that follows the page's colours, light or dark (CSS variables), each readable without scripts.

Every mark carries a <title>, so that a pointer shows its value; every chart has a title and axes with units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from narrowgauge.quant.evaluate.report import Histogram

WIDTH, HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_LABEL_WIDTH, _LABEL_HEIGHT = 170, 14
SERIES_COLOURS = 8
"""The page defines so many: --s0 .. --s7. More series than that share one, the last."""


@dataclass(frozen=True)
class Axis:
    """One axis: its label, range and scale."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; values outside stand at the edge."""
        if self.log:
            low, high, at = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high, at = self.low, self.high, value
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Round values: powers of ten (with 2 and 5 in a short range), or steps of 1, 2 or 5."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            skip = 1 + (last - first) // 10
            values = [step * 10.0**power for power in range(first, last + 1, skip) for step in steps]
        else:
            step = _round_step((self.high - self.low) / 5)
            values = [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True)
class Point:
    """A mark at (x, y) with the text that it shows under a pointer; `label` stands beside it on the page."""

    x: float
    y: float
    title: str
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind, in the order of x; `line` joins them."""

    name: str
    points: tuple[Point, ...]
    line: bool = True


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis around positive values."""
    low, high = min(values), max(values)
    return Axis(label, low / 1.3, max(high, low * 1.05) * 1.3, log=True)


def linear_axis(label: str, values: Sequence[float]) -> Axis:
    """A linear axis around values, with some room on both sides; from 0 where none is below it and 0 is near."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(label, 0.0 if 0 <= low < 0.5 * high else low - room, high + room)


def lines(title: str, series: Sequence[Series], *, x: Axis, y: Axis) -> str:
    """Series of points over two axes."""
    parts = []
    labelled: list[tuple[float, float, str]] = []
    for index, one in enumerate(series):
        colour = f"var(--s{min(index, SERIES_COLOURS - 1)})"
        placed = [(_x(x, point.x), _y(y, point.y), point) for point in one.points]
        if one.line and len(placed) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in placed)
            parts.append(f'<polyline class="line" style="stroke:{colour}" points="{path}"/>')
        parts += [_dot(a, b, point.title, colour=colour) for a, b, point in placed]
        labelled += [(a, b, point.label) for a, b, point in placed if point.label]
    return _frame(title, [*parts, *_labels(labelled)], x=x, y=y)


def bars(title: str, histogram: Histogram, *, label: str, marks: Sequence[tuple[str, float]] = ()) -> str:
    """A histogram over a logarithmic axis, with named upright lines. The open bins stand at both ends, one bin wide."""
    edges = histogram.edges
    factor = edges[1] / edges[0]
    bounds = [edges[0] / factor, *edges, edges[-1] * factor]
    used = [index for index, count in enumerate(histogram.counts) if count]
    first, last = (used[0], used[-1]) if used else (0, len(histogram.counts) - 1)
    total = sum(histogram.counts) or 1
    x = Axis(label, bounds[first], bounds[last + 1], log=True)
    y = Axis("share of tokens", 0.0, 1.08 * max(histogram.counts) / total or 1.0)
    parts = []
    for index in range(first, last + 1):
        left, right, top = _x(x, bounds[index]), _x(x, bounds[index + 1]), _y(y, histogram.counts[index] / total)
        says = f"{histogram.counts[index]} tokens ({histogram.counts[index] / total:.2%}) {_span(edges, index)}"
        parts.append(
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.5):.1f}" '
            f'height="{max(HEIGHT - _BOTTOM - top, 0):.1f}"><title>{escape(says)}</title></rect>'
        )
    for row, (name, value) in enumerate(marks):
        at = _x(x, value)
        side = 'text-anchor="end" dx="-4"' if at > WIDTH * 0.75 else 'dx="4"'
        parts.append(f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text class="label" x="{at:.1f}" y="{_TOP + 12 + 14 * row}" {side}>{escape(f"{name} {value:.3g}")}</text>'
        )
    return _frame(title, parts, x=x, y=y)


def _span(edges: Sequence[float], index: int) -> str:
    if index == 0:
        return f"below {edges[0]:.3g}"
    return f"from {edges[-1]:.3g}" if index == len(edges) else f"from {edges[index - 1]:.3g} to {edges[index]:.3g}"


def _frame(title: str, parts: Sequence[str], *, x: Axis, y: Axis) -> str:
    grid = []
    for tick in y.ticks():
        at = _y(y, tick)
        grid.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        grid.append(f'<text text-anchor="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{_short(tick)}</text>')
    floor = HEIGHT - _BOTTOM
    for tick in x.ticks():
        at = _x(x, tick)
        grid.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 4}"/>')
        grid.append(f'<text text-anchor="middle" x="{at:.1f}" y="{floor + 17}">{_short(tick)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
            *grid,
            f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>',
            *parts,
            f'<text class="name" text-anchor="middle" x="{middle:.0f}" y="{HEIGHT - 8}">{escape(x.label)}</text>',
            f'<text class="name" text-anchor="middle" transform="translate(14 {(_TOP + floor) / 2:.0f}) rotate(-90)">'
            f"{escape(y.label)}</text>",
            "</svg>",
        ]
    )


def _dot(a: float, b: float, title: str, *, colour: str) -> str:
    return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" style="fill:{colour}"><title>{escape(title)}</title></circle>'


def _labels(points: Sequence[tuple[float, float, str]]) -> list[str]:
    """Texts beside points (x, y, text), from the lowest up; one that would cover another moves above it."""
    taken: list[tuple[float, float]] = []
    parts = []
    for a, b, text in sorted(points, key=lambda point: -point[1]):
        at = b - 6
        while any(abs(a - other_a) < _LABEL_WIDTH and abs(at - other_b) < _LABEL_HEIGHT for other_a, other_b in taken):
            at -= 1
        taken.append((a, at))
        side = 'text-anchor="end" dx="-7"' if a > WIDTH * 0.7 else 'dx="7"'
        parts.append(f'<text class="label" x="{a:.1f}" y="{at:.1f}" {side}>{escape(text)}</text>')
    return parts


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.4g}"


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))

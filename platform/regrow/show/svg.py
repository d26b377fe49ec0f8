"""The report's plots as inline SVG text: lines, points, spans and a stacked bar. Pure; styled by report.css."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

WIDTH, HEIGHT = 480, 240  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 40  # margins of a plot
INSIDE = f'width="{WIDTH - LEFT - RIGHT + 4}" height="{HEIGHT - BOTTOM}"'
MAX_POINTS = 200  # of a line; more are joined, their range shown as a band

Item = TypeVar("Item")
Ticks = Callable[[float, float], list[tuple[float, str]]]


@dataclass(frozen=True)
class Point:
    """One place of a line, with its tooltip. `low` and `high` differ from `y` where neighbours were joined."""

    x: float
    y: float
    title: str
    low: float = math.nan
    high: float = math.nan

    @property
    def range(self) -> tuple[float, float]:
        return (self.y, self.y) if math.isnan(self.low) else (self.low, self.high)


@dataclass(frozen=True)
class Span:
    """A value that held from `begin` to `end`."""

    begin: float
    end: float
    y: float
    title: str


@dataclass(frozen=True)
class Frame:
    """A plot's mapping from data to its own units."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def join(
    items: Sequence[Item],
    x: Callable[[Item], float],
    y: Callable[[Item], float],
    title: Callable[[Item, Item, float], str],
    most: int = MAX_POINTS,
) -> list[Point]:
    """Make a line's points, joining neighbours so that at most `most` remain; `title` of (first, last, mean)."""
    size = max(1, math.ceil(len(items) / most))
    points = []
    for begin in range(0, len(items), size):
        part = items[begin : begin + size]
        ys = [y(item) for item in part]
        mean = math.fsum(ys) / len(ys)
        middle = (x(part[0]) + x(part[-1])) / 2 if part[1:] else x(part[0])
        points.append(Point(middle, mean, title(part[0], part[-1], mean), min(ys), max(ys)))
    return points


def line_plot(
    name: str,
    lines: Sequence[Sequence[Point]],
    *,
    dots: Sequence[Point] = (),
    marks: Sequence[tuple[float, str]] = (),
    x_label: str = "",
    x_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    steep_share: float = 0.0,
    x_ticks: Ticks | None = None,
) -> str:
    """Lines with the range of what was joined as a band, dots, and dashed upright marks; empty without a point.

    The first `steep_share` of a line does not set the upright scale, and may leave the plot at its top.
    """
    xs = [point.x for points in [*lines, dots] for point in points]
    ys = [y for line in lines for point in line[int(steep_share * len(line)) :] for y in point.range]
    ys += [dot.y for dot in dots]
    if not xs:
        return ""
    frame = Frame(*widen(*(x_range or (min(xs), max(xs)))), *widen(0.0 if from_zero else min(ys), max(ys), 0.05))
    body = [axes(frame, x_label, (x_ticks or number_ticks)(frame.x_low, frame.x_high))]
    body += [_mark(frame, x, text) for x, text in marks if frame.x_low <= x <= frame.x_high]
    body.append(f'<svg x="{LEFT}" y="0" {INSIDE} viewBox="{LEFT} 0 {WIDTH - LEFT - RIGHT + 4} {HEIGHT - BOTTOM}">')
    for line in lines:
        if any(point.range[0] < point.range[1] for point in line):
            outline = [(p.x, p.range[1]) for p in line] + [(p.x, p.range[0]) for p in reversed(line)]
            body.append(f'<polygon class="area" points="{_corners(frame, outline)}"/>')
        if line:
            body.append(stroke(frame, line))
    body.append("</svg>")
    for line in lines:
        body += _strips(frame, line)
    body += [circle(frame, dot, "dot") for dot in dots]
    return drawing(name, body)


def span_plot(
    name: str,
    spans: Sequence[Span],
    *,
    marks: Sequence[tuple[float, str]] = (),
    x_label: str = "",
    x_range: tuple[float, float],
    x_ticks: Ticks,
) -> str:
    """Whole numbers that held for a while, as filled steps from zero; empty without a span."""
    if not spans:
        return ""
    frame = Frame(*widen(*x_range), 0.0, 1.1 * max(span.y for span in spans))
    body = [axes(frame, x_label, x_ticks(frame.x_low, frame.x_high), whole=True)]
    body += [_mark(frame, x, text) for x, text in marks if frame.x_low <= x <= frame.x_high]
    for span in spans:
        corners = _corners(frame, [(span.begin, 0.0), (span.begin, span.y), (span.end, span.y), (span.end, 0.0)])
        body.append(f'<polyline class="line" points="{corners}"/>')
        body.append(f'<polygon class="area" points="{corners}"><title>{escape(span.title)}</title></polygon>')
    return drawing(name, body)


def stacked_bar(name: str, parts: Sequence[tuple[float, str, str]]) -> str:
    """One bar of (share, CSS colour, tooltip); the shares add up to 1."""
    body, at = [], 0.0
    for share, colour, title in parts:
        body.append(
            f'<rect x="{at * 1000:.2f}" y="0" width="{max(0.6, share * 1000 - 1.5):.2f}" height="36" '
            f'style="fill:{escape(colour)}"><title>{escape(title)}</title></rect>'
        )
        at += share
    return (
        f'<svg class="bar" viewBox="0 0 1000 36" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{"".join(body)}</svg>'
    )


def number_ticks(
    low: float, high: float, about: int = 6, whole: bool = False, si_from: float = 10_000.0
) -> list[tuple[float, str]]:
    """Round numbers in [low, high] with their labels.

    >>> number_ticks(0, 40, 4)
    [(0.0, '0'), (10.0, '10'), (20.0, '20'), (30.0, '30'), (40.0, '40')]
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(value, si(value) if max(abs(low), abs(high)) >= si_from else f"{value:,.{digits}f}") for value in values]


def time_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round times in [low, high], both in seconds, in the unit that suits the range."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    unit, seconds = next(((u, s) for u, s in units if high - low >= 3 * s), ("s", 1.0))
    return [(v * seconds, f"{label} {unit}") for v, label in number_ticks(low / seconds, high / seconds, 5)]


def si(value: float) -> str:
    """Three significant digits with k, M, G, T: `1.5k`, `614k`."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def drawing(name: str, body: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">{"".join(body)}</svg>'
    )


def anchor(x: float) -> str:
    """Of a label below the axis: the first must not run into the other axis' labels, nor the last out of the plot."""
    return "end" if x > WIDTH - RIGHT - 12 else "start" if x < LEFT + 12 else "middle"


def stroke(frame: Frame, points: Sequence[Point]) -> str:
    if len(points) == 1:  # a line of one point would not show
        return circle(frame, points[0], "single")
    return f'<polyline class="line" points="{_corners(frame, [(p.x, p.y) for p in points])}"/>'


def axes(frame: Frame, x_label: str, x_ticks: Sequence[tuple[float, str]], whole: bool = False) -> str:
    parts = []
    for value, label in number_ticks(frame.y_low, frame.y_high, 5, whole, si_from=1000.0):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for value, label in x_ticks:
        x = frame.x(value)
        parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="{anchor(x)}">{escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts)


def _mark(frame: Frame, x: float, text: str) -> str:
    at = f'x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    return f'<line class="mark" {at}><title>{escape(text)}</title></line>'


def circle(frame: Frame, point: Point, kind: str) -> str:
    at = f'cx="{frame.x(point.x):.1f}" cy="{frame.y(point.y):.1f}" r="4"'
    return f'<circle class="{kind}" {at}><title>{escape(point.title)}</title></circle>'


def _strips(frame: Frame, line: Sequence[Point]) -> list[str]:
    """Invisible upright strips that carry a line's tooltips."""
    xs = [frame.x(point.x) for point in line]
    edges = [xs[0] - 3, *((a + b) / 2 for a, b in itertools.pairwise(xs)), xs[-1] + 3] if xs else []
    return [
        f'<rect class="strip" x="{a:.1f}" y="{TOP}" width="{max(0.1, b - a):.1f}" height="{HEIGHT - TOP - BOTTOM}">'
        f"<title>{escape(point.title)}</title></rect>"
        for (a, b), point in zip(itertools.pairwise(edges), line, strict=True)
    ]


def _corners(frame: Frame, pairs: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in pairs)


def widen(low: float, high: float, share: float = 0.0) -> tuple[float, float]:
    """A range that is not empty, with a margin where it does not start at zero."""
    if high <= low:
        return (low - 1.0, high + 1.0) if low else (0.0, 1.0)
    margin = (high - low) * share
    return (low - margin if low else low), high + margin

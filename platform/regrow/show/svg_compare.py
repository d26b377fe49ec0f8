"""Plots of several runs: lines over each other, ranks and states below each other. Pure; styled by report.css."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from regrow.show.svg import (
    BOTTOM,
    HEIGHT,
    INSIDE,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Point,
    Span,
    Ticks,
    anchor,
    axes,
    circle,
    drawing,
    stroke,
    widen,
)

STRIPS = 100  # tooltips of a plot
HEAD, HIGH, STATE, GAP = 18, 40, 8, 12  # of a run's strip: its name, its ranks, its states, and room below


@dataclass(frozen=True)
class Line:
    """One of several to be compared: its name, its class in report.css, its points, and dots beside it."""

    name: str
    kind: str
    points: Sequence[Point]
    dots: Sequence[Point] = ()


@dataclass(frozen=True)
class Strip:
    """One of several runs over time: a whole number that held for a while, and states below it as CSS colours."""

    name: str
    kind: str
    spans: Sequence[Span]
    bands: Sequence[tuple[float, float, str, str]]  # from, to, CSS colour, tooltip


def compare_plot(
    name: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_ticks: Ticks,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    x_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    steep_share: float = 0.0,
) -> str:
    """Lines of several runs, each in a style of its own, with one tooltip for all of them; empty without a point.

    The first `steep_share` of each run does not set the upright scale, and may leave the plot at its top.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    xs = [point.x for point in points] + [dot.x for line in lines for dot in line.dots]
    ys = [p.y for line in lines for p in line.points[int(steep_share * len(line.points)) :]]
    ys += [dot.y for line in lines for dot in line.dots]
    frame = Frame(*widen(*(x_range or (min(xs), max(xs)))), *widen(0.0 if from_zero else min(ys), max(ys), 0.05))
    body = [axes(frame, x_label, x_ticks(frame.x_low, frame.x_high))]
    body.append(f'<svg x="{LEFT}" y="0" {INSIDE} viewBox="{LEFT} 0 {WIDTH - LEFT - RIGHT + 4} {HEIGHT - BOTTOM}">')
    for line in lines:
        if line.points:
            body.append(f'<g class="{escape(line.kind)}">{stroke(frame, line.points)}</g>')
    body.append("</svg>")
    body += _shared_strips(frame, lines, show_x, show_y)
    body += [
        f'<g class="{escape(line.kind)}">{"".join(circle(frame, dot, "dot") for dot in line.dots)}</g>'
        for line in lines
        if line.dots
    ]
    return drawing(name, body)


def strip_plot(
    name: str, strips: Sequence[Strip], *, x_label: str, x_range: tuple[float, float], x_ticks: Ticks
) -> str:
    """Runs below each other over the same time: how many ranks each had, on one scale, and what state it was in."""
    most = max((span.y for strip in strips for span in strip.spans), default=0)
    if not strips or most <= 0:
        return ""
    bottom = HEAD // 4 + len(strips) * (HEAD + HIGH + STATE + GAP)
    low, width = x_range[0], max(x_range[1] - x_range[0], 1e-9)

    def x(value: float) -> float:
        return LEFT + (value - low) / width * (WIDTH - LEFT - RIGHT)

    body = []
    for number, strip in enumerate(strips):
        begin = HEAD // 4 + number * (HEAD + HIGH + STATE + GAP)
        base = begin + HEAD + HIGH
        body.append(f'<text class="name" x="{LEFT}" y="{begin + 12}">{escape(strip.name)}</text>')
        for value in (0, most):
            y = base - value / most * HIGH
            body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
        body.append(f'<g class="{escape(strip.kind)}">')
        for span in strip.spans:
            left, right, y = x(span.begin), max(x(span.end), x(span.begin) + 0.5), base - span.y / most * HIGH
            corners = f"{left:.1f},{base} {left:.1f},{y:.1f} {right:.1f},{y:.1f} {right:.1f},{base}"
            body.append(f'<polyline class="line solid" points="{corners}"/>')
            body.append(f'<polygon class="area" points="{corners}"><title>{escape(span.title)}</title></polygon>')
        body.append("</g>")
        body += [
            f'<rect x="{x(a):.2f}" y="{base + 3}" width="{max(0.3, x(b) - x(a)):.2f}" height="{STATE}" '
            f'style="fill:{escape(colour)}"><title>{escape(title)}</title></rect>'
            for a, b, colour, title in strip.bands
        ]
    body += [
        f'<text x="{x(value):.1f}" y="{bottom + 13}" text-anchor="{anchor(x(value))}">{escape(label)}</text>'
        for value, label in x_ticks(*x_range)
    ]
    body.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 32}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return drawing(name, body, bottom + 36)


def _shared_strips(
    frame: Frame, lines: Sequence[Line], show_x: Callable[[float], str], show_y: Callable[[float], str]
) -> list[str]:
    """Invisible upright strips, each with the nearest value of every line that has one there."""
    width = (frame.x_high - frame.x_low) / STRIPS
    sorted_lines = [(line.name, sorted(line.points, key=lambda point: point.x)) for line in lines]
    parts = []
    for number in range(STRIPS):
        begin = frame.x_low + number * width
        middle, said = begin + width / 2, []
        for name, points in sorted_lines:
            if not points or not points[0].x - width <= middle <= points[-1].x + width:
                continue
            after = bisect_left(points, middle, key=lambda point: point.x)
            nearest = min(points[max(0, after - 1) : after + 1], key=lambda point: abs(point.x - middle))
            said.append(f"{name}: {show_y(nearest.y)}")
        if said:
            left, right = frame.x(begin), frame.x(begin + width)
            title = escape("\n".join([show_x(middle), *said]))
            parts.append(
                f'<rect class="strip" x="{left:.1f}" y="{TOP}" width="{right - left:.2f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"><title>{title}</title></rect>'
            )
    return parts

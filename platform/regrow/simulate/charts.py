"""The page's two drawings: spares, and the tornado. Pure; SVG in the page's colours."""

from collections.abc import Mapping, Sequence
from html import escape

from regrow.show.timeline import number_ticks
from regrow.simulate.inputs import Origin
from regrow.simulate.study import Swing

WIDTH, LEFT, RIGHT = 1040, 60, 20
COLOURS = {Origin.measured: "restore", Origin.published: "productive", Origin.assumed: "init"}
MOST_SWINGS = 18


def draw_spares(curve: Sequence[Mapping[str, float]], goal: float) -> str:
    """`effective` and `paid` over how many nodes wait."""
    height, top, bottom = 220, 14, 40
    least = min(goal, *(each["paid"] for each in curve), *(each["effective"] for each in curve))
    most, last = max(each["effective"] for each in curve), max(1.0, max(each["spares"] for each in curve))
    low, high = 100 * least - 0.5, min(100.0, 100 * max(most, goal) + 0.5)

    def x(count: float) -> float:
        return LEFT + count / last * (WIDTH - LEFT - RIGHT - 60)

    def y(share: float) -> float:
        return top + (high - 100 * share) / (high - low) * (height - top - bottom)

    parts = [_rule(LEFT, WIDTH - RIGHT, y(v / 100), f"{label}%") for v, label in number_ticks(low, high, 4)]
    parts += [
        f'<text x="{x(v):.1f}" y="{height - 22}" text-anchor="middle">{label}</text>'
        for v, label in number_ticks(0, last)
    ]
    parts.append(f'<text x="{LEFT}" y="{height - 4}">nodes that wait</text>')
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" stroke="var(--bad)" '
        f'stroke-dasharray="4 4"/><text x="{WIDTH - RIGHT}" y="{y(goal) - 4:.1f}" text-anchor="end">goal</text>'
    )
    for key, colour in (("paid", "other"), ("effective", "productive")):
        points = " ".join(f"{x(each['spares']):.1f},{y(each[key]):.1f}" for each in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="var(--{colour})" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(each["spares"]):.1f}" cy="{y(each[key]):.1f}" r="3" fill="var(--{colour})"><title>'
            f"{each['spares']:.0f} spares: {key} {each[key]:.2%}</title></circle>"
            for each in curve
        ]
        parts.append(f'<text class="label" x="{x(last) + 8:.1f}" y="{y(curve[-1][key]) + 4:.1f}">{key}</text>')
    return _svg(height, "Useful share by number of spare nodes", parts)


def draw_tornado(swings: Sequence[Swing], middle: float) -> str:
    """How far each input moves `effective`, the widest first, in the colour of where it is from."""
    shown = swings[:MOST_SWINGS]
    left, row = 330, 22
    low = 100 * min([middle, *(min(each.at_low, each.at_high) for each in shown)])
    high = 100 * max([middle, *(each.best for each in shown)])
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin
    height = row * len(shown) + 44

    def x(share: float) -> float:
        return left + (100 * share - low) / (high - low) * (WIDTH - left - RIGHT)

    parts = []
    for value, label in number_ticks(low, high):
        at = x(value / 100)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{height - 30}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 14}" text-anchor="middle">{label}%</text>')
    for number, each in enumerate(shown):
        y, ends = 8 + row * number, sorted((x(each.at_low), x(each.at_high)))
        what = f"{each.name}: {short(each.low)} to {short(each.high)}"
        said = f"{what}; effective {each.at_low:.2%} to {each.at_high:.2%}; {each.figure.origin}"
        parts.append(
            f'<g><title>{escape(said)}</title><text class="label" x="{left - 10}" y="{y + 13}" text-anchor="end">'
            f'{escape(what)}</text><rect x="{ends[0]:.1f}" y="{y + 2}" width="{max(1.5, ends[1] - ends[0]):.1f}" '
            f'height="{row - 7}" rx="2" fill="var(--{COLOURS[each.figure.origin]})"/></g>'
        )
    at = x(middle)
    parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 30}" stroke="var(--ink)"/>')
    return _svg(height, "How far each input moves the useful share", parts)


def short(value: float) -> str:
    """Of an input, short.

    >>> short(14400.0), short(0.0037891), short(1e-5)
    ('14,400', '0.003789', '1e-05')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _rule(left: float, right: float, y: float, label: str) -> str:
    return (
        f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>'
        f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">{"".join(parts)}</svg>'

"""A run as one picture over wall time: faults, states, world size, loss and throughput. Pure; self-contained SVG."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from regrow.record.ledger import STATES, Ledger, columns
from regrow.record.log import Row
from regrow.show.svg import join, number_ticks, si, time_ticks

WIDTH, LEFT, RIGHT = 1080, 64, 20
TITLE, LANE, LANES, BAND, GAP = 52, 17, 4, 14, 30
CHARACTER = 6.3  # width of one in a label, about
PANELS = (("ranks", 84), ("loss", 132), ("tokens/s", 104))  # and their heights
AXIS, LEGEND = 34, 34
COLUMNS = 2 * (WIDTH - LEFT - RIGHT)  # of the band of states
MOST_LABELS = 40  # faults of which there is room to say what they were
Scale = Callable[[float], float]  # from a unix time to its place
STYLE = """
svg.timeline { --paper: #ffffff; --ink: #1b1b19; --soft: #62615c; --rule: #ebeae6; --blue: #2a78d6; --red: #c0362c;
  --green: #1d8a4a; --productive: #8fbcf0; --init: #eda100; --restore: #1baf7a; --snapshot: #6a55c9; --data: #e87ba4;
  --recompute: #eb6834; --down: #d03b3b; --validation: #2e8b2e; --other: #c9c8c2; font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg.timeline { --paper: #1d1d1b; --ink: #f0efea; --soft: #a9a8a1;
  --rule: #2e2e2b; --blue: #5598e7; --red: #f07a70; --green: #4fbf7f; --productive: #2f5f97; --init: #c98500;
  --restore: #199e70; --snapshot: #9085e9; --data: #d55181; --recompute: #d95926; --down: #e66767;
  --validation: #3f9a3f; --other: #55544f; } }
.timeline .paper { fill: var(--paper); } .timeline text { fill: var(--soft); }
.timeline .title { fill: var(--ink); font-size: 17px; font-weight: 600; }
.timeline .label { fill: var(--ink); font-size: 11.5px; }
.timeline .rule { stroke: var(--rule); } .timeline .fault { stroke: var(--red); stroke-width: 1.2; }
.timeline .head { fill: var(--red); } .timeline .away { fill: var(--red); opacity: .13; }
.timeline .grows .fault { stroke: var(--green); } .timeline .grows .head { fill: var(--green); }
.timeline .curve { fill: none; stroke: var(--blue); stroke-width: 1.8; stroke-linejoin: round; }
.timeline .fill { fill: var(--blue); opacity: .22; } .timeline .spread { fill: var(--blue); opacity: .16; }
"""


@dataclass(frozen=True)
class Mark:
    """A fault: when it came, what it was, when the first step of the group ended that it brought about."""

    time: float
    text: str
    back: float | None = None
    number: int = 0
    grows: bool = False  # a node came: nothing stood still for it


@dataclass(frozen=True)
class _Panel:
    """A plot's place, and the values at its bottom and its top."""

    top: float
    height: float
    low: float
    high: float

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.top + self.height * (1 - min(1.0, max(0.0, share)))


def draw_timeline(
    ledger: Ledger, rows: Sequence[Row], events: Sequence[Row], marks: Sequence[Mark], *, title: str
) -> str:
    """The picture as SVG text, readable on light and dark. `rows` are those that count."""
    seconds = max(ledger.end - ledger.begin, 1e-3)
    labels = _lanes(marks, ledger, seconds)
    num_lanes = 1 + max((lane for lane in labels if lane is not None), default=-1)
    band_top = TITLE + num_lanes * LANE + 12

    tops = list(itertools.accumulate([height + GAP for _, height in PANELS], initial=band_top + BAND + GAP))
    bottom = tops[-1] - GAP
    ranks, loss, speed = (
        _Panel(top, height, *limits)
        for top, (_, height), limits in zip(tops, PANELS, _limits(rows, ledger), strict=False)
    )

    def x(time: float) -> float:
        return LEFT + (time - ledger.begin) / seconds * (WIDTH - LEFT - RIGHT)

    body = [f'<rect class="paper" width="{WIDTH}" height="{bottom + AXIS + LEGEND}"/>']
    body += [
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        f'<text x="{LEFT}" y="42">{escape(_summary(ledger, rows, marks))}</text>',
    ]
    for mark in marks:
        if mark.back is not None and not mark.grows:
            width = max(1.0, x(mark.back) - x(mark.time))
            body.append(
                f'<rect class="away" x="{x(mark.time):.1f}" y="{band_top}" width="{width:.1f}" '
                f'height="{bottom - band_top:.1f}"/>'
            )
    body += [_rules(panel, name) for panel, (name, _) in zip((ranks, loss, speed), PANELS, strict=True)]
    body += [_band(begin, end, state, x, band_top) for begin, end, state in columns(ledger, COLUMNS)]
    body += _ranks(ledger, ranks, x)
    for panel, key, form in ((loss, "loss", ".4f"), (speed, "tokens_per_s", ",.0f")):
        body += _curves([row for row in rows if _finite(row.get(key))], key, form, panel, x)
    body += [_fault(mark, lane, x(mark.time), band_top, bottom) for mark, lane in zip(marks, labels, strict=True)]
    body.append(_times(seconds, bottom))
    body.append(_legend(ledger, bottom + AXIS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {WIDTH} {bottom + AXIS + LEGEND:.0f}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>{"".join(body)}</svg>\n'
    )


def _limits(rows: Sequence[Row], ledger: Ledger) -> list[tuple[float, float]]:
    """The lowest and the highest value of each panel."""
    most = max([attempt.world_size or 0 for attempt in ledger.attempts], default=0)
    losses = [row["loss"] for row in rows if _finite(row.get("loss"))] or [0.0, 1.0]
    speeds = sorted(row["tokens_per_s"] for row in rows if _finite(row.get("tokens_per_s"))) or [1.0]
    low, high = min(losses), max(losses)
    margin = 0.06 * (high - low) or 0.5
    usual = speeds[int(0.99 * (len(speeds) - 1))]  # a first short step may seem far too fast
    return [(0.0, max(1, most) * 1.15), (low - margin, high + margin), (0.0, max(usual * 1.15, 1.0))]


def _lanes(marks: Sequence[Mark], ledger: Ledger, seconds: float) -> list[int | None]:
    """The line of each label, so that none covers another; None where there is no room."""
    scale, ends, lanes = (WIDTH - LEFT - RIGHT) / seconds, [-math.inf] * LANES, []
    for mark in marks:
        at, width = LEFT + (mark.time - ledger.begin) * scale, CHARACTER * len(_label(mark)) + 14
        begin = min(at, WIDTH - width)
        lane = next((each for each in range(LANES) if ends[each] <= begin), None)
        lane = None if len(marks) > MOST_LABELS else lane
        if lane is not None:
            ends[lane] = begin + width
        lanes.append(lane)
    return lanes


def _label(mark: Mark) -> str:
    after = "" if mark.back is None else f"{mark.back - mark.time:.1f} s"
    return mark.text + (f" · {'in after ' if mark.grows else ''}{after}" if after else "")


def _fault(mark: Mark, lane: int | None, x: float, top: float, bottom: float) -> str:
    head = top - 9
    width = CHARACTER * len(_label(mark)) + 14
    begin = min(x, WIDTH - width)
    label, line_top = "", head
    if lane is not None:
        y = TITLE + lane * LANE + 12
        label = f'<text class="label" x="{begin + 5:.1f}" y="{y}">{escape(_label(mark))}</text>'
        line_top = y - 9
    back = "" if mark.back is None else f", {mark.back - mark.time:.2f} s to the first step of the next group"
    said, kind = f"fault {mark.number}: {mark.text}{back}", " grows" if mark.grows else ""
    return (
        f'<g class="event{kind}"><title>{escape(said)}</title>'
        f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{line_top:.1f}" y2="{bottom:.1f}"/>'
        f'<path class="head" d="M{x - 4:.1f} {head:.1f}h8l-4 7z"/>{label}</g>'
    )


def _band(begin: float, end: float, state: str, x: Scale, top: float) -> str:
    width = max(0.4, x(end) - x(begin))
    return (
        f'<rect x="{x(begin):.2f}" y="{top}" width="{width:.2f}" height="{BAND}" style="fill:var(--{state})">'
        f"<title>{state}, {end - begin:.2f} s</title></rect>"
    )


def _ranks(ledger: Ledger, panel: _Panel, x: Scale) -> list[str]:
    """How many ranks there were, while the group gave signs of life."""
    parts = []
    for attempt in ledger.attempts:
        if attempt.ready is None or not attempt.world_size:
            continue
        begin, end = x(attempt.ready), x(max(attempt.last_life, attempt.ready))
        top, base = panel.y(attempt.world_size), panel.y(0)
        outline = f"{begin:.1f},{base:.1f} {begin:.1f},{top:.1f} {end:.1f},{top:.1f} {end:.1f},{base:.1f}"
        parts.append(
            f'<polygon class="fill" points="{outline}"><title>{attempt.world_size} ranks</title></polygon>'
            f'<polyline class="curve" points="{outline}"/>'
        )
        if end - begin > 14:
            parts.append(f'<text class="label" x="{begin + 5:.1f}" y="{top + 15:.1f}">{attempt.world_size}</text>')
    return parts


def _curves(rows: Sequence[Row], key: str, form: str, panel: _Panel, x: Scale) -> list[str]:
    """A line for each generation, with the range of what was joined where there are many rows."""
    parts = []
    for _, group in itertools.groupby(rows, key=lambda row: row["generation"]):
        points = join(list(group), lambda row: row["time"], lambda row: row[key], _title(key, form))
        if any(point.range[0] < point.range[1] for point in points):
            outline = [(p.x, p.range[1]) for p in points] + [(p.x, p.range[0]) for p in reversed(points)]
            parts.append(f'<polygon class="spread" points="{_corners(outline, panel, x)}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="head" cx="{x(points[0].x):.1f}" cy="{panel.y(points[0].y):.1f}" r="1.6"/>')
        else:
            parts.append(f'<polyline class="curve" points="{_corners([(p.x, p.y) for p in points], panel, x)}"/>')
    return parts


def _title(key: str, form: str) -> Callable[[Row, Row, float], str]:
    return lambda first, last, mean: f"step {first['step']}: {key} {mean:{form}}"


def _rules(panel: _Panel, name: str) -> str:
    parts = [f'<text x="{LEFT}" y="{panel.top - 6:.1f}" class="label">{name}</text>']
    whole = name == "ranks"
    for value, label in number_ticks(panel.low, panel.high, 4 if whole else 3, whole, si_from=1000.0):
        y = panel.y(value)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _times(seconds: float, bottom: float) -> str:
    parts = []
    for value, label in time_ticks(0.0, seconds):
        x = LEFT + value / seconds * (WIDTH - LEFT - RIGHT)
        anchor = "end" if x > WIDTH - RIGHT - 20 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="{anchor}">{escape(label)}</text>')
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 5:.1f}"/>')
    return "".join(parts)


def _legend(ledger: Ledger, top: float) -> str:
    parts, at = [], float(LEFT)
    wall_s = max(ledger.end - ledger.begin, 1e-9)
    for state in STATES:
        share = ledger.time_s[state] / wall_s
        painted = any(each == state for _, _, each in ledger.bands)
        if share < 0.0005 or not painted:
            continue
        text = f"{state} {share:.1%}"
        parts.append(
            f'<rect x="{at:.0f}" y="{top + 4:.0f}" width="10" height="10" rx="2" style="fill:var(--{state})"/>'
        )
        parts.append(f'<text x="{at + 15:.0f}" y="{top + 13:.0f}">{text}</text>')
        at += 30 + CHARACTER * len(text)
    return "".join(parts)


def _summary(ledger: Ledger, rows: Sequence[Row], marks: Sequence[Mark]) -> str:
    wall_s = max(ledger.end - ledger.begin, 1e-9)
    sizes = [attempt.world_size for attempt in ledger.attempts if attempt.world_size]
    steps = f"{rows[-1]['step']:,} steps, {si(rows[-1]['tokens_seen'])} tokens" if rows else "no steps"
    between = f"{min(sizes)} to {max(sizes)} ranks" if sizes else "no ranks"
    stopped = sum(1 for mark in marks if mark.back is not None and not mark.grows)
    faults = sum(1 for mark in marks if not mark.grows)
    return (
        f"{steps}, {between}, goodput {ledger.time_s['productive'] / wall_s:.1%}; "
        f"training stood still after {stopped} of {faults} faults"
    )


def _corners(pairs: Iterable[tuple[float, float]], panel: _Panel, x: Scale) -> str:
    return " ".join(f"{x(time):.1f},{panel.y(value):.1f}" for time, value in pairs)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

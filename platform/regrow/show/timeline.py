"""A run as one picture over wall time: interruptions, states, ranks, loss, throughput. Pure; self-contained SVG."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from regrow.record.events import Cause, Row, cause_words
from regrow.record.history import History
from regrow.record.ledger import STATES, Ledger, columns
from regrow.record.log import is_number
from regrow.show.units import counted, percent, ranks, si

WIDTH, LEFT, RIGHT = 1080, 64, 20
TITLE, LANE, LANES, BAND, GAP = 52, 17, 4, 14, 30
CHARACTER = 6.3  # width of one in a label, about
PANELS = (("ranks", 84), ("loss", 150), ("tokens/s", 104))  # and their heights
AXIS, LEGEND = 50, 34
COLUMNS = 2 * (WIDTH - LEFT - RIGHT)  # of the band of states
MOST_LABELS = 40  # interruptions of which there is room to say what they were
MAX_POINTS = 400  # of a curve; more rows are joined, their range shown
STRIPS = 200  # tooltips over the curves
STEEP_SHARE = 0.05  # of a long curve's beginning, which may leave its panel at the top
Scale = Callable[[float], float]  # from a unix time to its place
STYLE = """
svg.timeline { --paper: #ffffff; --ink: #1b1b19; --soft: #62615c; --rule: #ebeae6; --blue: #2a78d6; --red: #c0362c;
  --green: #1d8a4a; --dot: #d4502a; --hover: rgba(0, 0, 0, .06); --productive: #8fbcf0; --init: #eda100;
  --restore: #1baf7a; --snapshot: #6a55c9; --data: #e87ba4; --recompute: #eb6834; --down: #d03b3b;
  --validation: #2e8b2e; --other: #c9c8c2; font: 12px system-ui, sans-serif; }
@media screen and (prefers-color-scheme: dark) { svg.timeline { --paper: #1d1d1b; --ink: #f0efea; --soft: #a9a8a1;
  --rule: #2e2e2b; --blue: #5598e7; --red: #f07a70; --green: #4fbf7f; --dot: #f08355;
  --hover: rgba(255, 255, 255, .09); --productive: #2f5f97; --init: #c98500; --restore: #199e70;
  --snapshot: #9085e9; --data: #d55181; --recompute: #d95926; --down: #e66767; --validation: #3f9a3f;
  --other: #55544f; } }
.timeline .paper { fill: var(--paper); } .timeline text { fill: var(--soft); }
.timeline .title { fill: var(--ink); font-size: 17px; font-weight: 600; }
.timeline .label { fill: var(--ink); font-size: 11.5px; }
.timeline .rule { stroke: var(--rule); } .timeline .fault { stroke: var(--red); stroke-width: 1.2; }
.timeline .head { fill: var(--red); } .timeline .away { fill: var(--red); opacity: .13; }
.timeline .grows .fault { stroke: var(--green); } .timeline .grows .head { fill: var(--green); }
.timeline .curve { fill: none; stroke: var(--blue); stroke-width: 1.8; stroke-linejoin: round; }
.timeline .dot { fill: var(--dot); stroke: var(--paper); } .timeline .strip { fill: transparent; }
.timeline .strip:hover { fill: var(--hover); } .timeline .spread { fill: var(--blue); opacity: .16; }
.timeline .fill { fill: var(--blue); opacity: .22; }
"""


@dataclass(frozen=True)
class Mark:
    """An interruption: when it came, what it was, when the first step of the group ended that it brought about.

    Of a group whose steps were all taken back, when it was ready.
    """

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
        """Where a value is drawn; far outside, where it is too far to matter."""
        share = (value - self.low) / (self.high - self.low)
        return self.top + self.height * (1 - min(3.0, max(-2.0, share)))

    def clipped(self, parts: Iterable[str]) -> str:
        """What is drawn, as far as it lies inside."""
        top, height = self.top - 3, self.height + 6
        return (
            f'<svg y="{top:.1f}" width="{WIDTH}" height="{height:.1f}" viewBox="0 {top:.1f} {WIDTH} {height:.1f}">'
            f"{''.join(parts)}</svg>"
        )


@dataclass(frozen=True)
class _Point:
    """Some neighbouring rows of a curve, joined."""

    x: float
    y: float
    low: float
    high: float


def marks_of(history: History) -> list[Mark]:
    """A run's own interruptions."""
    rows = list(history.rows)
    ends = [row["time"] for row in rows]
    marks = []
    for number, each in enumerate(history.interruptions):
        back = ready = None if each.back_s is None else each.time + each.back_s
        for at in range(bisect_right(ends, ready) if ready is not None else len(rows), len(rows)):
            if rows[at]["generation"] >= (each.generation or 0):  # else a late row of the group before
                back = ends[at] if rows[at]["generation"] == each.generation else ready  # all its own were taken back
                break
        marks.append(Mark(each.time, cause_words(each.cause), back, number, grows=each.cause == Cause.grow))
    return marks


def draw_timeline(
    ledger: Ledger,
    rows: Sequence[Row],
    marks: Sequence[Mark],
    *,
    title: str,
    noun: str = "interruption",
    middle: tuple[str, str] = ("loss", "loss"),
) -> str:
    """The picture as SVG text, readable on light and dark. `rows` are those that count; `noun` is what a mark is.

    `middle` is the panel in the middle: its name, and the key of rows that it draws.
    """
    name, key = middle
    named = (PANELS[0], (name, PANELS[1][1]), PANELS[2])
    seconds = max(ledger.end - ledger.begin, 1e-3)
    labels = _lanes(marks, ledger, seconds)
    num_lanes = 1 + max((lane for lane in labels if lane is not None), default=-1)
    band_top = TITLE + num_lanes * LANE + 12
    tops = list(itertools.accumulate([height + GAP for _, height in PANELS], initial=band_top + BAND + GAP))
    bottom = tops[-1] - GAP
    panels = [
        _Panel(top, height, *limits)
        for top, (_, height), limits in zip(tops, PANELS, _limits(rows, ledger, key), strict=False)
    ]

    def x(time: float) -> float:
        return LEFT + (time - ledger.begin) / seconds * (WIDTH - LEFT - RIGHT)

    body = [
        f'<rect class="paper" width="{WIDTH}" height="{bottom + AXIS + LEGEND}"/>',
        f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
        f'<text x="{LEFT}" y="42">{escape(_summary(ledger, rows, marks, noun))}</text>',
    ]
    body += [_standstill(mark, x, band_top, bottom) for mark in marks if mark.back is not None and not mark.grows]
    body += [_rules(panel, name) for panel, (name, _) in zip(panels, named, strict=True)]
    body += [_band(begin, end, state, x, band_top) for begin, end, state in columns(ledger, COLUMNS)]
    body += _ranks(ledger, panels[0], x)
    body.append(panels[1].clipped(_curves(rows, key, panels[1], x)))
    body.append(panels[2].clipped(_curves(rows, "tokens_per_s", panels[2], x)))
    body += _strips(rows, panels[1].top, bottom, x)
    body += _dots(rows, panels[1], x)
    body += [_mark(mark, lane, x(mark.time), band_top, bottom, noun) for mark, lane in zip(marks, labels, strict=True)]
    body.append(_times(ledger, rows, bottom))
    body.append(_legend(ledger, rows, bottom + AXIS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {WIDTH} {bottom + AXIS + LEGEND:.0f}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>{"".join(body)}</svg>\n'
    )


def _limits(rows: Sequence[Row], ledger: Ledger, key: str) -> list[tuple[float, float]]:
    """The lowest and the highest value of each panel."""
    most = max([attempt.world_size or 0 for attempt in ledger.attempts], default=0)
    losses = [row[key] for row in rows if is_number(row.get(key))]
    losses = losses[int(STEEP_SHARE * len(losses)) if len(losses) > MAX_POINTS else 0 :] or [0.0, 1.0]
    losses += [row["validation_loss"] for row in rows if is_number(row.get("validation_loss"))]
    speeds = sorted(row["tokens_per_s"] for row in rows if is_number(row.get("tokens_per_s"))) or [1.0]
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


def _standstill(mark: Mark, x: Scale, top: float, bottom: float) -> str:
    width = max(1.0, x(mark.back or mark.time) - x(mark.time))
    return f'<rect class="away" x="{x(mark.time):.1f}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}"/>'


def _mark(mark: Mark, lane: int | None, x: float, top: float, bottom: float, noun: str) -> str:
    head = top - 9
    width = CHARACTER * len(_label(mark)) + 14
    begin = min(x, WIDTH - width)
    label, line_top = "", head
    if lane is not None:
        y = TITLE + lane * LANE + 12
        label = f'<text class="label" x="{begin + 5:.1f}" y="{y}">{escape(_label(mark))}</text>'
        line_top = y - 9
    back = "" if mark.back is None else f", {mark.back - mark.time:.2f} s to the first step of the next group"
    said, kind = f"{noun} {mark.number}: {mark.text}{back}", " grows" if mark.grows else ""
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
        if end - begin > max(14.0, CHARACTER * len(str(attempt.world_size)) + 8):
            parts.append(f'<text class="label" x="{begin + 5:.1f}" y="{top + 15:.1f}">{attempt.world_size}</text>')
    return parts


def _curves(rows: Sequence[Row], key: str, panel: _Panel, x: Scale) -> list[str]:
    """A line for each generation, with the range of what was joined where there are many rows."""
    rows, parts = [row for row in rows if is_number(row.get(key))], []
    for _, group in itertools.groupby(rows, key=lambda row: row["generation"]):
        points = _joined(list(group), key, math.ceil(len(rows) / MAX_POINTS))
        if any(point.low < point.high for point in points):
            outline = [(p.x, p.high) for p in points] + [(p.x, p.low) for p in reversed(points)]
            parts.append(f'<polygon class="spread" points="{_corners(outline, panel, x)}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="head" cx="{x(points[0].x):.1f}" cy="{panel.y(points[0].y):.1f}" r="1.6"/>')
        else:
            parts.append(f'<polyline class="curve" points="{_corners([(p.x, p.y) for p in points], panel, x)}"/>')
    return parts


def _joined(rows: Sequence[Row], key: str, size: int) -> list[_Point]:
    points = []
    for part in (rows[begin : begin + size] for begin in range(0, len(rows), size)):
        ys = [row[key] for row in part]
        middle = (part[0]["time"] + part[-1]["time"]) / 2 if part[1:] else part[0]["time"]
        points.append(_Point(middle, math.fsum(ys) / len(ys), min(ys), max(ys)))
    return points


def _dots(rows: Sequence[Row], panel: _Panel, x: Scale) -> list[str]:
    """The validation losses, the newest ones where there are very many."""
    scored = [row for row in rows if is_number(row.get("validation_loss"))][-MAX_POINTS:]
    return [
        f'<circle class="dot" cx="{x(row["time"]):.1f}" cy="{panel.y(row["validation_loss"]):.1f}" r="3.5"><title>'
        f"step {row['step']:,}: validation loss {row['validation_loss']:.4f}</title></circle>"
        for row in scored
    ]


def _strips(rows: Sequence[Row], top: float, bottom: float, x: Scale) -> list[str]:
    """Invisible upright strips over the curves that carry their tooltips."""
    size = math.ceil(len(rows) / STRIPS)
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size or 1)]
    edges = [
        *(x(part[0]["time"] - (part[0].get("step_s") or 0.0)) for part in parts),
        *(x(r["time"]) for r in rows[-1:]),
    ]
    return [
        f'<rect class="strip" x="{left:.1f}" y="{top:.1f}" width="{max(0.1, right - left):.1f}" '
        f'height="{bottom - top:.1f}"><title>{escape(_steps_title(part))}</title></rect>'
        for part, (left, right) in zip(parts, itertools.pairwise(edges), strict=True)
    ]


def _steps_title(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    steps = f"step {first['step']:,}" if not rows[1:] else f"steps {first['step']:,} to {last['step']:,}"
    parts = [f"{si(last['tokens_seen'])} tokens", ranks(last["world_size"]), f"generation {last['generation']}"]
    for key, form in (
        ("loss", "loss {:.4f}".format),
        ("tokens_per_s", "{:,.0f} tokens/s".format),
        ("mfu", lambda mean: f"MFU {percent(mean)}"),
    ):
        values = [row[key] for row in rows if is_number(row.get(key))]
        parts += [form(math.fsum(values) / len(values))] if values else []
    return f"{steps}: {', '.join(parts)}"


def _rules(panel: _Panel, name: str) -> str:
    parts = [f'<text x="{LEFT}" y="{panel.top - 6:.1f}" class="label">{name}</text>']
    whole, si_from = name == "ranks", 1000.0 if panel.low < 0.5 * panel.high else math.inf  # or labels would be alike
    for value, label in number_ticks(panel.low, panel.high, 4 if whole else 3, whole, si_from=si_from):
        y = panel.y(value)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    return "".join(parts)


def _times(ledger: Ledger, rows: Sequence[Row], bottom: float) -> str:
    """The time since the submission, and which step it was then."""
    seconds, parts, ends = max(ledger.end - ledger.begin, 1e-3), [], [row["time"] for row in rows]
    for value, label in time_ticks(0.0, seconds):
        x = LEFT + value / seconds * (WIDTH - LEFT - RIGHT)
        anchor = "end" if x > WIDTH - RIGHT - 60 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="{anchor}">{escape(label)}</text>')
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 5:.1f}"/>')
        done = bisect_right(ends, ledger.begin + value)
        if done:
            row = rows[done - 1]
            step = f"step {row['step']:,}, {si(row['tokens_seen'])} tok"
            parts.append(f'<text x="{x:.1f}" y="{bottom + 34:.1f}" text-anchor="{anchor}">{step}</text>')
    return "".join(parts)


def _legend(ledger: Ledger, rows: Sequence[Row], top: float) -> str:
    parts, at = [], float(LEFT)
    wall_s = max(ledger.end - ledger.begin, 1e-9)
    shown = [(state, f"{state} {percent(ledger.time_s[state] / wall_s)}") for state in STATES]
    painted = {state for _, _, state in ledger.bands}
    shown = [each for each in shown if each[0] in painted and ledger.time_s[each[0]] / wall_s >= 0.0005]
    if any(is_number(row.get("validation_loss")) for row in rows):
        shown.append(("dot", "validation loss"))
    for colour, text in shown:
        parts.append(
            f'<rect x="{at:.0f}" y="{top + 4:.0f}" width="10" height="10" rx="{5 if colour == "dot" else 2}" '
            f'style="fill:var(--{colour})"/><text x="{at + 15:.0f}" y="{top + 13:.0f}">{text}</text>'
        )
        at += 30 + CHARACTER * len(text)
    return "".join(parts)


def _summary(ledger: Ledger, rows: Sequence[Row], marks: Sequence[Mark], noun: str) -> str:
    wall_s = max(ledger.end - ledger.begin, 1e-9)
    sizes = [attempt.world_size for attempt in ledger.attempts if attempt.world_size]
    steps = f"{rows[-1]['step']:,} steps, {si(rows[-1]['tokens_seen'])} tokens" if rows else "no steps"
    between = f"{min(sizes)} to {max(sizes)} ranks" if sizes else "no ranks"
    stood = sum(mark.back is not None for mark in marks if not mark.grows)
    of = sum(not mark.grows for mark in marks)
    return (
        f"{steps}, {between}, goodput {percent(ledger.time_s['productive'] / wall_s)}; "
        f"training stood still after {stood} of {counted(of, noun)}"
    )


def _corners(pairs: Iterable[tuple[float, float]], panel: _Panel, x: Scale) -> str:
    return " ".join(f"{x(time):.1f},{panel.y(value):.1f}" for time, value in pairs)


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
    return [(v * seconds, f"{label} {unit}") for v, label in number_ticks(low / seconds, high / seconds)]

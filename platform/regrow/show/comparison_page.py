"""Several runs on one self-contained page, in the report's style. Pure."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from statistics import median
from typing import Any

from regrow.record.events import cause_words
from regrow.record.ledger import STATES, Ledger, columns
from regrow.record.log import Row
from regrow.show.comparison import RunData, agreement, differing_settings, median_speed, validation_loss
from regrow.show.report_parts import (
    STATE_HELP,
    data_mix,
    is_number,
    or_dash,
    page,
    section,
    status_words,
    swatch,
    table,
)
from regrow.show.svg import Point, Span, join, number_ticks, si, stacked_bar, time_ticks
from regrow.show.svg_compare import Line, Strip, compare_plot, strip_plot
from regrow.show.units import duration, percent, ranks, when

COLUMNS = 400  # of the band of states
POINTS = 80  # of a run's line: more would hide the others
MOST_RECOVERIES = 60  # shown one by one
SINCE = "time since submission"


def render_comparison(runs: Sequence[RunData], names: Sequence[str], now: float) -> str:
    """The whole page as HTML text."""
    sections = [
        _legend(runs, names, now),
        _summary(runs, names),
        _plots(runs, names),
        _time(runs, names),
        _lost(runs, names),
        _recoveries(runs, names),
        _agreement(runs, names),
        _mixes(runs, names),
        _settings(runs, names),
    ]
    head = f'<h1>{len(runs)} runs compared</h1><p class="soft">As of {when(now)}.</p>\n'
    return page("Runs compared", head + "\n".join(each for each in sections if each))


def _legend(runs: Sequence[RunData], names: Sequence[str], now: float) -> str:
    """Which line is which run, where it lies and how it stands."""
    key = '<svg class="key" viewBox="0 0 34 10"><line class="line" x1="1" x2="33" y1="5" y2="5"/></svg>'
    return "".join(
        f'<p class="runs"><span class="r{k}">{key}</span><b>{escape(name)}</b> <span class="soft">'
        f"{escape(status_words(run.ledger, run.metrics, now))} {escape(run.folder)}</span></p>"
        for k, (name, run) in enumerate(zip(names, runs, strict=True))
    )


def _summary(runs: Sequence[RunData], names: Sequence[str]) -> str:
    def loss(value: float) -> str:
        return f"{value:.4f}"

    rows = []
    for name, run in zip(names, runs, strict=True):
        report, sizes = run.report, [row["world_size"] for row in run.metrics]
        between = f"{min(sizes):,}" if len(set(sizes)) == 1 else f"{min(sizes):,} to {max(sizes):,}" if sizes else "-"
        rows.append(
            [
                escape(name),
                f"{report['steps']:,}",
                or_dash(report["tokens"], si),
                or_dash(report["final_loss"], loss),
                or_dash(validation_loss(run), loss),
                or_dash(median_speed(run), lambda value: f"{value:,.0f}"),
                between,
                duration(report["wall_s"]),
                or_dash(report["goodput"], percent),
                or_dash(report["capacity_goodput"], percent),
                f"{sum(report['restarts'].values()):,}",
            ]
        )
    head = ["run", "steps", "tokens", "last loss", "validation", "tokens/s, median", "ranks", "wall time", "goodput"]
    return section("Summary", table([*head, "capacity goodput", "restarts"], rows, range(1, 11)))


def _plots(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Loss by tokens, throughput and tokens over time, world size and states over time."""
    longest = max(run.ledger.end - run.ledger.begin for run in runs)
    time_range = (0.0, max(longest, 1e-3))

    def lines(key: str, x: Callable[[RunData, Row], float], *, dots: bool = False) -> list[Line]:
        return [_line(run, name, k, key, x, dots) for k, (name, run) in enumerate(zip(names, runs, strict=True))]

    def since(run: RunData, row: Row) -> float:
        return float(row["time"] - run.ledger.begin)

    over_time = partial(
        compare_plot, x_label=SINCE, x_ticks=time_ticks, x_range=time_range, from_zero=True, show_x=duration
    )
    loss = lines("loss", lambda run, row: float(row["tokens_seen"]), dots=True)
    panels = [
        (
            "Loss by tokens",
            compare_plot(
                "Loss by tokens",
                loss,
                x_label="tokens (dots: validation)" if any(line.dots for line in loss) else "tokens",
                x_ticks=lambda low, high: number_ticks(low, high, whole=True),
                show_x=lambda tokens: f"{si(tokens)} tokens",
                show_y=lambda value: f"{value:.4f}",
                steep_share=0.05,
            ),
        ),
        (
            "Tokens over time",
            over_time(
                "Tokens over time",
                lines("tokens_seen", since),
                show_y=lambda value: f"{si(value)} tokens",
            ),
        ),
        (
            "Tokens per second over time",
            over_time(
                "Tokens per second over time",
                lines("tokens_per_s", since),
                show_y=lambda value: f"{value:,.0f} tokens/s",
            ),
        ),
        (
            "Ranks and states over time",
            strip_plot(
                "Ranks and states over time",
                [_strip(run, name, k) for k, (name, run) in enumerate(zip(names, runs, strict=True))],
                x_label=SINCE,
                x_ticks=time_ticks,
                x_range=time_range,
            ),
        ),
    ]
    nothing = '<p class="soft">No steps yet.</p>'
    return '<div class="plots">' + "\n".join(section(title, plot or nothing) for title, plot in panels) + "</div>"


def _line(run: RunData, name: str, k: int, key: str, x: Callable[[RunData, Row], float], dots: bool) -> Line:
    rows = [row for row in run.metrics if is_number(row.get(key))]
    line = join(rows, lambda row: x(run, row), lambda row: row[key], lambda *_: "", POINTS)
    scored = [row for row in run.metrics if dots and is_number(row.get("validation_loss"))]
    points = [
        Point(
            x(run, r), r["validation_loss"], f"{name}, step {r['step']:,}: validation loss {r['validation_loss']:.4f}"
        )
        for r in scored
    ]
    return Line(name, f"r{k}", line, points)


def _strip(run: RunData, name: str, k: int) -> Strip:
    begin = run.ledger.begin
    bands = [
        (a - begin, b - begin, f"var(--{state})", f"{state}, {duration(b - a)}")
        for a, b, state in (columns(run.ledger, COLUMNS) if run.ledger.end > begin else [])
    ]
    return Strip(name, f"r{k}", world_sizes(run.ledger), bands)


def world_sizes(ledger: Ledger) -> list[Span]:
    """How many ranks there were, from where a group was ready to its last sign of life."""
    return [
        Span(
            attempt.ready - ledger.begin,
            max(attempt.ready, attempt.last_life) - ledger.begin,
            attempt.world_size,
            f"{ranks(attempt.world_size)} for {duration(max(0.0, attempt.last_life - attempt.ready))}",
        )
        for attempt in ledger.attempts
        if attempt.ready is not None and attempt.world_size
    ]


def _time(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """A bar for each run, and the shares of every state."""
    shown = [state for state in STATES if any(run.report["time_s"][state] > 0 for run in runs)]
    timed = [run.report["wall_s"] > 0 for run in runs]
    if not shown or not any(timed):
        return ""
    bars, rows = "", []
    for name, run in zip(names, runs, strict=True):
        time_s, wall_s = run.report["time_s"], run.report["wall_s"]
        parts = [
            (time_s[s] / wall_s, f"var(--{s})", f"{s}: {duration(time_s[s])}, {percent(time_s[s] / wall_s)}")
            for s in shown
            if wall_s > 0 and time_s[s] > 0
        ]
        bars += f"<span>{escape(name)}</span>" + stacked_bar(f"Share of wall time by state: {name}", parts)
    for state in shown:
        shares = [
            f"{percent(run.report['time_s'][state] / run.report['wall_s'])}" if run.report["wall_s"] > 0 else "-"
            for run in runs
        ]
        rows.append([swatch(f"var(--{state})") + state, *shares, f'<span class="soft help">{STATE_HELP[state]}</span>'])
    head = ["state", *map(escape, names), ""]
    return section(
        "Where the time went", f'<div class="bars">{bars}</div>' + table(head, rows, range(1, 1 + len(runs)))
    )


def _lost(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """What starting and interruptions cost, a cause a row."""
    causes = sorted(
        {cause for run in runs for cause in run.report["lost_s"]},
        key=lambda cause: -sum(run.report["lost_s"].get(cause, 0.0) for run in runs),
    )
    if not causes:
        return ""
    rows = [[escape(cause_words(cause)), *(_lost_to(run.report, cause) for run in runs)] for cause in causes]
    note = '<p class="soft">Being down, starting, restoring and doing steps again, by what it was for.</p>'
    return section("Time lost by cause", note + table(["cause", *map(escape, names)], rows, range(1, 1 + len(runs))))


def _lost_to(report: Mapping[str, Any], cause: str) -> str:
    seconds, times = report["lost_s"].get(cause), report["restarts"].get(cause)
    if seconds is None:
        return "-"
    share = f", {percent(seconds / report['wall_s'])}" if report["wall_s"] > 0 else ""
    return f"{duration(seconds)}{share}" + (f" ({times:,}x)" if times else "")


def _recoveries(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """By cause, then one by one: the longest, where there are many."""
    parts = ("detect_s", "regroup_s", "reshard_s", "first_step_s")
    every = [
        (sum(entry[part] or 0.0 for part in parts), name, entry)
        for name, run in zip(names, runs, strict=True)
        for entry in run.report["recoveries"]
    ]
    if not every:
        return section("Recoveries", '<p class="soft">None: every first group is the only one of its run so far.</p>')
    groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for total, name, entry in every:
        groups.setdefault((name, str(entry["cause"])), []).append((total, entry["lost_steps"] or 0))
    by_cause = [
        [
            escape(name),
            escape(cause_words(cause)),
            f"{len(found):,}",
            duration(median(total for total, _ in found)),
            duration(max(total for total, _ in found)),
            f"{sum(lost for _, lost in found):,}",
        ]
        for (name, cause), found in groups.items()
    ]
    head = ["run", "cause", "number", "to the first step, median", "longest", "lost steps"]
    shown = sorted(every, key=lambda each: -each[0])[:MOST_RECOVERIES] if len(every) > MOST_RECOVERIES else every
    rows = [
        [
            escape(name),
            escape(cause_words(entry["cause"])),
            f"{escape(or_dash(entry['ranks_before'], str))} → {escape(or_dash(entry['ranks_after'], str))}",
            *(or_dash(entry[part], duration) for part in parts),
            or_dash(entry["lost_steps"], str),
            escape(or_dash(entry["source"], str)),
        ]
        for _, name, entry in shown
    ]
    longest = f'<p class="soft">The {len(shown)} longest of {len(every):,}.</p>' if len(shown) < len(every) else ""
    one_by_one = ["run", "cause", "ranks", "detect", "regroup", "reshard", "first step", "lost steps", "source"]
    return section(
        "Recoveries",
        table(head, by_cause, range(2, 6)) + f"<br>{longest}" + table(one_by_one, rows, range(3, 8)),
        "long",
    )


def _agreement(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Were the same batches trained on, and how far do the losses differ?"""
    rows = []
    for name, run in zip(names[1:], runs[1:], strict=True):
        found = agreement(runs[0], run)
        if not found.common_steps:
            continue
        largest = or_dash(found.largest_loss_difference, lambda value: f"{value:.2e}")
        rows.append(
            [
                escape(name),
                f"{found.common_steps:,}",
                f"{found.same_batches:,}",
                or_dash(found.first_other, lambda step: f"step {step:,}"),
                largest + (f" at step {found.at_step:,}" if found.at_step is not None else ""),
            ]
        )
    if not rows:
        return ""
    head = [
        "run",
        "steps of both",
        "with the same batch",
        "first other batch",
        "largest difference of loss, same batch",
    ]
    return section(f"Against {names[0]}", table(head, rows, range(1, 5)))


def _mixes(runs: Sequence[RunData], names: Sequence[str]) -> str:
    parts = []
    for name, run in zip(names, runs, strict=True):
        mix = data_mix(run.config, run.report["tokens"])
        if mix is not None:
            corpora, heads, shares, bar = mix
            rows = [[swatch(f"var(--r{k % 8})") + escape(corpus), *shares[k]] for k, corpus in enumerate(corpora)]
            head = ["corpus", *heads, "tokens so far", "share"]
            parts.append(f"<p><b>{escape(name)}</b></p>{bar}{table(head, rows, range(1, len(head)))}")
    return section("Data mix", "".join(parts)) if parts else ""


def _settings(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Settings that are not the same; what differs from the first run is marked."""
    differing = differing_settings(runs)
    if not differing:
        return section("Configuration", '<p class="soft">The same settings, commit and versions.</p>')
    rows = [
        [
            escape(key),
            *(f'<span class="differs">{escape(v)}</span>' if v != values[0] else escape(v) for v in values),
        ]
        for key, values in differing.items()
    ]
    note = '<p class="soft">Only what differs.</p>'
    return section("Configuration", note + table(["setting", *map(escape, names)], rows, kind="settings"), "long")

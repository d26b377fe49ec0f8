"""report.html: one self-contained page of a run, with plots drawn here as inline SVG. No script, nothing is fetched."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from regrow.errors import BatchError
from regrow.plan.topology import plan_topology
from regrow.record.ledger import SILENCE_S, STATES, Ledger
from regrow.record.log import Row
from regrow.record.narrate import startup_line
from regrow.show.report_parts import (
    STATE_HELP,
    cause_words,
    data_mix,
    flat,
    is_number,
    or_dash,
    page,
    section,
    status_words,
    swatch,
    table,
)
from regrow.show.svg import (
    MAX_POINTS,
    Point,
    Span,
    join,
    line_plot,
    number_ticks,
    si,
    span_plot,
    stacked_bar,
    time_ticks,
)
from regrow.show.units import duration, percent, ranks, size, when


def render_page(
    report: Mapping[str, Any],
    ledger: Ledger,
    metrics: Sequence[Row],
    events: Sequence[Row],
    config: Mapping[str, Any],
    now: float,
) -> str:
    """The whole page as HTML text. Pure."""
    name = str(config.get("run", {}).get("name", "run"))
    submitted = [event for event in events if event["event"] == "submitted"]
    sections = [
        _tiles(report),
        _plots(ledger, metrics),
        _goodput(report),
        _lost(report),
        _recoveries(report["recoveries"]),
        section("Checkpoints", f"<p>{_checkpoints(report, events)}</p>"),
        section("Geometry", _geometry(config, metrics, submitted[-1] if submitted else {})),
        _mix(config, report["tokens"]),
        _submissions(submitted, [a.generation for a in ledger.attempts if a.generation], metrics),
        section("Configuration", _config(config), "long") if config else "",
    ]
    head = f'<h1>{escape(name)}</h1><p class="soft">{escape(status_words(ledger, metrics, now))}</p>\n'
    return page(name, head + "\n".join(each for each in sections if each))


def _tiles(report: Mapping[str, Any]) -> str:
    tiles = [
        ("steps", f"{report['steps']:,}"),
        ("tokens", or_dash(report["tokens"], si)),
        ("last loss", or_dash(report["final_loss"], lambda value: f"{value:.4f}")),
        ("wall time", duration(report["wall_s"])),
        ("goodput", or_dash(report["goodput"], percent)),
        ("capacity goodput", or_dash(report["capacity_goodput"], percent)),
        ("restarts", str(sum(report["restarts"].values()))),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{v}</b><span>{k}</span></div>' for k, v in tiles)
        + "</div>"
    )


def _plots(ledger: Ledger, metrics: Sequence[Row]) -> str:
    """Loss by step and by tokens; throughput and world size over time."""
    changes = [attempt.generation for attempt in ledger.attempts[1:] if attempt.generation]
    tokens_at = {0: 0} | {row["step"]: row["tokens_seen"] for row in metrics}
    step_marks = [(change.get("start_step") or 0, _change_title(change)) for change in changes]
    token_marks = [(tokens_at[step], title) for step, title in step_marks if step in tokens_at]
    time_marks = [(change["time"] - ledger.begin, _change_title(change)) for change in changes]
    time_range = (0.0, ledger.end - ledger.begin)
    timed = [row for row in metrics if is_number(row.get("tokens_per_s"))]
    speed = [
        join(part, lambda row: row["time"] - ledger.begin, lambda row: row["tokens_per_s"], _speed_title)
        for part in _by_generation(timed)
    ]
    since = "time since submission"
    panels = [
        ("Loss by step", _loss_plot("step", "step", metrics, step_marks)),
        ("Loss by tokens", _loss_plot("tokens_seen", "tokens", metrics, token_marks)),
        (
            "Tokens per second over time",
            line_plot(
                "Tokens per second over time",
                speed,
                marks=time_marks,
                x_label=since,
                x_range=time_range,
                from_zero=True,
                x_ticks=time_ticks,
            ),
        ),
        (
            "World size over time",
            span_plot(
                "World size over time",
                _world_sizes(ledger),
                marks=time_marks,
                x_label=since,
                x_range=time_range,
                x_ticks=time_ticks,
            ),
        ),
    ]
    nothing = '<p class="soft">No steps yet.</p>'
    return '<div class="plots">' + "\n".join(section(title, plot or nothing) for title, plot in panels) + "</div>"


def _loss_plot(key: str, x_label: str, metrics: Sequence[Row], marks: Sequence[tuple[float, str]]) -> str:
    trained = [row for row in metrics if is_number(row.get("loss"))]
    scored = [row for row in metrics if is_number(row.get("validation_loss"))]
    plot = line_plot(
        f"Loss by {x_label}",
        [join(trained, lambda row: row[key], lambda row: row["loss"], _loss_title)],
        dots=[
            Point(r[key], r["validation_loss"], f"step {r['step']:,}: validation loss {r['validation_loss']:.4f}")
            for r in scored
        ],
        marks=marks,
        x_label=x_label,
        x_ticks=lambda low, high: number_ticks(low, high, whole=True),
        steep_share=0.05 if len(trained) > MAX_POINTS else 0.0,
    )
    legend = '<span><i class="swatch stroke"></i>training</span>'
    legend += '<span><i class="swatch dot"></i>validation</span>' if scored else ""
    return plot and f'{plot}<p class="legend">{legend}</p>'


def _world_sizes(ledger: Ledger) -> list[Span]:
    """How many ranks the group had, while it had any sign of life."""
    return [
        Span(
            attempt.ready - ledger.begin,
            max(attempt.ready, until) - ledger.begin,
            attempt.world_size,
            f"{ranks(attempt.world_size)} for {duration(max(0.0, until - attempt.ready))}",
        )
        for attempt, until in zip(ledger.attempts, _alive_until(ledger), strict=True)
        if attempt.ready is not None and attempt.world_size
    ]


def _alive_until(ledger: Ledger) -> list[float]:
    """When each attempt's group was last there; the running one is there until now."""
    lives = [attempt.last_life for attempt in ledger.attempts]
    last = ledger.attempts[-1] if ledger.attempts else None
    if last and not last.failure and not last.stopped and ledger.end - last.last_life <= SILENCE_S:
        lives[-1] = ledger.end
    return lives


def _goodput(report: Mapping[str, Any]) -> str:
    """The states as one bar and a table."""
    time_s, wall_s = report["time_s"], report["wall_s"]
    shown = [state for state in STATES if time_s[state] > 0]
    if wall_s <= 0 or not shown:
        return section("Where the time went", '<p class="soft">No time has passed yet.</p>')
    bar = stacked_bar(
        "Share of wall time by state",
        [
            (time_s[s] / wall_s, f"var(--{s})", f"{s}: {duration(time_s[s])}, {percent(time_s[s] / wall_s)}")
            for s in shown
        ],
    )
    rows = [
        [
            f"{swatch(f'var(--{state})')}{state}",
            duration(time_s[state]),
            percent(time_s[state] / wall_s),
            f'<span class="soft help">{STATE_HELP[state]}</span>',
        ]
        for state in shown
    ]
    return section("Where the time went", bar + table(["state", "time", "share", ""], rows, (1, 2)))


def _lost(report: Mapping[str, Any]) -> str:
    """What starting and each kind of interruption cost."""
    lost_s, wall_s = report["lost_s"], report["wall_s"]
    if not lost_s or wall_s <= 0:
        return ""
    steps: dict[str, int] = {}
    for entry in report["recoveries"]:
        steps[entry["cause"]] = steps.get(entry["cause"], 0) + (entry["lost_steps"] or 0)
    rows = [
        [
            escape(cause_words(cause)),
            or_dash(report["restarts"].get(cause), lambda count: f"{count:,}"),
            duration(seconds),
            percent(seconds / wall_s),
            or_dash(steps.get(cause), lambda count: f"{count:,}"),
        ]
        for cause, seconds in sorted(lost_s.items(), key=lambda item: -item[1])
    ]
    note = '<p class="soft">Being down, starting, restoring and doing steps again, by what it was for.</p>'
    return section(
        "Time lost by cause",
        note + table(["cause", "restarts", "time", "share", "steps done again"], rows, (1, 2, 3, 4)),
    )


def _recoveries(recoveries: Sequence[Mapping[str, Any]]) -> str:
    if not recoveries:
        return section("Recoveries", '<p class="soft">None: the first group is the only one so far.</p>')
    parts = ("detect_s", "regroup_s", "reshard_s", "first_step_s")
    rows = [
        [
            escape(cause_words(entry["cause"])),
            f"{escape(or_dash(entry['ranks_before'], str))} → {escape(or_dash(entry['ranks_after'], str))}",
            *(or_dash(entry[part], duration) for part in parts),
            or_dash(entry["lost_steps"], str),
            escape(or_dash(entry["source"], str)),
        ]
        for entry in recoveries
    ]
    head = ["cause", "ranks", "detect", "regroup", "reshard", "first step", "lost steps", "source"]
    return section("Recoveries", table(head, rows, range(2, 7)), "long" if len(rows) > 20 else "")


def _mix(config: Mapping[str, Any], tokens: int | None) -> str:
    mix = data_mix(config, tokens)
    if mix is None:
        return ""
    names, heads, shares, bar = mix
    rows = [[f"{swatch(f'var(--r{k % 8})')}{escape(name)}", *shares[k]] for k, name in enumerate(names)]
    note = '<p class="soft">Shares of the samples, from a number of tokens on, and what was trained on so far.</p>'
    head = ["corpus", *heads, "tokens so far", "share"]
    return section("Data mix", bar + note + table(head, rows, range(1, len(head))))


def _checkpoints(report: Mapping[str, Any], events: Sequence[Row]) -> str:
    committed = [event for event in events if event["event"] == "checkpoint"]
    if not committed:
        return "None committed yet."
    last, made = committed[-1], report["checkpoints"]
    large = f", {size(last['bytes'])}" if is_number(last.get("bytes")) else ""
    return (
        f"{made['committed']:,} committed; training waited {duration(made['stall_s'])} for them. "
        f"The last is of step {escape(str(last.get('step', '?')))}{large}, {when(last['time'])}."
    )


def _geometry(config: Mapping[str, Any], metrics: Sequence[Row], submitted: Mapping[str, Any]) -> str:
    """What the configuration comes to: the batch, and how each world size shares it."""
    lines = [str(line) for line in submitted.get("geometry") or []]
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    optim, data, cluster = (config.get(group) or {} for group in ("optim", "data", "cluster"))
    seqs, num_slices, seq_len = optim.get("global_batch_seqs"), optim.get("num_slices"), data.get("seq_len")
    if not (seqs and num_slices and seq_len):
        return text or '<p class="soft">Unknown: the run folder has no configuration.</p>'
    steps = (config.get("train") or {}).get("steps")
    whole = f" x {steps:,} steps = {si(seqs * seq_len * steps)} tokens" if steps else ""
    text = text or (
        f"<p>Global batch: {seqs:,} sequences x {seq_len:,} tokens = {seqs * seq_len:,} tokens a step{whole}, "
        f"in {num_slices:,} slices.</p>"
    )
    sizes = {row["world_size"] for row in metrics} | {cluster.get("min_workers"), cluster.get("max_workers")}
    rows, tp = [], (config.get("parallel") or {}).get("tp", 1)
    for world_size in sorted(each for each in sizes if each):
        try:
            plan = plan_topology(world_size, num_slices=num_slices, tp=tp).batch
        except BatchError:
            continue
        fewest, most = min(map(len, plan.ranges)), max(map(len, plan.ranges))
        each = str(most) if fewest == most else f"{fewest} or {most}"
        rows.append([f"{world_size:,}", each, str(seqs // num_slices), percent(plan.idle_share)])
    return text + table(["world size", "slices a rank", "sequences a slice", "idle"], rows, (1, 2, 3))


def _submissions(submitted: Sequence[Row], generations: Sequence[Row], metrics: Sequence[Row]) -> str:
    if not submitted:
        return ""
    last = {key: value for key, value in submitted[-1].items() if key not in ("event", "time", "geometry")}
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in flat(last))
    note = f"<p>{when(submitted[-1]['time'])}" + (f", the last of {len(submitted)}.</p>" if submitted[1:] else "</p>")
    first_step = {(row["generation"], row["step"]): row["step_s"] for row in metrics}
    for generation in reversed(generations):
        step_s = first_step.get((generation["generation"], (generation.get("start_step") or 0) + 1))
        if generation.get("startup_s") and step_s is not None:
            line = startup_line(generation["startup_s"], step_s)
            note += f"<p>Generation {generation['generation']}: {escape(line)} (seconds).</p>"
            break
    return section("Submission", f'{note}<div class="scroll"><table class="pairs">{rows}</table></div>')


def _config(config: Mapping[str, Any]) -> str:
    groups = "".join(
        f"<div><pre><b>{escape(str(group))}</b>\n{escape(_settings(values))}</pre></div>"
        for group, values in config.items()
    )
    return f'<div class="config">{groups}</div>'


def _settings(values: Any) -> str:
    if not isinstance(values, Mapping):
        return f"  {values}"
    return "\n".join(f"  {key}: {value}" for key, value in flat(values))


def _by_generation(rows: Iterable[Row]) -> list[list[Row]]:
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["generation"], []).append(row)
    return list(parts.values())


def _steps_title(first: Row, last: Row) -> str:
    same = first["step"] == last["step"]
    return f"step {first['step']:,}" if same else f"steps {first['step']:,} to {last['step']:,}"


def _loss_title(first: Row, last: Row, mean: float) -> str:
    return f"{_steps_title(first, last)}: loss {mean:.4f} ({si(last['tokens_seen'])} tokens)"


def _speed_title(first: Row, last: Row, mean: float) -> str:
    mfu = f", MFU {percent(last['mfu'])}" if is_number(last.get("mfu")) else ""
    return f"{_steps_title(first, last)}: {mean:,.0f} tokens/s on {ranks(last['world_size'])}{mfu}"


def _change_title(generation: Row) -> str:
    return (
        f"generation {generation.get('generation')}: {cause_words(generation.get('cause', 'unknown'))}, "
        f"{ranks(generation.get('world_size', 0))}, from step {generation.get('start_step')}"
    )

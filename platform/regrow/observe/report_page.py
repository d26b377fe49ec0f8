"""report.html: one self-contained page of a run, with plots drawn here as inline SVG. No script, nothing is fetched."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from regrow.errors import BatchError
from regrow.observe.narrate import CAUSES, startup_line
from regrow.observe.report import SILENCE_S, STATES, Ledger
from regrow.observe.run_log import Row
from regrow.observe.svg import (
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
from regrow.plan.batch import plan_batch

STATE_HELP = {
    "productive": "forward, backward and optimizer of steps that count",
    "init": "starting: from the submission, or from regrouping, to the first step",
    "restore": "loading the state to go on from",
    "snapshot": "training waited for a snapshot or a checkpoint",
    "data": "training waited for data",
    "recompute": "steps that a later group took back and did again",
    "down": "from the last sign of life of a group to the beginning of the next",
    "validation": "scoring the validation split",
    "other": "between steps, and not explained by any event",
}


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
        _plots(ledger, metrics),
        _goodput(report),
        _recoveries(report["recoveries"]),
        _section("Checkpoints", f"<p>{_checkpoints(report, events)}</p>"),
        _section("Geometry", _geometry(config, metrics, submitted[-1] if submitted else {})),
        _submissions(submitted, [a.generation for a in ledger.attempts if a.generation], metrics),
        _section("Configuration", _config(config), "long") if config else "",
    ]
    css = resources.files("regrow.observe").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · regrow</title><style>\n{css}</style></head><body><main>\n"
        f'<h1>{escape(name)}</h1><p class="soft">{escape(_status(ledger, metrics, now))}</p>\n'
        f"{_tiles(report)}\n" + "\n".join(section for section in sections if section) + "\n</main></body></html>\n"
    )


def _status(ledger: Ledger, metrics: Sequence[Row], now: float) -> str:
    begun = f"Submitted {_when(ledger.begin)}. "
    last = ledger.attempts[-1] if ledger.attempts else None
    if not ledger.attempts or ledger.end <= ledger.begin:
        return "Nothing logged yet."
    assert last is not None
    if last.stopped:
        reason, detail = str(last.stopped.get("reason", "stopped")).replace("_", " "), last.stopped.get("detail")
        at = f"at step {last.stopped.get('step', '?')}, {_when(last.stopped['time'])}"
        return f"{begun}{reason.capitalize()} {at}" + (f": {detail}" if detail else ".")
    if last.failure:
        cause = _cause(last.failure.get("cause", "unknown"))
        return f"{begun}Failed {_when(last.failure['time'])}, not yet back: {cause}."
    silent_s = now - last.last_life
    step = f"At step {metrics[-1]['step']}" if metrics else "No step yet"
    silence = f", silent for {duration(silent_s)}" if silent_s > SILENCE_S else ""
    return f"{begun}{step}{silence}, as of {_when(now)}."


def _tiles(report: Mapping[str, Any]) -> str:
    tiles = [
        ("steps", f"{report['steps']:,}"),
        ("tokens", _or_dash(report["tokens"], si)),
        ("last loss", _or_dash(report["final_loss"], lambda value: f"{value:.4f}")),
        ("wall time", duration(report["wall_s"])),
        ("goodput", _or_dash(report["goodput"], percent)),
        ("capacity goodput", _or_dash(report["capacity_goodput"], percent)),
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
    timed = [row for row in metrics if _is_number(row.get("tokens_per_s"))]
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
    return '<div class="plots">' + "\n".join(_section(title, plot or nothing) for title, plot in panels) + "</div>"


def _loss_plot(key: str, x_label: str, metrics: Sequence[Row], marks: Sequence[tuple[float, str]]) -> str:
    trained = [row for row in metrics if _is_number(row.get("loss"))]
    scored = [row for row in metrics if _is_number(row.get("validation_loss"))]
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
            f"{_ranks(attempt.world_size)} for {duration(max(0.0, until - attempt.ready))}",
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
        return _section("Where the time went", '<p class="soft">No time has passed yet.</p>')
    bar = stacked_bar(
        "Share of wall time by state",
        [
            (time_s[s] / wall_s, f"var(--{s})", f"{s}: {duration(time_s[s])}, {percent(time_s[s] / wall_s)}")
            for s in shown
        ],
    )
    rows = "".join(
        f'<tr><td><i class="swatch" style="background:var(--{state})"></i>{state}</td>'
        f'<td class="n">{duration(time_s[state])}</td><td class="n">{percent(time_s[state] / wall_s)}</td>'
        f'<td class="soft help">{STATE_HELP[state]}</td></tr>'
        for state in shown
    )
    return _section(
        "Where the time went",
        f'{bar}<div class="scroll"><table><tr><th>state</th><th class="n">time</th><th class="n">share</th>'
        f"<th></th></tr>{rows}</table></div>",
    )


def _recoveries(recoveries: Sequence[Mapping[str, Any]]) -> str:
    if not recoveries:
        return _section("Recoveries", '<p class="soft">None: the first group is the only one so far.</p>')
    parts = ("detect_s", "regroup_s", "reshard_s", "first_step_s")
    head = "".join(
        f'<th class="n">{text}</th>'
        for text in ("detect", "regroup", "reshard", "first step", "lost steps")  # as the row's parts below
    )
    rows = "".join(
        f"<tr><td>{escape(_cause(entry['cause']))}</td>"
        f"<td>{escape(_or_dash(entry['ranks_before'], str))} → {escape(_or_dash(entry['ranks_after'], str))}</td>"
        + "".join(f'<td class="n">{_or_dash(entry[part], duration)}</td>' for part in parts)
        + f'<td class="n">{_or_dash(entry["lost_steps"], str)}</td>'
        + f"<td>{escape(_or_dash(entry['source'], str))}</td></tr>"
        for entry in recoveries
    )
    return _section(
        "Recoveries",
        f'<div class="scroll"><table><tr><th>cause</th><th>ranks</th>{head}<th>source</th></tr>{rows}</table></div>',
    )


def _checkpoints(report: Mapping[str, Any], events: Sequence[Row]) -> str:
    committed = [event for event in events if event["event"] == "checkpoint"]
    if not committed:
        return "None committed yet."
    last, made = committed[-1], report["checkpoints"]
    size = f", {last['bytes'] / 1e6:,.1f} MB" if _is_number(last.get("bytes")) else ""
    return (
        f"{made['committed']:,} committed; training waited {duration(made['stall_s'])} for them. "
        f"The last is of step {escape(str(last.get('step', '?')))}{size}, {_when(last['time'])}."
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
    rows = ""
    for size in sorted(size for size in sizes if size):
        try:
            plan = plan_batch(num_slices=num_slices, world_size=size)
        except BatchError:
            continue
        fewest, most = min(map(len, plan.ranges)), max(map(len, plan.ranges))
        each = str(most) if fewest == most else f"{fewest} or {most}"
        rows += (
            f'<tr><td>{size:,}</td><td class="n">{each}</td><td class="n">{seqs // num_slices}</td>'
            f'<td class="n">{percent(plan.idle_share)}</td></tr>'
        )
    return (
        f'{text}<div class="scroll"><table><tr><th>world size</th><th class="n">slices a rank</th>'
        f'<th class="n">sequences a slice</th><th class="n">idle</th></tr>{rows}</table></div>'
    )


def _submissions(submitted: Sequence[Row], generations: Sequence[Row], metrics: Sequence[Row]) -> str:
    if not submitted:
        return ""
    last = {key: value for key, value in submitted[-1].items() if key not in ("event", "time", "geometry")}
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in _flat(last))
    note = f"<p>{_when(submitted[-1]['time'])}" + (f", the last of {len(submitted)}.</p>" if submitted[1:] else "</p>")
    first_step = {(row["generation"], row["step"]): row["step_s"] for row in metrics}
    for generation in reversed(generations):
        step_s = first_step.get((generation["generation"], (generation.get("start_step") or 0) + 1))
        if generation.get("startup_s") and step_s is not None:
            line = startup_line(generation["startup_s"], step_s)
            note += f"<p>Generation {generation['generation']}: {escape(line)} (seconds).</p>"
            break
    return _section("Submission", f'{note}<div class="scroll"><table class="pairs">{rows}</table></div>')


def _config(config: Mapping[str, Any]) -> str:
    groups = "".join(
        f"<div><pre><b>{escape(str(group))}</b>\n{escape(_settings(values))}</pre></div>"
        for group, values in config.items()
    )
    return f'<div class="config">{groups}</div>'


def _settings(values: Any) -> str:
    if not isinstance(values, Mapping):
        return f"  {values}"
    return "\n".join(f"  {key}: {value}" for key, value in _flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", _yaml(value)))
    return pairs


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>'


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
    mfu = f", MFU {percent(last['mfu'])}" if _is_number(last.get("mfu")) else ""
    return f"{_steps_title(first, last)}: {mean:,.0f} tokens/s on {_ranks(last['world_size'])}{mfu}"


def _cause(cause: Any) -> str:
    return CAUSES.get(str(cause), str(cause).replace("_", " "))


def _ranks(world_size: int) -> str:
    return f"{world_size:,} rank{'s' if world_size != 1 else ''}"


def _change_title(generation: Row) -> str:
    return (
        f"generation {generation.get('generation')}: {_cause(generation.get('cause', 'unknown'))}, "
        f"{_ranks(generation.get('world_size', 0))}, from step {generation.get('start_step')}"
    )


def percent(share: float) -> str:
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """Two units at most: `0.42 s`, `12.3 s`, `3 min 5 s`, `2 h 3 min`, `4 d 2 h`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError("a minute is the least here")


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

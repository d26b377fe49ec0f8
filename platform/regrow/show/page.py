"""report.html and drill.html: one self-contained page, the timeline and tables, from one template. Pure.

No script, nothing is fetched.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

import jinja2

from regrow.errors import BatchError, ConfigError
from regrow.plan.batch import plan_batch
from regrow.plan.mixture import UNIT, plan_mixture
from regrow.record.events import Generation, Spares, Submitted, cause_words, startup_line
from regrow.record.history import History
from regrow.record.ledger import SILENCE_S, STATES, Ledger, on_one_clock
from regrow.record.status import whole_checkpoints
from regrow.record.work import shapes_of
from regrow.show.timeline import draw_timeline, marks_of
from regrow.show.units import duration, or_dash, percent, si, size, when

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
WORK_HELP = {
    "useful": "the steps that count, each as long as it takes the undisturbed full-size job: effective",
    "shrunk": "longer, as fewer ranks had more slices each; below nothing where they were faster than that",
    "first_step": "longer, as it was a group's first",
    "slow": "longer for any other reason, as a slow rank; below nothing where steps were faster than the median",
}
VERDICTS = {True: ("holds", "good"), False: ("broken", "bad"), None: ("not judged", "soft")}
RECOVERY_PARTS = ("detect_s", "regroup_s", "reshard_s", "first_step_s")


@dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than its text."""

    text: str
    kind: str = ""  # its class in the template: text, soft, good, bad
    colour: str = ""  # of a square before it
    heat: float = 0.0  # of its background, up to 1
    details: Sequence[str] = ()  # below it


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, of these what there is, in this order."""

    title: str
    bar: Sequence[tuple[float, str, str]] = ()  # shares of a whole, their colours and tooltips
    lines: Sequence[str] = ()
    note: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str | Cell]] = ()
    numbers: Iterable[int] = ()  # columns of figures
    blocks: Sequence[tuple[str, str]] = ()  # settings: a name and lines
    chart: str = ""  # SVG, below the heading


@dataclass(frozen=True)
class Page:
    """All that the template takes."""

    title: str
    lead: str
    tiles: Sequence[tuple[str, str]]
    picture: str  # SVG
    sections: Sequence[Section]
    verdict: Cell | None = None

    def render(self) -> str:
        sections = [
            replace(each, rows=[[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in each.rows])
            for each in self.sections
        ]
        return _template().render(page=replace(self, sections=sections))


def run_page(
    report: Mapping[str, Any],
    history: History,
    ledger: Ledger,
    config: Mapping[str, Any],
    now: float,
    *,
    ranks: Sequence[Mapping[str, Any]] = (),
    node_snapshots: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page of a run as HTML text. `report` is the content of report.json, the rest of ranks.json."""
    name = str((config.get("run") or {}).get("name", "run"))
    sections = [
        _time(report),
        _work(report),
        _lost(report),
        _recoveries(report["recoveries"]),
        _ranks(ranks, history),
        _node_snapshots(node_snapshots),
        _checkpoints(report, history),
        _geometry(config, history),
        data_mix(config, report["tokens"]),
        _submission(history),
        Section("Configuration", blocks=[(str(group), _settings(values)) for group, values in config.items()]),
    ]
    tiles = [
        ("steps", f"{report['steps']:,}"),
        ("tokens", or_dash(report["tokens"], si)),
        ("last loss", or_dash(report["final_loss"], "{:.4f}".format)),
        ("wall time", duration(report["wall_s"])),
        ("goodput", or_dash(report["goodput"], percent)),
        ("effective", or_dash(report["effective"], percent)),
        ("paid", or_dash(report["paid"], percent)),
        ("capacity goodput", or_dash(report["capacity_goodput"], percent)),
        ("restarts", str(sum(report["restarts"].values()))),
        *([("spares", f"{history.num_spares:,}")] if history.of(Spares) else []),
    ]
    drawn = History.of_logs(*on_one_clock(list(history.rows), history.events))  # as the ledger was made
    picture = draw_timeline(ledger, list(drawn.rows), marks_of(drawn), title="Ranks, loss and throughput over time")
    return Page(
        title=name,
        lead=_standing(ledger, history, now),
        tiles=tiles,
        picture=picture,
        sections=[
            each for each in sections if each is not None and (each.rows or each.lines or each.note or each.blocks)
        ],
    ).render()


def drill_page(run: str, result: Mapping[str, Any], report: Mapping[str, Any], picture: str) -> str:
    """The page of a drill. `result` is the content of verdict.json, `report` of report.json."""
    faults = result["faults"]
    back = [fault["seconds"] for fault in faults if fault["seconds"] is not None and not fault["grows"]]
    lost = {fault["generation"]: fault["lost_steps"] for fault in faults}  # several faults may have one together
    tiles = [
        ("faults", f"{len(faults):,}"),
        ("stopped training", f"{len(back):,}"),
        ("back after, median", f"{median(back):.1f} s" if back else "-"),
        ("steps lost", f"{sum(lost.values()):,}"),
        ("steps", f"{report['steps']:,}"),
        ("goodput", or_dash(report["goodput"], percent)),
        ("effective", or_dash(report["effective"], percent)),
        ("paid", or_dash(report["paid"], percent)),
    ]
    verdicts = [
        [
            Cell(*VERDICTS[each["holds"]]),
            Cell(f"{each['promise']}. {each['claim']}" if each["promise"] else each["claim"], "text"),
            Cell(each["figures"], "text", details=each["details"]),
        ]
        for each in result["verdicts"]
    ]
    came = [
        [
            str(fault["number"]),
            f"{fault['step']:,}",
            Cell(fault["what"], "text"),
            f"{fault['ranks_before']} → {or_dash(fault['ranks_after'])}",
            or_dash(fault["seconds"], "{:.2f} s".format),
            str(fault["lost_steps"]),
            fault["source"] or "-",
        ]
        for fault in faults
    ]
    head = ["no.", "step", "fault", "ranks", "to the next step", "steps lost", "state from"]
    note = "A dash: no new group was formed for it."
    return Page(
        title=run,
        lead=f"Drill {result['plan']}:",
        tiles=tiles,
        picture=picture,
        sections=[
            Section("Verdict", head=["", "promise", "figures"], rows=verdicts),
            Section("Faults", note=note, head=head, rows=came, numbers=(0, 1, 4, 5)),
        ],
        verdict=Cell("every promise held", "good") if result["holds"] else Cell("a promise was broken", "bad"),
    ).render()


def data_mix(config: Mapping[str, Any], tokens: int | None) -> Section | None:
    """Which corpora a run mixes, with the shares that its stages give them, and what was trained on so far.

    None where there is one corpus, or where nothing is known but that they are weighed by their size.
    """
    data = config.get("data") or {}
    names, stages, seq_len = list(data.get("corpora") or {}), data.get("mixture") or [], data.get("seq_len")
    if len(names) < 2 or not stages or not seq_len:
        return None
    weights = [(float(stage.get("from_tokens", 0)), dict(stage.get("weights") or {})) for stage in stages]
    try:
        mixture = plan_mixture(weights, names, seq_len=seq_len)
    except ConfigError:
        return None
    drawn = mixture.drawn((tokens or 0) // seq_len)
    shares = [count / max(1, sum(drawn)) for count in drawn]
    rows: list[list[str | Cell]] = [
        [
            Cell(name, colour=f"r{k % 8}"),
            *(percent(stage.shares[k] / UNIT) for stage in mixture.stages),
            f"{drawn[k] * seq_len:,}",
            percent(shares[k]),
        ]
        for k, name in enumerate(names)
    ]
    head = ["corpus", *(f"from {from_tokens:,.0f}" for from_tokens, _ in weights), "tokens so far", "share"]
    return Section(
        "Data mix",
        bar=[
            (share, f"r{k % 8}", f"{names[k]}: {percent(share)} of the tokens so far")
            for k, share in enumerate(shares)
            if share
        ],
        note="Shares of the samples, from a number of tokens on, and what was trained on so far.",
        head=head,
        rows=rows,
        numbers=range(1, len(head)),
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as pairs of a dotted key and a value as YAML would have it."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{key}.")
        else:
            pairs.append(
                (f"{prefix}{key}", json.dumps(value) if value is None or isinstance(value, bool) else str(value))
            )
    return pairs


@cache
def _template() -> jinja2.Template:
    text = resources.files("regrow.show").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text)


def _standing(ledger: Ledger, history: History, now: float) -> str:
    """Since when, and how it stands or ended."""
    if not ledger.attempts or ledger.end <= ledger.begin:
        return "Nothing logged yet."
    begun, last = f"Submitted {when(ledger.begin)}. ", ledger.attempts[-1]
    if last.stopped:
        reason, detail = last.stopped.reason.replace("_", " "), last.stopped.detail
        at = f"at step {or_dash(last.stopped.step)}, {when(last.stopped.time)}"
        return f"{begun}{reason.capitalize()} {at}" + (f": {detail}" if detail else ".")
    if last.failure:
        return f"{begun}Failed {when(last.failure.time)}, not yet back: {cause_words(last.failure.cause)}."
    silent_s = now - last.last_life
    step = f"At step {history.rows[-1]['step']}" if history.rows else "No step yet"
    silence = f", silent for {duration(silent_s)}" if silent_s > SILENCE_S else ""
    return f"{begun}{step}{silence}, as of {when(now)}."


def _time(report: Mapping[str, Any]) -> Section:
    """The states as one bar and a table."""
    time_s, wall_s = report["time_s"], report["wall_s"]
    shown = [state for state in STATES if time_s[state] > 0] if wall_s > 0 else []
    if not shown:
        return Section("Where the time went", note="No time has passed yet.")
    rows: list[list[str | Cell]] = [
        [
            Cell(state, colour=state),
            duration(time_s[state]),
            percent(time_s[state] / wall_s),
            Cell(STATE_HELP[state], "soft help"),
        ]
        for state in shown
    ]
    bar = [
        (time_s[state] / wall_s, state, f"{state}: {duration(time_s[state])}, {percent(time_s[state] / wall_s)}")
        for state in shown
    ]
    return Section("Where the time went", bar=bar, head=["state", "time", "share", ""], rows=rows, numbers=(1, 2))


def _work(report: Mapping[str, Any]) -> Section | None:
    """What the productive seconds were worth."""
    work = report["work"]
    if work["full_step_s"] is None:
        return None
    parts = {"useful": work["useful_s"], **work["slower_s"]}
    rows: list[list[str | Cell]] = [
        [
            name.replace("_", " "),
            duration(seconds) if seconds >= 0 else f"-{duration(-seconds)}",
            percent(seconds / report["wall_s"]),
            Cell(WORK_HELP[name], "soft help"),
        ]
        for name, seconds in parts.items()
    ]
    known = "as steps of that size took" if work["is_measured"] else "by the batch plan, from steps of other sizes"
    return Section(
        "What productive time was worth",
        note=f"A step of the undisturbed full-size job takes {duration(work['full_step_s'])}, {known}.",
        head=["", "time", "share", ""],
        rows=rows,
        numbers=(1, 2),
    )


def _lost(report: Mapping[str, Any]) -> Section:
    """What starting and each kind of interruption cost."""
    steps: Counter[str] = Counter()
    for entry in report["recoveries"]:
        steps[entry["cause"]] += entry["lost_steps"] or 0
    rows = [
        [
            cause_words(cause),
            or_dash(report["restarts"].get(cause), "{:,}".format),
            duration(seconds),
            percent(seconds / report["wall_s"]),
            or_dash(steps.get(cause), "{:,}".format),
        ]
        for cause, seconds in sorted(report["lost_s"].items(), key=lambda item: -item[1])
    ]
    return Section(
        "Time lost by cause",
        note="Being down, starting, restoring and doing steps again, by what it was for." if rows else "",
        head=["cause", "restarts", "time", "share", "steps done again"],
        rows=rows,
        numbers=(1, 2, 3, 4),
    )


def _recoveries(recoveries: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        [
            cause_words(entry["cause"]),
            f"{or_dash(entry['ranks_before'])} → {or_dash(entry['ranks_after'])}",
            *(or_dash(entry[part], duration) for part in RECOVERY_PARTS),
            or_dash(entry["lost_steps"]),
            or_dash(entry["source"]),
        ]
        for entry in recoveries
    ]
    head = ["cause", "ranks", "detect", "regroup", "reshard", "first step", "lost steps", "source"]
    note = "" if rows else "None: the first group is the only one so far."
    return Section("Recoveries", note=note, head=head, rows=rows, numbers=range(2, 7))


def _ranks(ranks: Sequence[Mapping[str, Any]], history: History) -> Section:
    """What a step's time goes into on each rank, the slowest first; of many, the slowest few."""
    suspected = [each.sentence() for each in history.suspected]
    head = ["rank", "node", "compute", "data", "snapshots", "in shard", "replicas", "all", "memory", "°C", "W"]
    parts = ("compute_s", "data_wait_s", "snapshot_s", "wait_shard_s", "wait_replicate_s", "wait_all_s")
    rows = [
        [
            str(row["rank"]),
            str(row.get("node", ""))[:12],
            *(or_dash(row.get(part), duration) for part in parts),
            or_dash(row.get("memory_bytes") or None, size),
            or_dash(row.get("temperature_c")),
            or_dash(row.get("power_w"), "{:.0f}".format),
        ]
        for row in ranks
    ]
    note = f"Rank {ranks[0]['rank']} has the longest time of its own; the others wait for it." if ranks else ""
    return Section("Ranks, a step's mean", lines=suspected, note=note, head=head, rows=rows, numbers=range(2, 11))


def _node_snapshots(nodes: Sequence[Mapping[str, Any]]) -> Section:
    """What each node took to make its newest snapshot safe; of many, the slowest few."""
    return Section(
        "Snapshots by node, the newest",
        note="From sealed to checked and copied, the slowest node first; a snapshot is committed with its report."
        if nodes
        else "",
        head=["node", "size", "until safe", "checksums", "sending", "GB/s"],
        rows=_by_node(nodes, ("seconds", "check_s", "send_s"), speed="send_s"),
        numbers=range(1, 6),
    )


def _checkpoints(report: Mapping[str, Any], history: History) -> Section:
    whole, made = whole_checkpoints(history.events), report["checkpoints"]
    if not whole:
        lines = ["None committed yet." if not made["committed"] else f"{made['committed']:,} committed, none is whole."]
        return Section("Checkpoints", lines=lines)
    last = whole[-1]
    large = f", {size(last.bytes)}" if last.bytes is not None else ""
    lines = [
        f"{made['committed']:,} committed; training waited {duration(made['stall_s'])} for them. "
        f"The last is of step {last.step}{large}, {when(last.time)}."
    ]
    if last.seconds is None or last.write_s is None or not last.nodes:
        return Section("Checkpoints", lines=lines)
    phases = {
        "nodes writing": (last.write_s, "snapshot"),
        "waiting for the slowest node": (last.held_up_s or 0.0, "down"),
        "metadata": (last.index_s or 0.0, "validation"),
        "COMMIT": (last.commit_s or 0.0, "other"),
    }
    lines.append(f"It took {duration(last.seconds)}: {_phases(phases, last.seconds)}.")
    return Section(
        "Checkpoints",
        bar=[
            (seconds / last.seconds, colour, f"{name}: {duration(seconds)}")
            for name, (seconds, colour) in phases.items()
            if seconds > 0 and last.seconds > 0
        ],
        lines=lines,
        head=["node", "size", "until written", "checksums", "writing", "GB/s"],
        rows=_by_node(last.nodes, ("seconds", "check_s", "write_s"), speed="write_s"),
        numbers=range(1, 6),
    )


def _phases(phases: Mapping[str, tuple[float, str]], seconds: float) -> str:
    return ", ".join(f"{name} {duration(took)} ({percent(took / seconds)})" for name, (took, _) in phases.items())


def _by_node(nodes: Sequence[Mapping[str, Any]], phases: Sequence[str], *, speed: str) -> list[list[str | Cell]]:
    """A row a node, each phase the hotter the more of the slowest node's time it took."""
    most = max((float(each.get(phases[0]) or 0.0) for each in nodes), default=0.0)
    rows: list[list[str | Cell]] = []
    for each in nodes:
        took = [float(each.get(phase) or 0.0) for phase in phases]
        rate = float(each.get("bytes") or 0) / took[phases.index(speed)] / 1e9 if took[phases.index(speed)] else None
        of = f" for {str(each['of'])[:12]}" if each.get("of") else ""
        rows.append(
            [
                str(each.get("node", ""))[:12] + of,
                or_dash(each.get("bytes"), size),
                *(Cell(duration(seconds), heat=seconds / most if most else 0.0) for seconds in took),
                or_dash(rate, "{:.2f}".format),
            ]
        )
    return rows


def _geometry(config: Mapping[str, Any], history: History) -> Section:
    """What the configuration comes to: the batch, and how each world size shares it."""
    submitted = history.newest(Submitted)
    lines = [str(line) for line in (submitted.geometry if submitted else None) or []]
    optim, data, cluster = (config.get(group) or {} for group in ("optim", "data", "cluster"))
    seqs, num_slices, seq_len = optim.get("global_batch_seqs"), optim.get("num_slices"), data.get("seq_len")
    if not (seqs and num_slices and seq_len):
        return Section("Geometry", lines=lines, note="" if lines else "Unknown: the run folder has no configuration.")
    steps = (config.get("train") or {}).get("steps")
    whole = f" x {steps:,} steps = {si(seqs * seq_len * steps)} tokens" if steps else ""
    lines = lines or [
        f"Global batch: {seqs:,} sequences x {seq_len:,} tokens = {seqs * seq_len:,} tokens a step{whole}, "
        f"in {num_slices:,} slices."
    ]
    sizes = {row["world_size"] for row in history.rows} | {cluster.get("min_workers"), cluster.get("max_workers")}
    rows, shapes = [], shapes_of(history.events, config)
    for world_size in sorted(each for each in sizes if each):
        try:
            plan = plan_batch(num_slices=num_slices, world_size=shapes.of(world_size).units)
        except BatchError:
            continue
        fewest, most = min(map(len, plan.ranges)), max(map(len, plan.ranges))
        each = str(most) if fewest == most else f"{fewest} or {most}"
        rows.append([f"{world_size:,}", each, str(seqs // num_slices), percent(plan.idle_share)])
    head = ["world size", "slices a rank", "sequences a slice", "idle"]
    return Section("Geometry", lines=lines, head=head, rows=rows, numbers=range(4))


def _submission(history: History) -> Section | None:
    submitted = history.of(Submitted)
    if not submitted:
        return None
    last = {key: value for key, value in submitted[-1].to_row().items() if key not in ("event", "time", "geometry")}
    lines = [when(submitted[-1].time) + (f", the last of {len(submitted)}." if submitted[1:] else "")]
    first_step = {(row["generation"], row["step"]): row["step_s"] for row in history.rows}
    for generation in reversed(history.of(Generation)):
        step_s = first_step.get((generation.generation, generation.start_step + 1))
        if generation.startup_s and step_s is not None:
            lines.append(f"Generation {generation.generation}: {startup_line(generation.startup_s, step_s)} (seconds).")
            break
    return Section(
        "Submission", lines=lines, rows=[[Cell(key, "key"), Cell(value, "text")] for key, value in flat(last)]
    )


def _settings(values: Any) -> str:
    if not isinstance(values, Mapping):
        return f"  {values}"
    return "\n".join(f"  {key}: {value}" for key, value in flat(values))

"""What became of a run, from its two logs: report.json, with every second in exactly one state.

`account` lays the logs out on one time line and paints each moment with one state, so the states add up to wall time
whatever the logs hold; `build_report` turns that into the report. Both are pure. See docs/file-formats.md.
"""

import itertools
import json
import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.config.schema import PretrainConfig
from regrow.errors import BatchError
from regrow.observe.run_log import Row, read_events, read_metrics
from regrow.plan.batch import plan_batch
from regrow.storage import Storage

Config = PretrainConfig | Mapping[str, Any]
Floats = NDArray[np.float64]

STATES = ("productive", "init", "restore", "snapshot", "data", "recompute", "down", "validation", "other")
# What a moment counts as when several claims cover it: the later in this list wins.
_LAYERS = ("other", "init", "down", "restore", "recompute", "step", "validation", "snapshot")
SILENCE_S = 60.0  # a run that has said nothing for this long and for 10 of its steps counts as down


@dataclass(frozen=True)
class Attempt:
    """One life of the worker group: from its submission, or from where it began to form, to its last sign of life.

    All times are unix seconds.
    """

    submitted: bool  # began with a `submitted` event, not within a running job
    begin: float
    generation: Row | None = None  # its `generation` event; None when it never got there
    last_life: float = 0.0
    first_step_begin: float | None = None  # of any step, a rolled-back one too
    failure: Row | None = None  # the first `failure` event after the last sign of life
    stopped: Row | None = None

    @property
    def world_size(self) -> int | None:
        return self.generation.get("world_size") if self.generation else None

    @property
    def ready(self) -> float | None:
        return self.generation["time"] if self.generation else None


@dataclass(frozen=True)
class Ledger:
    """Every second of a run in exactly one state."""

    begin: float  # unix time of the submission
    end: float
    time_s: dict[str, float]  # state -> seconds; the sum is end - begin
    productive_s: Floats  # of each metrics row
    attempts: list[Attempt]
    bands: list[tuple[float, float, str]]  # from, to (unix times) and state, one after another; steps are productive


def build_report(metrics: Sequence[Row], events: Sequence[Row], now: float, config: Config) -> dict[str, Any]:
    """The content of report.json. What the logs do not tell is None.

    `metrics` and `events` as `read_metrics` and `read_events` return them; `now` in unix seconds.
    """
    return report_of(account(metrics, events, now), metrics, events, config)


def report_of(ledger: Ledger, metrics: Sequence[Row], events: Sequence[Row], config: Config) -> dict[str, Any]:
    """As `build_report`, from a ledger that `account` made of the same logs."""
    wall_s = ledger.end - ledger.begin
    last = metrics[-1] if metrics else {}
    generations = [attempt.generation for attempt in ledger.attempts if attempt.generation]
    causes = [generation.get("cause", "unknown") for generation in generations]
    checkpoints = _named(events, "checkpoint")
    return {
        "steps": last.get("step") or (generations[-1].get("start_step") or 0 if generations else 0),
        "tokens": last.get("tokens_seen"),
        "final_loss": _finite(last.get("loss")),
        "wall_s": round(wall_s, 6),
        "goodput": round(ledger.time_s["productive"] / wall_s, 6) if wall_s > 0 else None,
        "capacity_goodput": _capacity_goodput(ledger, metrics, as_mapping(config)),
        "time_s": {state: round(seconds, 6) for state, seconds in ledger.time_s.items()},
        "restarts": dict(Counter(cause for cause in causes if cause != "start")),
        "generations": len(generations),
        "recoveries": _recoveries(ledger.attempts, metrics, events),
        "data_fallbacks": len(_named(events, "data_fallback")),
        "checkpoints": {
            "committed": len(checkpoints),
            "stall_s": round(math.fsum(_number(event, "stall_s") for event in checkpoints), 6),
        },
    }


def account(metrics: Sequence[Row], events: Sequence[Row], now: float) -> Ledger:
    """Give every second between the submission and the end (`stopped`, else `now`) one state."""
    begins, ends = _step_intervals(metrics, events)
    times = [event["time"] for event in events if event["event"] != "rollback"]
    rolled_back = _rolled_back(events)
    known = [*times, *begins[:1], *ends[-1:], *(event["first_time"] for event in rolled_back)]
    begin, end = (min(known), max(known)) if known else (now, now)

    attempts = _attempts(begins, ends, events, rolled_back, begin)
    running = not attempts or attempts[-1].stopped is None
    end = max(end, now) if running else end

    claims: dict[str, list[tuple[float, float]]] = {layer: [] for layer in _LAYERS}
    _claim_attempts(claims, attempts, end, step_s=float(np.median(ends - begins)) if len(ends) else 0.0)
    claims["recompute"] += [(event["first_time"], event["last_time"]) for event in rolled_back]
    claims["validation"] += [(e["time"] - _number(e, "seconds"), e["time"]) for e in _named(events, "validation")]
    claims["snapshot"] += [(e["time"] - _number(e, "stall_s"), e["time"]) for e in _named(events, "checkpoint")]
    claims["step"] += list(zip(begins.tolist(), ends.tolist(), strict=True))

    edges, layers = _paint(claims, begin, end)
    widths = np.diff(edges)
    painted = {layer: float(widths[layers == index].sum()) for index, layer in enumerate(_LAYERS)}

    # Within its step, the data wait and the snapshot take their share; a checkpoint event there already took some.
    def covered(layer: str) -> Floats:
        """Seconds of each row's interval that `layer` got."""
        total = np.concatenate([[0.0], np.cumsum(widths * (layers == _LAYERS.index(layer)))])
        return np.interp(ends - begin, edges, total) - np.interp(begins - begin, edges, total)

    step = covered("step")
    snapshot = np.clip(_column(metrics, "snapshot_s") - covered("snapshot"), 0.0, step)
    data = np.clip(_column(metrics, "data_wait_s"), 0.0, step - snapshot)
    productive = step - snapshot - data
    time_s = {
        "productive": float(productive.sum()),
        "init": painted["init"],
        "restore": painted["restore"],
        "snapshot": painted["snapshot"] + float(snapshot.sum()),
        "data": float(data.sum()),
        "recompute": painted["recompute"],
        "down": painted["down"],
        "validation": painted["validation"],
        "other": painted["other"],
    }
    return Ledger(begin, end, time_s, productive, attempts, _bands(edges + begin, layers))


def make_report(storage: Storage, config: Config, now: float | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The report of a run folder, and the content of report.json and report.html by name. Reads the logs only."""
    from regrow.observe.report_page import render_page

    now = time.time() if now is None else now
    metrics, events = read_metrics(storage), read_events(storage)
    ledger = account(metrics, events, now)
    report = report_of(ledger, metrics, events, config)
    page = render_page(report, ledger, metrics, events, as_mapping(config), now)
    return report, {
        "report.json": json.dumps(report, indent=2, allow_nan=False).encode() + b"\n",
        "report.html": page.encode("utf-8", "replace"),
    }


def write_report(storage: Storage, config: Config, now: float | None = None) -> dict[str, Any]:
    """Write report.json, then report.html, each whole or not at all, from the run folder's logs; returns the report."""
    report, files = make_report(storage, config, now)
    for name, data in files.items():
        storage.write_bytes(name, data)
    return report


def as_mapping(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries, whether it came as dataclasses or from config.yaml."""
    return asdict(config) if is_dataclass(config) else dict(config)


def _step_intervals(metrics: Sequence[Row], events: Sequence[Row]) -> tuple[Floats, Floats]:
    """When each row's step began and ended, in unix seconds; no two overlap."""
    ends = np.maximum.accumulate(np.array([row["time"] for row in metrics], dtype=np.float64))
    begins = ends - _column(metrics, "step_s")
    for event in _named(events, "validation"):  # step_s leaves it out, but it may lie between a step and its row
        index = np.searchsorted(ends, event["time"] - _number(event, "seconds") / 2)
        if index < len(ends) and event["time"] >= begins[index]:
            begins[index] -= _number(event, "seconds")
    begins[1:] = np.maximum(begins[1:], ends[:-1])
    return begins, ends


def _rolled_back(events: Sequence[Row]) -> list[Row]:
    """The rollback events, each from the true beginning of its first step, as `_step_intervals` finds it for rows."""
    found = []
    for rollback in _named(events, "rollback"):
        begin = rollback.get("first_time")
        if begin is None:
            continue
        for event in _named(events, "validation"):
            middle = event["time"] - _number(event, "seconds") / 2
            if begin <= event["time"] and middle <= rollback.get("first_step_end", begin):
                begin -= _number(event, "seconds")
                break
        found.append({**rollback, "first_time": begin})
    return found


def _attempts(
    begins: Floats, ends: Floats, events: Sequence[Row], rolled_back: Sequence[Row], begin: float
) -> list[Attempt]:
    """Cut the run into attempts at each `submitted` and at each `generation` that follows another one."""
    marks: list[tuple[float, bool, Row | None]] = []  # time of the cut, was it a submission, the generation event
    for event in events:
        if event["event"] == "submitted":
            marks.append((event["time"], True, None))
        elif event["event"] == "generation":
            if marks and marks[-1][2] is None:
                marks[-1] = (marks[-1][0], marks[-1][1], event)
            else:
                marks.append((event["time"], False, event))
    if marks:
        marks[0] = (min(begin, marks[0][0]), *marks[0][1:])
    else:
        marks = [(begin, False, None)]

    attempts: list[Attempt] = []
    event_times = [event["time"] for event in events]
    undone_times = [event["last_time"] for event in rolled_back]
    for index, (mark, submitted, generation) in enumerate(marks):
        until = marks[index + 1][0] if index + 1 < len(marks) else math.inf
        own = events[bisect_left(event_times, mark) if index else 0 : bisect_left(event_times, until)]
        undone = rolled_back[bisect_right(undone_times, mark) if index else 0 : bisect_right(undone_times, until)]
        first, past = int(np.searchsorted(ends, mark, side="right")) if index else 0, bisect_right(ends, until)
        life = [mark, *(e["time"] for e in own if _sign_of_life(e)), *(e["last_time"] for e in undone)]
        starts = [e["first_time"] for e in undone]
        if past > first:
            life.append(float(ends[past - 1]))
            starts.append(float(begins[first]))
        if not starts:  # it was still starting when it failed
            life += [e["time"] for e in own if e["event"] == "failure"]
        if index and not submitted:  # it began to form before its event, which says that it is ready
            assert generation is not None
            spent = _number(generation, "init_s") + _number(generation, "restore_s")
            mark = min(mark, max(mark - spent, attempts[-1].last_life))
        attempts.append(
            Attempt(
                submitted=submitted,
                begin=mark,
                generation=generation,
                last_life=max(life),
                first_step_begin=min(starts, default=None),
                failure=next((e for e in own if e["event"] == "failure" and e["time"] >= max(life)), None),
                stopped=next((e for e in reversed(own) if e["event"] == "stopped"), None),
            )
        )
    return attempts


def _claim_attempts(
    claims: dict[str, list[tuple[float, float]]], attempts: Sequence[Attempt], end: float, step_s: float
) -> None:
    """Claim what attempts spend outside steps: starting, restoring, and being down."""
    for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
        over = later is not None or attempt.failure is not None or attempt.stopped is not None
        started = attempt.first_step_begin
        if started is None:
            started = attempt.last_life if over else end
        claims["init"].append((attempt.begin, started))
        if attempt.generation and attempt.ready is not None:
            restore_s = _number(attempt.generation, "restore_s")
            claims["restore"].append((max(attempt.begin, attempt.ready - restore_s), attempt.ready))
        if later is not None:
            claims["down"].append((attempt.last_life, later.begin))
        elif attempt.failure is not None or (
            not over and attempt.first_step_begin is not None and end - attempt.last_life > max(SILENCE_S, 10 * step_s)
        ):
            claims["down"].append((attempt.last_life, end))


def _paint(
    claims: Mapping[str, list[tuple[float, float]]], begin: float, end: float
) -> tuple[Floats, NDArray[np.intp]]:
    """Cut [begin, end] at every edge of a claim and give each piece the strongest layer that covers it.

    Returns the edges in seconds since `begin`, and the layer index of each of the len(edges) - 1 pieces.
    """
    spans = {
        layer: np.clip(np.array(claims[layer], dtype=np.float64).reshape(-1, 2) - begin, 0.0, end - begin)
        for layer in _LAYERS
    }
    edges = np.unique(np.concatenate([[0.0, end - begin], *(span.ravel() for span in spans.values())]))
    layers = np.zeros(len(edges) - 1, dtype=np.intp)
    for index, layer in enumerate(_LAYERS):
        span = spans[layer][spans[layer][:, 1] > spans[layer][:, 0]]
        depth = np.bincount(np.searchsorted(edges, span[:, 0]), minlength=len(edges)) - np.bincount(
            np.searchsorted(edges, span[:, 1]), minlength=len(edges)
        )
        layers[np.cumsum(depth)[:-1] > 0] = index
    return edges, layers


def _bands(edges: Floats, layers: NDArray[np.intp]) -> list[tuple[float, float, str]]:
    """What `_paint` returned, neighbours of one layer joined."""
    if not len(layers):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    names = ["productive" if layer == "step" else layer for layer in _LAYERS]
    times, of_cut = edges.tolist(), layers.tolist()
    return [(times[a], times[b], names[of_cut[a]]) for a, b in itertools.pairwise(cuts)]


def _recoveries(attempts: Sequence[Attempt], metrics: Sequence[Row], events: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each generation that was not a start, in order.

    `detect_s + regroup_s + reshard_s + first_step_s` is the time from the last sign of life (from the submission,
    where the job was started again) to the end of the first step.
    """
    undone: Counter[int] = Counter()
    for event in _named(events, "rollback"):
        undone[event["generation"]] += event["steps"]
    rows = {(row["generation"], row["step"]): row for row in metrics}
    ranks_before, entries = None, []
    for attempt, before in zip(attempts, [None, *attempts[:-1]], strict=True):
        generation = attempt.generation
        if generation is None:
            continue
        if generation.get("cause", "unknown") != "start":
            first = rows.get((generation["generation"], (generation.get("start_step") or 0) + 1))
            failure = before.failure if before else None
            entries.append(
                {
                    "cause": generation.get("cause", "unknown"),
                    "ranks_before": failure.get("ranks_before", ranks_before) if failure else ranks_before,
                    "ranks_after": attempt.world_size,
                    **_stall(attempt, before, first),
                    "lost_steps": generation.get("recomputed_steps", undone[generation["generation"]]),
                    "source": generation.get("source"),
                }
            )
        ranks_before = attempt.world_size
    return entries


def _stall(attempt: Attempt, before: Attempt | None, first_row: Row | None) -> dict[str, float | None]:
    """The parts of one recovery in seconds; None where the logs do not tell."""
    generation = attempt.generation
    assert generation is not None
    detect_s, regroup_from = None, attempt.begin
    if before is not None and not attempt.submitted:
        regroup_from = before.last_life
    if before is not None and before.failure and before.first_step_begin is not None:
        detect_s = before.failure["time"] - before.last_life
        regroup_from = attempt.begin if attempt.submitted else before.failure["time"]
    restore_s = generation.get("restore_s")
    return {
        "detect_s": _seconds(detect_s),
        "regroup_s": _seconds(generation["time"] - (restore_s or 0.0) - regroup_from),
        "reshard_s": _seconds(restore_s),
        "first_step_s": _seconds(first_row["time"] - generation["time"]) if first_row else None,
    }


def _capacity_goodput(ledger: Ledger, metrics: Sequence[Row], config: Mapping[str, Any]) -> float | None:
    """Productive seconds weighted by the share of the ranks asked for that was there and not idle, over wall time."""
    num_slices = config.get("optim", {}).get("num_slices")
    wall_s = ledger.end - ledger.begin
    if num_slices is None or wall_s <= 0:
        return None
    world_sizes = [row["world_size"] for row in metrics]
    most = max([config.get("cluster", {}).get("max_workers") or 1, *world_sizes])
    share = {size: size / most * _busy_share(num_slices, size) for size in set(world_sizes)}
    useful = math.fsum(s * share[size] for s, size in zip(ledger.productive_s.tolist(), world_sizes, strict=True))
    return round(useful / wall_s, 6)


def _busy_share(num_slices: int, world_size: int) -> float:
    try:
        return plan_batch(num_slices=num_slices, world_size=world_size).busy_share
    except BatchError:
        return num_slices / world_size  # a rank or more without a slice: the configuration changed under the run


def _sign_of_life(event: Row) -> bool:
    """Did the worker group, or the driver on its way to one, do something?

    Noticing a failure is none, nor is what keepers and the coordinator do without a group: write a checkpoint from
    memory, complain of a snapshot, find the members of the next group.
    """
    if event["event"] == "stopped":
        return event.get("reason") != "failed"
    if event["event"] == "checkpoint":
        return "stall_s" in event
    return event["event"] in ("submitted", "generation", "validation", "data_fallback")


def _named(events: Iterable[Row], name: str) -> list[Row]:
    return [event for event in events if event["event"] == name]


def _number(row: Mapping[str, Any], key: str) -> float:
    """A duration in seconds; 0 where it is missing, null, negative or not finite."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0


def _column(metrics: Sequence[Row], key: str) -> Floats:
    return np.array([_number(row, key) for row in metrics], dtype=np.float64)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(max(0.0, value), 6)

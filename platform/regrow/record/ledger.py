"""Where the time of a run went: its logs on one time line, every moment in exactly one state. Pure.

`account` looks back over whole logs and paints each moment with one state, so the states add up to wall time whatever
the logs hold. See docs/file-formats.md for what the states mean; `record.history` books them while they pass.
"""

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from regrow.record.events import (
    Cause,
    Checkpoint,
    CheckpointFailed,
    DataFallback,
    Event,
    Failure,
    Generation,
    Rollback,
    Row,
    Stopped,
    Submitted,
    Validation,
)
from regrow.record.log import positive

Floats = NDArray[np.float64]
Kind = TypeVar("Kind", bound=Event)

STATES = ("productive", "init", "restore", "snapshot", "data", "recompute", "down", "validation", "other")
LOST = ("init", "restore", "recompute", "down")  # states that starting and interruptions cost
# What a moment counts as when several claims cover it: the later in this list wins.
_LAYERS = ("other", "init", "down", "restore", "recompute", "step", "validation", "snapshot")
MOST_START_S = 60.0  # of a job whose clock is behind: what took longer may have been a wait for the job before it
ROW_TIMES = ("first_time", "first_step_end", "last_time")  # of a rollback, and of each of its spans
SILENCE_S = 60.0  # a run that has said nothing for this long and for 10 of its steps counts as down


@dataclass(frozen=True)
class Attempt:
    """One life of the worker group: from its submission, or from where it began to form, to its last sign of life.

    All times are unix seconds.
    """

    submitted: bool  # began with a `submitted` event, not within a running job
    begin: float
    generation: Generation | None = None  # None when it never got there
    last_life: float = 0.0
    first_step_begin: float | None = None  # of any step, a rolled-back one too
    failure: Failure | None = None  # the first one after the last sign of life
    stopped: Stopped | None = None

    @property
    def world_size(self) -> int | None:
        return self.generation.world_size if self.generation else None

    @property
    def ready(self) -> float | None:
        return self.generation.time if self.generation else None


@dataclass(frozen=True)
class Ledger:
    """Every second of a run in exactly one state."""

    begin: float  # unix time of the submission
    end: float
    time_s: dict[str, float]  # state -> seconds; the sum is end - begin
    productive_s: Floats  # of each metrics row
    attempts: list[Attempt]
    bands: list[tuple[float, float, str]]  # from, to (unix times) and state, one after another; steps are productive
    undone: list[tuple[float, float, int]]  # from, to, and the generation that took the steps between them back


def account(rows: Sequence[Row], events: Sequence[Event], now: float) -> Ledger:
    """Give every second between the submission and the end (`stopped`, else `now`) one state."""
    rows, events = on_one_clock(rows, events)  # here time is what counts, not what was written first
    begins, ends = _step_intervals(rows, events)
    undone = _undone(events)
    times = [event.time for event in events if not isinstance(event, Rollback)]
    known = [*times, *begins[:1], *ends[-1:], *(first for first, *_ in undone)]
    begin, end = (min(known), max(known)) if known else (now, now)

    attempts = _attempts(begins, ends, events, undone, begin)
    running = not attempts or attempts[-1].stopped is None
    end = max(end, now) if running else end

    claims: dict[str, list[tuple[float, float]]] = {layer: [] for layer in _LAYERS}
    _claim_attempts(claims, attempts, end, step_s=float(np.median(ends - begins)) if len(ends) else 0.0)
    claims["recompute"] += [(first, last) for first, last, _ in undone]
    claims["validation"] += [(e.time - positive(e.seconds), e.time) for e in of_kind(events, Validation)]
    claims["snapshot"] += [(e.time - positive(e.stall_s), e.time) for e in of_kind(events, Checkpoint)]
    claims["snapshot"] += _last_checkpoints(events, ends, undone)
    claims["step"] += list(zip(begins.tolist(), ends.tolist(), strict=True))

    edges, layers = _paint(claims, begin, end)
    widths = np.diff(edges)
    time_s = {layer: float(widths[layers == index].sum()) for index, layer in enumerate(_LAYERS)}

    # Within its step, the data wait and the snapshot take their share; a checkpoint event there already took some.
    def covered(layer: str) -> Floats:
        """Seconds of each row's interval that `layer` got."""
        total = np.concatenate([[0.0], np.cumsum(widths * (layers == _LAYERS.index(layer)))])
        return np.interp(ends - begin, edges, total) - np.interp(begins - begin, edges, total)

    step = covered("step")
    snapshot = np.clip(_column(rows, "snapshot_s") - covered("snapshot"), 0.0, step)
    data = np.clip(_column(rows, "data_wait_s"), 0.0, step - snapshot)
    productive = step - snapshot - data
    time_s["snapshot"] += float(snapshot.sum())
    time_s |= {"productive": float(productive.sum()), "data": float(data.sum())}
    bands = _bands(edges + begin, layers)
    return Ledger(begin, end, {state: time_s[state] for state in STATES}, productive, attempts, bands, undone)


def on_one_clock(rows: Sequence[Row], events: Sequence[Event]) -> tuple[list[Row], list[Event]]:
    """Rows, and events in the order of their times, with each job behind where the run was heard before it.

    A `submitted` has its command's time, which may be older, as it waits for the job before to end: it counts from just
    behind that. A job that has logged or done anything sooner has a clock that is behind: all of it moves by as much,
    with `MOST_START_S` of its start, so that nothing takes less time.
    """
    moved, found = list(rows), list[Event]()
    newest, of_rows = -math.inf, 0.0  # time heard last, and by how much the newest group's rows have moved
    offsets: dict[int, float] = {}  # the same, of each generation's rows
    for job, first_row, end in _jobs(rows, events):
        asked = job[0] if isinstance(job[0], Submitted) else None
        heard = max(newest, asked.heard_at + of_rows) if asked and asked.heard_at else newest
        times = [event.time for event in job if not isinstance(event, Submitted | Rollback)]
        times += [row["time"] - positive(row.get("step_s")) for row in moved[first_row:end][:1]]
        begun = min(times, default=math.inf)
        behind = math.nextafter(heard, math.inf)
        earliest = min(begun, max(asked.time, begun - MOST_START_S) if asked else math.inf)
        offset = behind - earliest if begun < heard else 0.0
        begin = max(behind, min(begun, asked.time if asked else math.inf) + offset)
        for event in job:
            event = _later(_later(event, offset, "time", "since"), of_rows, "heard_at")
            if isinstance(event, Rollback):  # it tells of rows: of another job's where its own has no group yet
                found.append(_later(_spans_later(event, offsets), of_rows, *ROW_TIMES))
                continue
            if isinstance(event, Generation):
                offsets[event.generation] = of_rows = offset
            time = begin if isinstance(event, Submitted) else max(begin, event.time)
            found.append(event if event.time == time else replace(event, time=time))
            newest = max(newest, time)
        if offset:
            moved[first_row:end] = [row | {"time": row["time"] + offset} for row in moved[first_row:end]]
    return moved, sorted(found, key=lambda event: event.time)


def _jobs(rows: Sequence[Row], events: Sequence[Event]) -> list[tuple[Sequence[Event], int, int]]:
    """Each job's events, in their order, and where its rows begin and end, by the generations that it had."""
    begins = [number for number, event in enumerate(events) if not number or isinstance(event, Submitted)]
    found, end = list[tuple[Sequence[Event], int, int]](), len(rows)
    for begin, past in reversed(list(itertools.pairwise([*begins, len(events)]))):
        number = next((each.generation for each in events[begin:past] if isinstance(each, Generation)), math.inf)
        first = bisect_left(rows, number, 0, end, key=lambda row: row.get("generation") or 0)
        found.append((events[begin:past], first, end))
        end = first
    return found[::-1]


def _later(event: Event, offset: float, *names: str) -> Event:
    """With those of these times that it has, moved."""
    times = {name: getattr(event, name, None) for name in names} if offset else {}
    told: dict[str, Any] = {name: time + offset for name, time in times.items() if time is not None}
    return replace(event, **told) if told else event


def _spans_later(event: Rollback, offsets: Mapping[int, float]) -> Rollback:
    """With each span moved by its own generation's offset."""
    moved = [(span, offsets.get(span["generation"], 0.0)) for span in event.spans or []]
    if not any(offset for _, offset in moved):
        return event
    return replace(event, spans=[span | {name: span[name] + by for name in ROW_TIMES} for span, by in moved])


def lost_to(ledger: Ledger) -> dict[str, float]:
    """Seconds of `init`, `restore`, `down` and `recompute` by what caused them; they add up to these four states.

    A gap before a group's first step has the cause that the group was formed for; steps that were done again have that
    of the first group that took them back. A gap that no group has ended yet is `unfinished`.
    """
    formed = [(attempt, attempt.generation) for attempt in ledger.attempts if attempt.generation]
    causes = [*(generation.cause for _, generation in formed), str(Cause.unfinished)]
    gap_ends = list(itertools.accumulate((max(a.ready or 0.0, a.first_step_begin or 0.0) for a, _ in formed), max))
    cause_of = {generation.generation: generation.cause for _, generation in formed}
    edges = sorted({time for first, last, _ in ledger.undone for time in (first, last)})
    ahead = sorted(((first, order, last, by) for order, (first, last, by) in enumerate(ledger.undone)), reverse=True)
    covering: list[tuple[int, float, int]] = []  # a heap: what took back first, until when, and its generation
    lost: dict[str, float] = {}
    for begin, end, state in ledger.bands:
        if state not in LOST:
            continue
        cuts = edges[bisect_right(edges, begin) : bisect_left(edges, end)] if state == "recompute" else []
        for a, b in itertools.pairwise([begin, *cuts, end]):
            middle = (a + b) / 2
            if state == "recompute":
                while ahead and ahead[-1][0] <= middle:
                    heapq.heappush(covering, ahead.pop()[1:])
                while covering and covering[0][1] < middle:
                    heapq.heappop(covering)
                cause = cause_of.get(covering[0][2] if covering else 0, str(Cause.unfinished))
            else:
                cause = causes[bisect_left(gap_ends, middle)]
            lost[cause] = lost.get(cause, 0.0) + b - a
    return lost


def columns(ledger: Ledger, count: int) -> list[tuple[float, float, str]]:
    """The states in as many columns of wall time as can be seen, neighbours of one state joined.

    A column is what took most of it; but for productive time, which a third of anything else is enough to hide.
    """
    width = (ledger.end - ledger.begin) / count
    shares: list[dict[str, float]] = [{} for _ in range(count)]
    for begin, end, state in ledger.bands:
        at = begin
        while at < end and width > 0:
            column = min(count - 1, int((at - ledger.begin) / width))
            until = min(end, ledger.begin + (column + 1) * width) if column < count - 1 else end
            shares[column][state] = shares[column].get(state, 0.0) + until - at
            at = max(until, math.nextafter(at, math.inf))
    states = []
    for share in shares:
        others = {state: seconds for state, seconds in share.items() if state != "productive" and seconds > width / 3}
        states.append(max(others or share or {"other": 0.0}, key=lambda state: (others or share).get(state, 0.0)))
    cuts = [0, *(each for each in range(1, count) if states[each] != states[each - 1]), count]
    return [(ledger.begin + a * width, ledger.begin + b * width, states[a]) for a, b in itertools.pairwise(cuts)]


def _step_intervals(rows: Sequence[Row], events: Sequence[Event]) -> tuple[Floats, Floats]:
    """When each row's step began and ended, in unix seconds; no two overlap."""
    ends = np.maximum.accumulate(np.array([row["time"] for row in rows], dtype=np.float64))
    begins = ends - _column(rows, "step_s")
    for event in of_kind(events, Validation):  # step_s leaves it out, but it may lie between a step and its row
        index = np.searchsorted(ends, event.time - positive(event.seconds) / 2)
        if index < len(ends) and event.time >= begins[index]:
            begins[index] -= positive(event.seconds)
    begins[1:] = np.maximum(begins[1:], ends[:-1])
    return begins, ends


def _undone(events: Sequence[Event]) -> list[tuple[float, float, int]]:
    """From, to, and the generation that took back what was done between them; from where each first step truly began.

    Of each generation whose rows a rollback took back; older logs do not tell these apart, but for jobs.
    """
    found, validations, between = [], of_kind(events, Validation), _between_jobs(events)
    validated = [event.time for event in validations]
    for rollback in of_kind(events, Rollback):
        for begin, first_end, last in _spans(rollback, between):
            at = bisect_left(validated, begin)
            for event in validations[at : at + 1]:
                seconds = positive(event.seconds)
                begin -= seconds if event.time - seconds / 2 <= first_end else 0.0
            found.append((begin, last, rollback.generation))
    return found


def _spans(rollback: Rollback, between: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """When the first step of each span began and ended, and its last one ended. `between`: see `_between_jobs`."""
    if rollback.spans:
        return [itemgetter(*ROW_TIMES)(span) for span in rollback.spans]
    begin, last = rollback.first_time, rollback.last_time
    if begin is None or last is None:
        return []
    found, first_end = [], rollback.first_step_end or begin
    first = bisect_right(between, begin, key=itemgetter(1))
    for end, anew in between[first : bisect_right(between, last, key=itemgetter(1))]:
        if begin < end:
            found.append((begin, first_end, end))
        begin = first_end = anew
    return [*found, (begin, first_end, last)]


def _between_jobs(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From where each job was last heard to where the next one's first group was ready, in order."""
    found, heard = list[tuple[float, float]](), None
    for before, event in itertools.pairwise(events):
        if isinstance(event, Submitted) and heard is None:
            heard = max(event.heard_at or before.time, found[-1][1] if found else -math.inf)
        elif isinstance(event, Generation) and heard is not None:
            found.append((heard, event.time))
            heard = None
    return found


def _last_checkpoints(
    events: Sequence[Event], ends: Floats, undone: Sequence[tuple[float, float, int]]
) -> list[tuple[float, float]]:
    """Where a job ends: from its last step to when that was in storage, or was given up for the last time."""
    found, tried, first = [], list[float](), 0
    ends = np.sort(np.concatenate([ends, [last for _, last, _ in undone]]))  # of steps that were taken back, too
    for event in events:
        if isinstance(event, Submitted):
            tried.clear()
            first = int(np.searchsorted(ends, event.time, side="right"))  # steps before are another job's
        elif isinstance(event, Checkpoint | CheckpointFailed):
            tried.append(event.time)
        elif isinstance(event, Stopped) and tried:
            steps = ends[first : np.searchsorted(ends, event.time, side="right")]
            if len(steps) and steps[-1] < tried[-1]:
                found.append((float(steps[-1]), tried[-1]))
    return found


def _marks(events: Sequence[Event], begin: float) -> list[tuple[float, bool, Generation | None]]:
    """Cuts between attempts: each submission, and each generation that follows another one.

    The time of the cut, whether it is a submission, and the attempt's generation.
    """
    marks: list[tuple[float, bool, Generation | None]] = []
    for event in events:
        if isinstance(event, Submitted):
            marks.append((event.time, True, None))
        elif isinstance(event, Generation):
            if marks and marks[-1][2] is None:
                marks[-1] = (*marks[-1][:2], event)
            else:
                marks.append((event.time, False, event))
    if not marks:
        return [(begin, False, None)]
    marks[0] = (min(begin, marks[0][0]), *marks[0][1:])
    return marks


def _attempts(
    begins: Floats, ends: Floats, events: Sequence[Event], undone: Sequence[tuple[float, float, int]], begin: float
) -> list[Attempt]:
    attempts: list[Attempt] = []
    marks = _marks(events, begin)
    undone = sorted(undone, key=itemgetter(1))
    event_times, undone_times = [event.time for event in events], [last for _, last, _ in undone]
    for index, (mark, submitted, generation) in enumerate(marks):
        until = marks[index + 1][0] if index + 1 < len(marks) else math.inf
        own = events[bisect_left(event_times, mark) if index else 0 : bisect_left(event_times, until)]
        taken = undone[bisect_right(undone_times, mark) if index else 0 : bisect_right(undone_times, until)]
        first, past = int(np.searchsorted(ends, mark, side="right")) if index else 0, bisect_right(ends, until)
        signs = [e for e in own if is_sign_of_life(e)]
        life = [mark, *(e.time for e in signs if not isinstance(e, Stopped)), *(last for _, last, _ in taken)]
        starts = [since for since, *_ in taken]
        if past > first:
            life.append(float(ends[past - 1]))
            starts.append(float(begins[first]))
        failures = of_kind(own, Failure)
        if not starts:  # it was still starting when it failed
            life += [e.time for e in failures]
        if not any(e.time >= max(life) for e in failures):  # else no group was there that could be stopped
            life += [e.time for e in signs if isinstance(e, Stopped)]
        if index and not submitted:  # it began to form before its event, which says that it is ready
            assert generation is not None
            spent = positive(generation.init_s) + positive(generation.restore_s)
            mark = min(mark, max(mark - spent, attempts[-1].last_life))
        attempts.append(
            Attempt(
                submitted=submitted,
                begin=mark,
                generation=generation,
                last_life=max(life),
                first_step_begin=min(starts, default=None),
                failure=next((e for e in failures if e.time >= max(life)), None),
                stopped=next((e for e in reversed(own) if isinstance(e, Stopped)), None),
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
            restore_s = positive(attempt.generation.restore_s)
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


def is_sign_of_life(event: Event) -> bool:
    """Did the worker group, or the driver on its way to one, do something?

    Noticing a failure is none, nor is what keepers and the coordinator do without a group: write a checkpoint from
    memory, complain of a snapshot, find the members of the next group.
    """
    match event:
        case Stopped():
            return event.reason != "failed"
        case Checkpoint():
            return event.stall_s is not None
    return isinstance(event, Submitted | Generation | Validation | DataFallback)


def of_kind(events: Sequence[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def _column(rows: Sequence[Row], key: str) -> Floats:
    return np.array([positive(row.get(key)) for row in rows], dtype=np.float64)

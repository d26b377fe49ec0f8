"""What a run does now, as data: made of the newest lines of its logs. Pure. See docs/watching.md.

A run that stopped writing is never taken for one that trains: `silent` says since when nothing was heard of it, `gone`
that its processes are gone, `stalled` that they are there and no step comes, though it would be heard of one.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from statistics import median
from typing import Any, TypeVar

from regrow.record.events import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointFailed,
    DataFallback,
    DataWaits,
    Drain,
    Event,
    Failure,
    Forming,
    Generation,
    Quarantine,
    Row,
    Stalled,
    Stopped,
    Submitted,
    Suspected,
    Trained,
    Undrain,
    Validation,
)
from regrow.record.history import History, Interruption
from regrow.record.ledger import SILENCE_S, is_sign_of_life, of_kind
from regrow.record.log import encode, is_number, positive
from regrow.storage import split_location

Kept = TypeVar("Kept")

START_SILENCE_S = 600.0  # while a group starts or forms, which writes nothing: nodes may have to come first
GONE_S = 15.0  # without a word and with the run's lock free: long enough to start the coordinator anew
LAST = "the last step is trained; its checkpoint is being written"
UNWRITTEN = "the run folder takes no writes ({}): the job may well train; its own output says"
SHOWN = 5  # commits and interruptions
SPEED_ROWS, PACE_ROWS = 50, 200  # newest rows, of one generation, that the speed and the time left are taken from
STOPPED = {"interrupted": "it was asked to", "stop_at_step": "at train.stop_at_step"}
ENDED_AS = {"finished": "finished", "failed": "failed"}  # reasons of a `stopped` event; the others: stopped


class State(StrEnum):
    starting = "starting"  # submitted; no group has trained since
    training = "training"
    regrouping = "regrouping"  # a group is to train with other ranks, or again
    stalled = "stalled"  # no step for long, though the run's coordinator is there
    silent = "silent"  # nothing was heard for long
    gone = "gone"  # its processes are gone: it ended without a word
    unseen = "unseen"  # a job of a cluster over which its folder cannot be read; `detail` says why
    stopped = "stopped"  # in an orderly way, before its last step
    finished = "finished"
    failed = "failed"

    @property
    def over(self) -> bool:
        """Nothing more comes unless it is started again."""
        return self in (State.gone, State.stopped, State.finished, State.failed)


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    step: int
    time: float
    num_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Speed:
    """Medians over the newest steps of one generation."""

    tokens_per_s: float | None
    step_s: float
    mfu: float | None
    data_wait_share: float  # of the step
    snapshot_share: float


@dataclass(frozen=True)
class Suspicion:
    """Of a rank, or of a node's links."""

    kind: str  # of `events.SUSPICIONS`
    node: str
    since: float
    rank: int | None = None
    pid: int = 0  # 0: the node's links
    factor: float = 0.0  # that steps take longer by; 0: it hangs
    detail: str = ""


@dataclass(frozen=True)
class Status:
    """All times are unix seconds. What the logs do not tell is None."""

    run: str
    folder: str
    as_of: float
    state: State
    since: float | None = None
    detail: str = ""  # a sentence on the state
    heard_at: float | None = None  # the newest line of its logs
    submitted_at: float | None = None
    attempts: int = 0
    step: int = 0
    steps: int | None = None  # of the whole run
    stop_at_step: int | None = None
    tokens: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    generation: int | None = None
    world_size: int | None = None  # of the newest group
    spares: int = 0  # ranks that wait beside it, ready
    min_workers: int | None = None
    max_workers: int | None = None
    speed: Speed | None = None
    eta_s: float | None = None  # to the step where it ends, at its present pace
    goodput: float | None = None
    goodput_as_of: float | None = None
    effective: float | None = None  # of the same report
    paid: float | None = None
    checkpoints: list[Saved] = field(default_factory=list)  # newest first
    interruptions: list[Interruption] = field(default_factory=list)  # newest first
    causes: dict[str, int] = field(default_factory=dict)  # of all interruptions
    suspects: list[Suspicion] = field(default_factory=list)  # oldest first
    ranks: list[dict[str, Any]] = field(default_factory=list)  # of ranks.json, the slowest first
    warnings: list[str] = field(default_factory=list)
    job: list[str] = field(default_factory=list)  # what Kubernetes or Ray say of its job, where they were asked

    @property
    def last_step(self) -> int | None:
        """Where this attempt ends."""
        steps = [step for step in (self.steps, self.stop_at_step) if step is not None]
        return min(steps, default=None)

    def to_json(self) -> str:
        """One line, without values that JSON does not have."""
        return encode(asdict(self)).decode().rstrip("\n")

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "Status":
        """What `to_json` wrote, perhaps in another version. KeyError, TypeError or ValueError say that it is none."""
        given = {each.name: content[each.name] for each in fields(Status) if each.name in content}
        given["state"] = State(given["state"])
        given["speed"] = None if given.get("speed") is None else _made(Speed, given["speed"])
        given["suspects"] = [_made(Suspicion, each) for each in given.get("suspects", [])]
        given["checkpoints"] = [_made(Saved, each) for each in given.get("checkpoints", [])]
        given["interruptions"] = [_made(Interruption, each) for each in given.get("interruptions", [])]
        return Status(**given)


def _made(kind: Any, content: Mapping[str, Any]) -> Any:
    return kind(**{each.name: content[each.name] for each in fields(kind) if each.name in content})


def status_of(
    history: History,
    *,
    folder: str,
    config: Mapping[str, Any],
    now: float,
    held: bool | None = None,
    refusal: str = "",
    report: Mapping[str, Any] | None = None,
    ranks: Sequence[Mapping[str, Any]] = (),
) -> Status:
    """The status of a run.

    Of the history's rows the newest are enough, its events must be all. `held`: whether a process holds the run's
    lock, None where that cannot be known. `refusal`: why the run folder takes no writes, empty where it does.
    `report` is the newest report.json, `ranks` those of the newest ranks.json.
    """
    group, train, cluster, kept = (_group(config, name) for name in ("run", "train", "cluster", "checkpoint"))
    rows, submitted = list(history.rows), history.of(Submitted)
    newest, last = history.newest(Generation), rows[-1] if rows else {}
    heard_at = max([*(row["time"] for row in rows[-1:]), *(e.written_at for e in history.events[-1:])], default=None)
    pace_s = _pace(rows)
    last_s = positive(kept.get("timeout_s"))
    state, since, detail = _state(
        history, now, pace_s=pace_s, last_s=last_s, heard_at=heard_at, held=held, refusal=refusal
    )
    goodput, goodput_as_of = _goodput(report, submitted)
    scored = [event for event in history.of(Validation) if is_number(event.loss)]
    status = Status(
        run=str(group.get("name") or split_location(folder)[1]),
        folder=folder,
        as_of=now,
        state=state,
        since=since,
        detail=detail,
        heard_at=heard_at,
        submitted_at=submitted[0].time if submitted else None,
        attempts=len(submitted),
        step=last.get("step") or (newest.start_step if newest else 0),
        steps=train.get("steps"),
        stop_at_step=train.get("stop_at_step"),
        tokens=last.get("tokens_seen"),
        loss=last["loss"] if is_number(last.get("loss")) else None,
        validation_loss=scored[-1].loss if scored else None,
        validation_step=scored[-1].step if scored else None,
        generation=newest.generation if newest else None,
        world_size=newest.world_size if newest else None,
        spares=history.num_spares,
        min_workers=cluster.get("min_workers"),
        max_workers=cluster.get("max_workers"),
        speed=_speed(rows),
        checkpoints=[
            Saved(each.step, each.time, each.bytes, each.stall_s if each.seconds is None else each.seconds)
            for each in whole_checkpoints(history.events)[: -SHOWN - 1 : -1]
        ],
        interruptions=history.interruptions[: -SHOWN - 1 : -1],
        causes=dict(Counter(each.cause for each in history.interruptions).most_common()),
        suspects=[] if state.over else _suspects(history),
        ranks=[] if state.over else [dict(each) for each in ranks[:SHOWN]],
        warnings=[] if state is State.finished else _warnings(history, now),
        goodput=goodput,
        goodput_as_of=goodput_as_of,
        effective=_ratio(report, "effective") if goodput is not None else None,
        paid=_ratio(report, "paid") if goodput is not None else None,
    )
    trains = state in (State.training, State.regrouping) and not _has_trained(history)
    if pace_s is None or status.last_step is None or not trains:
        return status
    return replace(status, eta_s=pace_s * max(0, status.last_step - status.step))


def _state(
    history: History,
    now: float,
    *,
    pace_s: float | None,
    last_s: float,
    heard_at: float | None,
    held: bool | None,
    refusal: str,
) -> tuple[State, float | None, str]:
    """What the run does, since when, and a word on it. Its last checkpoint may take `last_s`."""
    if heard_at is None:
        return State.starting, None, "nothing is logged yet"
    ended, began = history.newest(Stopped), history.newest(Submitted)
    begun, formed = history.place(Submitted), history.place(Generation)
    if ended and history.place(Stopped) > begun:
        state = State(ENDED_AS.get(ended.reason, "stopped"))
        said = STOPPED.get(ended.reason, ended.reason.replace("_", " ")) if state is State.stopped else ""
        return state, ended.time, ended.detail or said

    ready, forming = history.newest(Generation), history.newest(Forming)
    failures = of_kind(history.events[max(begun, formed) + 1 :], Failure)
    least_s = START_SILENCE_S
    if ready is None or formed < begun:
        state, since, detail = State.starting, began.time if began else heard_at, _said(failures)
    elif _has_trained(history):
        state, since, detail, least_s = State.training, ready.time, LAST, max(START_SILENCE_S, last_s)
    elif failures:
        state, since, detail = State.regrouping, failures[0].time, _said(failures)
    elif forming and forming.generation > ready.generation:
        state, since, detail = State.regrouping, forming.time, "another group is forming"
    else:
        state, since, detail, least_s = State.training, ready.time, "", SILENCE_S

    quiet_s = now - heard_at
    patience_s = max(least_s, 10 * (pace_s or 0.0))
    before = f"it was {state.value}" + (f": {detail}" if detail else "")
    if held is False and quiet_s > GONE_S:
        return State.gone, heard_at, f"{before}; then the job ended without a word"
    if quiet_s > patience_s and refusal:
        return State.silent, heard_at, UNWRITTEN.format(refusal)
    if quiet_s > patience_s and not held:
        return State.silent, heard_at, before
    may_stall = state is State.training and not _has_trained(history)
    if may_stall and now - (alive_at := _alive_at(history, formed)) > patience_s:
        return State.stalled, alive_at, _said(event for event in history.of(Stalled) if event.time >= alive_at)
    return state, since, detail


def _has_trained(history: History) -> bool:
    """Whether the newest group has left for good: what is in memory is still to be written."""
    return history.place(Trained) > history.place(Generation)


def _alive_at(history: History, formed: int) -> float:
    """When the newest group, whose event has this place, last did something: a step, or what the ledger takes for it.

    What keepers and the coordinator tell meanwhile is none.
    """
    ready = history.newest(Generation)
    rows = [row["time"] for row in list(history.rows)[-1:] if ready and row.get("generation") == ready.generation]
    return max([*rows, *(event.time for event in history.events[formed:] if is_sign_of_life(event))])


def whole_checkpoints(events: Iterable[Event]) -> list[Checkpoint]:
    """Those that `keep_whole` keeps of these events, in the order in which they were committed."""
    kept: dict[int, Checkpoint] = {}
    for event in events:
        keep_whole(kept, event, lambda checkpoint: checkpoint)
    return list(kept.values())


def keep_whole(kept: dict[int, Kept], event: Event, made: Callable[[Checkpoint], Kept]) -> None:
    """Add what was committed, by its step and behind the others, and drop what turned out to be of no use since: as it
    was read back, as it was to be restored, or as a group began before it. `made`: what is kept of a checkpoint."""
    match event:
        case Checkpoint() if is_number(event.step):
            kept.pop(event.step, None)
            kept[event.step] = made(event)
        case CheckpointDamaged() | CheckpointFailed():
            kept.pop(event.step, None)
        case Generation() if is_number(event.start_step):
            for step in [step for step in kept if step > event.start_step]:
                del kept[step]


def _suspects(history: History) -> list[Suspicion]:
    return [
        Suspicion(each.kind, each.node, each.since or each.time, each.rank, each.pid, each.factor, each.detail)
        for each in history.suspected
    ]


def _warnings(history: History, now: float) -> list[str]:
    """What is worth a look, of the newest group and those that are to follow it."""
    ready, saved = history.newest(Generation), history.newest(Checkpoint)
    back = {event.node: event.time for event in history.of(Undrain)}
    ready_at, saved_at = ready.time if ready else -math.inf, saved.time if saved else -math.inf
    step_began = max([row["time"] - positive(row.get("step_s")) for row in list(history.rows)[-1:]], default=-math.inf)
    begun = history.place(Submitted)

    def holds(event: Event, place: int) -> bool:
        match event:
            case CheckpointFailed():
                return event.time > saved_at
            case Drain():
                return event.time > back.get(event.node, -math.inf) if event.asked else event.deadline > now
            case Quarantine():
                return place > begun and event.time + event.seconds > now  # the next job uses it again
            case DataWaits():
                return event.time >= ready_at and event.time > step_began
            case Suspected():
                return False  # `Status.suspects` has them
        return event.of_group and event.time >= ready_at

    said = [_said([event]) for place, event in enumerate(history.events) if holds(event, place)]
    fallbacks = sum(event.windows for event in history.of(DataFallback) if event.time >= ready_at)
    if fallbacks:
        said.append(f"the token stream was late {fallbacks} times in this generation; ranks read the shards directly")
    if history.rows and not is_number(history.rows[-1].get("loss")):
        said.append(f"the loss of step {history.rows[-1]['step']} is not finite")
    return list(dict.fromkeys(said))


def _speed(rows: Sequence[Row]) -> Speed | None:
    timed = [row for row in _same_generation(rows)[-SPEED_ROWS:] if positive(row.get("step_s"))]
    if not timed:
        return None
    speeds, mfus = ([row[key] for row in timed if is_number(row.get(key))] for key in ("tokens_per_s", "mfu"))
    total_s = math.fsum(row["step_s"] for row in timed)
    return Speed(
        tokens_per_s=median(speeds) if speeds else None,
        step_s=median(row["step_s"] for row in timed),
        mfu=median(mfus) if mfus else None,
        data_wait_share=math.fsum(positive(row.get("data_wait_s")) for row in timed) / total_s,
        snapshot_share=math.fsum(positive(row.get("snapshot_s")) for row in timed) / total_s,
    )


def _pace(rows: Sequence[Row]) -> float | None:
    """Seconds from one step to the next, what lies between them included; None before there were three."""
    same = _same_generation(rows)[-PACE_ROWS:]
    if len(same) < 2:
        return None
    return max(0.0, same[-1]["time"] - same[0]["time"]) / max(1, same[-1]["step"] - same[0]["step"])


def _same_generation(rows: Sequence[Row]) -> list[Row]:
    """The newest rows of one generation, without its first, which holds one-off costs, wherever one has any more."""
    parts = [list(part) for _, part in itertools.groupby(rows, key=lambda row: row.get("generation"))]
    return next((part[1:] for part in reversed(parts) if len(part) > 2), list(rows[-1:]))


def _goodput(report: Mapping[str, Any] | None, submitted: Sequence[Submitted]) -> tuple[float | None, float | None]:
    """That of the newest report, and when it was made: it begins with the first submission."""
    goodput, wall_s = (report or {}).get("goodput"), (report or {}).get("wall_s")
    if not is_number(goodput) or not is_number(wall_s) or not submitted:
        return None, None
    return goodput, submitted[0].time + (wall_s or 0.0)


def _ratio(report: Mapping[str, Any] | None, name: str) -> float | None:
    """None of a report that another version wrote."""
    found = (report or {}).get(name)
    return found if is_number(found) else None


def _said(events: Iterable[Event]) -> str:
    """What the first of these events says; empty where there is none."""
    for event in events:
        try:
            return event.sentence() or event.title
        except (TypeError, ValueError):  # of another version
            return event.title
    return ""


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}

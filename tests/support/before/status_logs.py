"""The status of a run from the newest lines of its logs. Pure.

A run that stopped writing is never taken for one that trains: `silent` says since when nothing was heard of it, `gone`
that nobody is there to write, `stalled` that somebody is and no step comes.
"""

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from regrow.record.history import Interruption
from regrow.record.log import Row
from regrow.record.status import Saved, Speed, State, Status
from support.before.ledger import SILENCE_S
from support.before.narrate import narrate

DRIVER_DIED = "driver_died"

START_SILENCE_S = 600.0  # while a group starts or forms, which writes nothing: nodes may have to come first
GONE_S = 15.0  # without a word, and nobody holding the run: long enough to start the coordinator anew
SHOWN = 5  # commits and interruptions
SPEED_ROWS, PACE_ROWS = 50, 200  # newest rows, of one generation, that the speed and the time left are taken from
WORTH_A_WARNING = (
    "straggler",
    "unfit",
    "gpu_error",
    "link_failed",
    "stalled",
    "snapshot_failed",
    "snapshot_damaged",
    "snapshot_unreadable",
    "checkpoint_damaged",
)
STOPPED = {"interrupted": "it was asked to", "stop_at_step": "at train.stop_at_step"}
ENDED_AS = {"finished": "finished", "failed": "failed"}  # reasons of a `stopped` event; the others: stopped


def status_of(
    *,
    folder: str,
    rows: Sequence[Row],
    events: Sequence[Row],
    config: Mapping[str, Any],
    now: float,
    held: bool | None = None,
    report: Mapping[str, Any] | None = None,
) -> Status:
    """The status of a run. Pure.

    `rows` are the newest that count, `events` all of them, as `read_metrics` and `read_events` return them. `held`:
    does somebody hold the run's lock? None where that cannot be known. `report` is the newest report.json.
    """
    group, train, cluster = (_group(config, name) for name in ("run", "train", "cluster"))
    submitted, begun = _named(events, "submitted"), _named(events, "generation")
    newest = begun[-1] if begun else {}
    heard_at = max([row["time"] for row in [*rows[-1:], *events[-1:]]], default=None)
    pace_s, last = _pace(rows), rows[-1] if rows else {}
    state, since, detail = _state(rows, events, now, pace_s=pace_s, heard_at=heard_at, held=held)
    interruptions = _interruptions(rows, events)
    goodput, goodput_as_of = _goodput(report, submitted)
    scored = [event for event in _named(events, "validation") if _is_number(event.get("loss"))]
    status = Status(
        run=str(group.get("name") or folder.rstrip("/").rpartition("/")[2]),
        folder=folder,
        as_of=now,
        state=state,
        since=since,
        detail=detail,
        heard_at=heard_at,
        submitted_at=submitted[0]["time"] if submitted else None,
        attempts=len(submitted),
        step=last.get("step") or newest.get("start_step") or 0,
        steps=train.get("steps"),
        stop_at_step=train.get("stop_at_step"),
        tokens=last.get("tokens_seen"),
        loss=last["loss"] if _is_number(last.get("loss")) else None,
        validation_loss=scored[-1]["loss"] if scored else None,
        validation_step=scored[-1].get("step") if scored else None,
        generation=newest.get("generation"),
        world_size=newest.get("world_size"),
        min_workers=cluster.get("min_workers"),
        max_workers=cluster.get("max_workers"),
        speed=_speed(rows),
        checkpoints=_checkpoints(events),
        interruptions=interruptions[: -SHOWN - 1 : -1],
        causes=dict(Counter(each.cause for each in interruptions).most_common()),
        warnings=[] if state is State.finished else _warnings(rows, events, now),
        goodput=goodput,
        goodput_as_of=goodput_as_of,
    )
    if pace_s is None or status.last_step is None or state not in (State.training, State.regrouping):
        return status
    return replace(status, eta_s=pace_s * max(0, status.last_step - status.step))


def _state(
    rows: Sequence[Row],
    events: Sequence[Row],
    now: float,
    *,
    pace_s: float | None,
    heard_at: float | None,
    held: bool | None,
) -> tuple[State, float | None, str]:
    """What the run does, since when, and a word on it."""
    if heard_at is None:
        return State.starting, None, "nothing is logged yet"
    last = {event["event"]: event for event in events}
    ended, began, ready = (last.get(name, {}) for name in ("stopped", "submitted", "generation"))
    if ended and ended["time"] >= began.get("time", -math.inf):
        reason = str(ended.get("reason") or "stopped")
        state = State(ENDED_AS.get(reason, "stopped"))
        said = STOPPED.get(reason, reason.replace("_", " ")) if state is State.stopped else ""
        return state, ended["time"], str(ended.get("detail") or said)

    trains = bool(ready) and ready["time"] >= began.get("time", -math.inf)
    failures = [event for event in _named(events, "failure") if event["time"] > ready.get("time", -math.inf)]
    forming = last.get("forming", {})
    if not trains:
        state, since, detail = State.starting, began.get("time", heard_at), _said(failures[:1])
    elif failures:
        state, since, detail = State.regrouping, failures[0]["time"], _said(failures[:1])
    elif forming.get("generation", 0) > ready.get("generation", 0):
        state, since, detail = State.regrouping, forming["time"], "another group is forming"
    else:
        state, since, detail = State.training, ready["time"], ""

    quiet_s = now - heard_at
    patience_s = max(SILENCE_S if state is State.training else START_SILENCE_S, 10 * (pace_s or 0.0))
    before = f"it was {state.value}" + (f": {detail}" if detail else "")
    if held is False and quiet_s > GONE_S:
        return State.gone, heard_at, f"{before}; then the job ended without a word"
    if quiet_s <= patience_s:
        return state, since, detail
    if held:
        if state is not State.training:
            return state, since, detail
        return State.stalled, heard_at, _said(e for e in events if e["event"] == "stalled" and e["time"] >= heard_at)
    return State.silent, heard_at, before


def _interruptions(rows: Sequence[Row], events: Sequence[Row]) -> list[Interruption]:
    """Every group that ended and was to be followed by another one, in order."""
    found: list[Interruption] = []
    row_times = [row["time"] for row in rows]
    open_, ranks, heard_at, running = False, None, 0.0, False
    for event in events:
        name, time = event["event"], event["time"]
        if name == "submitted":
            if running and not open_:  # the job before did not say that it stopped
                heard_at = max([heard_at, *row_times[: bisect_left(row_times, time)][-1:]])
                found.append(Interruption(heard_at, DRIVER_DIED, ranks_before=ranks))
                open_ = True
            running = True
        elif name == "stopped":
            running = open_ = False
        elif name == "failure" and not open_:
            cause, detail = str(event.get("cause") or "unknown"), str(event.get("detail") or "")
            found.append(Interruption(time, cause, detail, ranks_before=ranks))
            open_ = True
        elif name == "generation":
            if not open_ and event.get("cause") not in ("start", "resume"):  # it left in good order
                left = time - _number(event.get("init_s")) - _number(event.get("restore_s"))
                found.append(Interruption(left, str(event.get("cause") or "unknown"), ranks_before=ranks))
                open_ = True
            if open_:
                found[-1] = replace(
                    found[-1],
                    ranks_after=event.get("world_size"),
                    back_s=max(0.0, time - found[-1].time),
                    lost_steps=event.get("recomputed_steps"),
                    source=event.get("source"),
                )
            open_, ranks = False, event.get("world_size")
        heard_at = time
    return found


def _checkpoints(events: Sequence[Row]) -> list[Saved]:
    made = [
        Saved(event["step"], event["time"], event.get("bytes"), event.get("seconds", event.get("stall_s")))
        for event in _named(events, "checkpoint")
        if _is_number(event.get("step"))
    ]
    return made[: -SHOWN - 1 : -1]


def _warnings(rows: Sequence[Row], events: Sequence[Row], now: float) -> list[str]:
    """What somebody should look at, of the newest group and those that are to follow it."""
    ready = max([event["time"] for event in _named(events, "generation")], default=-math.inf)
    saved = max([event["time"] for event in _named(events, "checkpoint")], default=-math.inf)
    found = [event for event in events if event["event"] in WORTH_A_WARNING and event["time"] >= ready]
    found += [event for event in _named(events, "checkpoint_failed") if event["time"] > saved]
    found += [event for event in _named(events, "drain") if _number(event.get("deadline")) > now]
    found += [event for event in _named(events, "quarantine") if event["time"] + _number(event.get("seconds")) > now]
    said = [_said([event]) for event in sorted(found, key=lambda event: event["time"])]
    fallbacks = sum(event["time"] >= ready for event in _named(events, "data_fallback"))
    if fallbacks:
        said.append(f"the token stream was late {fallbacks} times in this generation; ranks read the shards directly")
    if rows and not _is_number(rows[-1].get("loss")):
        said.append(f"the loss of step {rows[-1]['step']} is not finite")
    return list(dict.fromkeys(said))


def _speed(rows: Sequence[Row]) -> Speed | None:
    newest = _same_generation(rows)[-SPEED_ROWS:]
    timed = [row for row in newest if _number(row.get("step_s")) > 0]
    if not timed:
        return None
    step_s = median(row["step_s"] for row in timed)
    speeds, mfus = ([row[key] for row in timed if _is_number(row.get(key))] for key in ("tokens_per_s", "mfu"))
    total_s = math.fsum(row["step_s"] for row in timed)
    return Speed(
        tokens_per_s=median(speeds) if speeds else None,
        step_s=step_s,
        mfu=median(mfus) if mfus else None,
        data_wait_share=math.fsum(_number(row.get("data_wait_s")) for row in timed) / total_s,
        snapshot_share=math.fsum(_number(row.get("snapshot_s")) for row in timed) / total_s,
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


def _goodput(report: Mapping[str, Any] | None, submitted: Sequence[Row]) -> tuple[float | None, float | None]:
    """That of the newest report, and when it was made: it begins with the first submission."""
    goodput, wall_s = (report or {}).get("goodput"), (report or {}).get("wall_s")
    if not _is_number(goodput) or not _is_number(wall_s) or not submitted:
        return None, None
    return goodput, submitted[0]["time"] + wall_s


def _said(events: Iterable[Row]) -> str:
    """What the first of these events says; empty where there is none."""
    for event in events:
        try:
            return narrate(event) or str(event["event"])
        except (KeyError, TypeError, ValueError):  # of another version
            return str(event["event"]).replace("_", " ")
    return ""


def _named(events: Iterable[Row], name: str) -> list[Row]:
    return [event for event in events if event["event"] == name]


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0

"""What has happened to a run: the one fold over its events and rows, live as they come or afterwards from its logs.

Prometheus' figures, the status, the report and a drill's verdict ask it. `seconds` is booked as time passes, `ledger`
looks back over all of it.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from regrow.record.events import (
    OF_RANKS,
    Cause,
    Cleared,
    CoordinatorRestarted,
    Event,
    Failure,
    Forming,
    Generation,
    Rollback,
    Row,
    Spares,
    Stopped,
    Submitted,
    Suspected,
    Validation,
    from_row,
)
from regrow.record.ledger import SILENCE_S, STATES, Attempt, Kind, Ledger, account, of_kind, on_one_clock
from regrow.record.log import LogReader, positive

KEPT_S = 15.0  # newest seconds that are not booked while no group trains: a `generation` event says what they were
STEPS = 10  # of silence, and SILENCE_S, after which a group that trains counts as down, as in the ledger


@dataclass(frozen=True)
class Interruption:
    """A group that ended, and what came of it. From `generation` on None until another group trains."""

    time: float
    cause: str
    detail: str = ""
    ranks_before: int | None = None
    generation: int | None = None  # of the group that trains next
    ranks_after: int | None = None
    back_s: float | None = None  # until another group was ready for its first step
    lost_steps: int | None = None
    source: str | None = None  # of the state that it went on from


class History:
    """A run so far. `seconds`: of its newest job by state, as they pass; they only grow, and add up to its time."""

    def __init__(self, *, newest_rows: int | None = None) -> None:
        """Of metrics rows, all are kept, or the newest ones; the ledger needs all."""
        self.rows: deque[Row] = deque(maxlen=newest_rows)
        self.events: list[Event] = []
        self.interruptions: list[Interruption] = []
        self.clock = StateClock(0.0)
        self.world_size: int | None = None  # ranks of the newest group
        self.num_spares = 0  # that wait beside it, in the newest job
        self._is_submitted = self._is_interrupted = False
        self._heard_at = 0.0  # the newest event

    @staticmethod
    def of_logs(rows: Iterable[Row], events: Iterable[Event | Row]) -> "History":
        """Of rows that count, in order of steps, and of events in the order in which they were written.

        A generation's rows come behind its event, whatever the clocks said; within a generation time tells.
        """
        history = History()
        typed = [event if isinstance(event, Event) else from_row(event) for event in events]
        begun = itertools.accumulate((each.generation if isinstance(each, Generation) else 0 for each in typed), max)
        timed: list[Iterable[tuple[int, float, int, Event | Row]]] = [
            ((row.get("generation") or 0, row["time"], 0, row) for row in rows),
            ((generation, event.time, 1, event) for generation, event in zip(begun, typed, strict=True)),
        ]
        for *_, entry in heapq.merge(*timed, key=itemgetter(0, 1, 2)):
            history.on(entry)
        return history

    @staticmethod
    def read(log: LogReader) -> "History":
        return History.of_logs(log.metrics(), log.events())

    def on(self, entry: Event | Row, now: float | None = None) -> None:
        """A step has ended, or something has happened: now, or when its own time says so."""
        if isinstance(entry, Event):
            self._on_event(entry, entry.time if now is None else now)
        else:
            self.rows.append(entry)
            self.clock.row(entry, entry["time"] if now is None else now)

    def tick(self, now: float) -> None:
        """Nothing has happened: book what has lasted long."""
        self.clock.tick(now)

    def resume(self, now: float) -> None:
        """Book from now on: its events so far are from a log, of another process' time."""
        phases = [event for event in self.events if isinstance(event, Submitted | Generation | Failure)]
        otherwise = {Generation: "other", Failure: "down"}
        self.clock = StateClock(now, otherwise=otherwise.get(type(phases[-1]), "init") if phases else "init")

    @property
    def seconds(self) -> dict[str, float]:
        return self.clock.seconds

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Its events of a kind, in order."""
        return of_kind(self.events, kind)

    @property
    def suspected(self) -> list[Suspected]:
        """What ranks and nodes are suspected of by now, oldest first."""
        found: dict[tuple[str, str, int], Suspected] = {}
        for event in self.events:
            match event:
                case Suspected():
                    found[event.kind, event.node, event.pid] = event
                case Cleared():
                    found.pop((event.kind, event.node, event.pid), None)
                case Generation():
                    found = {key: each for key, each in found.items() if each.kind in OF_RANKS}
                case Submitted() | CoordinatorRestarted():  # which begins anew
                    found.clear()
        return list(found.values())

    def newest(self, kind: type[Kind]) -> Kind | None:
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    def place(self, kind: type[Event]) -> int:
        """Where its newest event of a kind stands among all, -1 where there is none. Clocks may differ."""
        places = range(len(self.events) - 1, -1, -1)
        return next((place for place in places if isinstance(self.events[place], kind)), -1)

    def ledger(self, now: float) -> Ledger:
        """Where all of its time went, by hindsight."""
        return account(list(self.rows), self.events, now)

    def _on_event(self, event: Event, now: float) -> None:
        self.events.append(event)
        if isinstance(event, Submitted):
            self.clock = StateClock(now)  # what the program did before, as preparing a corpus, is none of these seconds
        self.clock.event(event, now)
        match event:
            case Submitted():
                if self._is_submitted and not self._is_interrupted:  # the job before did not say that it stopped
                    rows_at = [row["time"] for row in list(self.rows)[-1:]]
                    self._interrupted(max(self._heard_at, event.heard_at or 0.0, *rows_at), Cause.driver_died)
                self._is_submitted, self.num_spares = True, 0
            case Spares():
                self.num_spares = event.count
            case Stopped():  # of a failure that ended the job the next one's group is what came
                self._is_submitted = False
            case Failure() if not self._is_interrupted:
                self._interrupted(event.time, event.cause, event.detail)
            case Generation():
                self._formed(event)
        self._heard_at = event.time

    def _interrupted(self, time: float, cause: str, detail: str = "") -> None:
        self.interruptions.append(Interruption(time, cause, detail, ranks_before=self.world_size))
        self._is_interrupted = True

    def _formed(self, event: Generation) -> None:
        if not self._is_interrupted and event.cause not in (Cause.start, Cause.resume):  # the one before left by itself
            self._interrupted(event.time - positive(event.init_s) - positive(event.restore_s), event.cause)
        if self._is_interrupted:
            last = self.interruptions[-1]
            self.interruptions[-1] = replace(
                last,
                generation=event.generation,
                ranks_after=event.world_size,
                back_s=max(0.0, event.time - last.time),
                lost_steps=event.recomputed_steps,
                source=event.source,
            )
        self._is_interrupted, self.world_size = False, event.world_size


class StateClock:
    """Seconds by state, booked as they pass, for counters that only grow.

    It differs from the ledger where that may look back: a step that is done again counts as `recompute` when it is done
    the second time, and a long wait is booked piece by piece, before what followed says what it was.
    """

    def __init__(self, now: float, *, otherwise: str = "init") -> None:
        """Begin to count where a job is submitted, or one is found: `otherwise`, what time is that nothing explains."""
        self.seconds = dict.fromkeys(STATES, 0.0)
        self._booked_to = now
        self._otherwise = otherwise
        self._step_s = 0.0
        self._validation_s = 0.0  # since the newest row
        self._redone_to = 0  # steps up to here were done before

    def row(self, row: Mapping[str, Any], now: float) -> None:
        """A step has just ended."""
        validation_s = self._up_to(now, self._validation_s)
        step_s = self._up_to(now, positive(row["step_s"]), also=validation_s)
        self._book(self._otherwise, now - self._booked_to - validation_s - step_s)
        self._book("validation", validation_s)
        snapshot_s = min(positive(row["snapshot_s"]), step_s)
        self._book("snapshot", snapshot_s)
        if row["step"] <= self._redone_to:
            self._book("recompute", step_s - snapshot_s)
        else:
            data_s = min(positive(row["data_wait_s"]), step_s - snapshot_s)
            self._book("data", data_s)
            self._book("productive", step_s - snapshot_s - data_s)
        self._otherwise, self._step_s, self._validation_s = "other", positive(row["step_s"]), 0.0

    def event(self, event: Event, now: float) -> None:
        """Something happened to the run, just now."""
        match event:
            case Validation():
                self._validation_s += positive(event.seconds)
            case Failure():
                self._leave_steps()
                self._book(self._otherwise, now - self._booked_to)
                self._otherwise = "down"
            case Forming():
                self._leave_steps()
                self._book(self._otherwise, max(0.0, now - KEPT_S - self._booked_to))
            case Generation():
                self._leave_steps()
                restore_s = self._up_to(now, positive(event.restore_s))
                init_s = self._up_to(now, positive(event.init_s), also=restore_s)
                self._book(self._otherwise, now - self._booked_to - restore_s - init_s)
                self._book("init", init_s)
                self._book("restore", restore_s)
                self._otherwise = "init"
                self._redone_to = max(self._redone_to, event.start_step + (event.recomputed_steps or 0))
            case Stopped():
                self._book(self._otherwise, now - self._booked_to)
                self._otherwise = "other"

    def tick(self, now: float) -> None:
        """Nothing happened: book what has lasted so long that it need not wait for its explanation."""
        trains = self._otherwise == "other"
        kept_s = max(SILENCE_S, STEPS * self._step_s) if trains else KEPT_S
        if now - self._booked_to > kept_s:
            self._book("down" if trains else self._otherwise, now - self._booked_to - kept_s)

    def _leave_steps(self) -> None:
        """There was a group that trained: since its last step nothing has been done."""
        if self._otherwise == "other":
            self._otherwise = "down"

    def _up_to(self, now: float, seconds: float, *, also: float = 0.0) -> float:
        """As much of them as was not booked yet, beside others."""
        return min(seconds, max(0.0, now - self._booked_to - also))

    def _book(self, state: str, seconds: float) -> None:
        if seconds > 0:
            self.seconds[state] += seconds
            self._booked_to += seconds


def recoveries(attempts: Sequence[Attempt], rows: Iterable[Row], events: Sequence[Event]) -> list[dict[str, Any]]:
    """One entry for each generation that was not a start, in order, as report.json has them.

    `detect_s + regroup_s + reshard_s + first_step_s` is the time from the last sign of life (from the submission,
    where the job was started again) to the end of the first step.
    """
    undone: Counter[int] = Counter()
    for event in of_kind(events, Rollback):
        undone[event.generation] += event.steps
    moved, _ = on_one_clock(list(rows), events)  # as the attempts were
    ends = {(row["generation"], row["step"]): row["time"] for row in moved}
    ranks_before, entries = None, []
    for attempt, before in zip(attempts, [None, *attempts[:-1]], strict=True):
        generation = attempt.generation
        if generation is None:
            continue
        told = generation.recomputed_steps
        if generation.cause != Cause.start:
            entries.append(
                {
                    "cause": generation.cause,
                    "ranks_before": ranks_before,
                    "ranks_after": generation.world_size,
                    **_stall(attempt, generation, before, ends.get((generation.generation, generation.start_step + 1))),
                    "lost_steps": undone[generation.generation] if told is None else told,
                    "source": generation.source,
                }
            )
        ranks_before = generation.world_size
    return entries


def _stall(
    attempt: Attempt, generation: Generation, before: Attempt | None, first_step_end: float | None
) -> dict[str, float | None]:
    """The parts of one recovery in seconds; None where the logs do not tell."""
    detect_s, regroup_from = None, attempt.begin
    if before is not None and not attempt.submitted:
        regroup_from = before.last_life
    if before is not None and before.failure and before.first_step_begin is not None:
        detect_s = before.failure.time - before.last_life
        regroup_from = attempt.begin if attempt.submitted else before.failure.time
    return {
        "detect_s": _seconds(detect_s),
        "regroup_s": _seconds(generation.time - positive(generation.restore_s) - regroup_from),
        "reshard_s": _seconds(generation.restore_s),
        "first_step_s": _seconds(first_step_end - generation.time) if first_step_end is not None else None,
    }


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(positive(value), 6)

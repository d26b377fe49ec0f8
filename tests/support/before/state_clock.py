"""Seconds of a run by state, booked as they pass: what `report.account` finds afterwards, for counters that only grow.

It differs where the report may look back: a step that is done again counts as `recompute` when it is done the second
time, and a long wait is booked piece by piece, before what followed says what it was. Pure; time is an argument.
"""

from collections.abc import Mapping
from typing import Any

from support.before.ledger import SILENCE_S, STATES

KEPT_S = 15.0  # newest seconds that are not booked while no group trains: a `generation` event says what they were
STEPS = 10  # of silence, and SILENCE_S, after which a group that trains counts as down, as in the report


class StateClock:
    """The states' seconds add up to the time from the beginning to the newest moment that is booked."""

    def __init__(self, now: float, *, training: bool = False) -> None:
        """Begin to count: where a job is submitted, or, `training`, where a group is found that trains."""
        self.seconds = dict.fromkeys(STATES, 0.0)
        self._booked_to = now
        self._otherwise = "other" if training else "init"  # what time is that nothing else explains
        self._step_s = 0.0
        self._validation_s = 0.0  # since the newest row
        self._redone_to = 0  # steps up to here were done before

    def row(self, row: Mapping[str, Any], now: float) -> None:
        """A step has just ended."""
        validation_s = self._up_to(now, self._validation_s)
        step_s = self._up_to(now, row["step_s"], also=validation_s)
        self._book(self._otherwise, now - self._booked_to - validation_s - step_s)
        self._book("validation", validation_s)
        snapshot_s = min(row["snapshot_s"], step_s)
        self._book("snapshot", snapshot_s)
        if row["step"] <= self._redone_to:
            self._book("recompute", step_s - snapshot_s)
        else:
            data_s = min(row["data_wait_s"], step_s - snapshot_s)
            self._book("data", data_s)
            self._book("productive", step_s - snapshot_s - data_s)
        self._otherwise, self._step_s, self._validation_s = "other", row["step_s"], 0.0

    def event(self, event: Mapping[str, Any], now: float) -> None:
        """Something happened to the run, just now."""
        match event["event"]:
            case "validation":
                self._validation_s += event["seconds"]
            case "failure":
                self._leave_steps()
                self._book(self._otherwise, now - self._booked_to)
                self._otherwise = "down"
            case "forming":
                self._leave_steps()
                self._book(self._otherwise, max(0.0, now - KEPT_S - self._booked_to))
            case "generation":
                self._leave_steps()
                restore_s = self._up_to(now, event.get("restore_s") or 0.0)
                init_s = self._up_to(now, event.get("init_s") or 0.0, also=restore_s)
                self._book(self._otherwise, now - self._booked_to - restore_s - init_s)
                self._book("init", init_s)
                self._book("restore", restore_s)
                self._otherwise = "init"
                self._redone_to = max(self._redone_to, event["start_step"] + event.get("recomputed_steps", 0))
            case "stopped":
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

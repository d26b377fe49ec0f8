"""One run of an estimate as rows and events, for a picture: each row stands for many steps. Pure, but for the seed."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from regrow.record.events import Cause, Event, Failure, Generation, Row, Submitted
from regrow.record.log import rollback_of
from regrow.simulate.estimate import FAULT, HEAD, ORIGINS, Estimating, cause_of, events_of
from regrow.simulate.faults import DAY, draw
from regrow.simulate.inputs import Inputs
from regrow.simulate.study import faults_a_day

BEGIN = 1_700_000_000.0
SHOWN_CHANGES = 24.0
ROWS = 300  # of the whole picture, about
ROUNDED = 1e-6  # of a step


def sample(inputs: Inputs, seed: int, tokens_a_step: int) -> tuple[list[Row], list[Event]]:
    """A stretch of a run with some two dozen changes of the group."""
    changes = faults_a_day(inputs) + inputs["rate_planned"]
    days = min(inputs.days, max(0.25, SHOWN_CHANGES / changes)) if changes > 0 else min(inputs.days, 1.0)
    inputs = replace(inputs, days=days)
    draws = draw(inputs, 1, seed)
    run = Estimating(inputs, 1, len(draws.at) + len(draws.slow_at))
    told = _Told(inputs, run, tokens_a_step)
    for event in events_of(inputs, draws, seed):
        now, code, origin, notice = float(event[0][0]), int(event[1][0]), ORIGINS[int(event[3][0])], float(event[6][0])
        began, speed, before, redone = run.end[0], run.speed[0], run.changes[0], run.lost["redo"].sum()
        run.step(*event)
        if run.changes[0] > before:
            undone = float(run.lost["redo"].sum() - redone)
            told.trained(max(began, 0.0), now, float(speed))
            told.changed(now, notice if code == FAULT else 0.0, origin, code in (FAULT, HEAD), undone)
    told.trained(float(run.end[0]), days * DAY, float(run.speed[0]))
    return told.rows, told.events


class _Told:
    """What is said of a run, as it goes on."""

    def __init__(self, inputs: Inputs, run: Estimating, tokens_a_step: int) -> None:
        self.inputs, self.run, self.tokens = inputs, run, tokens_a_step
        self.rows: list[Row] = []
        self.generation, self.size = 1, inputs.job.gpus
        self.unfinished = self.undone = 0.0  # seconds of the step that a change ends; that the next group takes back
        self.events: list[Event] = [
            Submitted(time=BEGIN),
            Generation(
                time=BEGIN,
                generation=1,
                world_size=self.size,
                start_step=0,
                cause=Cause.start,
                init_s=0.0,
                restore_s=0.0,
            ),
        ]
        self.chunk_s = inputs.days * DAY / ROWS

    @property
    def at_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def trained(self, begin: float, end: float, speed: float) -> None:
        """A stretch of training."""
        step_s = self.inputs["step_s"] / speed if speed > 0 else 0.0
        steps = int(max(0.0, end - begin) / step_s) if step_s else 0
        self.unfinished = max(0.0, end - begin) - steps * step_s
        if not steps:
            return
        chunks = max(1, min(steps, round(steps * step_s / self.chunk_s)))
        edges = [0, *np.linspace(1, steps, chunks + 1).astype(int)]  # the first step by itself: it ends a standstill
        for first, last in pairwise(edges):
            if last == first:
                continue
            step = self.at_step + int(last - first)
            self.rows.append(
                {
                    "step": step,
                    "generation": self.generation,
                    "time": BEGIN + begin + float(last) * step_s,
                    "step_s": float(last - first) * step_s,
                    "world_size": self.size,
                    "tokens_seen": step * self.tokens,
                    "tokens_per_s": self.tokens / step_s,
                    "data_wait_s": 0.0,
                    "snapshot_s": 0.0,
                    "nodes_up": float(self.run.healthy[0]),
                }
            )

    def changed(self, now: float, notice: float, origin: str, failed: bool, undone: float) -> None:
        """A group was over, and another one came."""
        cause = cause_of(origin, self.inputs.policy.rolling)
        if failed:
            self.events.append(
                Failure(time=BEGIN + now + notice, cause=cause, detail=origin, generation=self.generation)
            )
        ready, self.undone = float(self.run.end[0]), self.undone + max(0.0, undone - self.unfinished)
        if self.run.speed[0] <= 0 or ready >= self.run.horizon:
            return
        self.generation += 1
        self.size = int(self.run.used[0]) * self.inputs.job.gpus_per_node
        taken, steps = self._take_back(), 0
        if taken:
            steps = taken[-1]["step"] - self.at_step
            rolled = rollback_of(taken, self.generation, self.at_step)
            self.events.append(replace(rolled, time=BEGIN + ready, steps=steps))
        self.events.append(
            Generation(
                time=BEGIN + ready,
                generation=self.generation,
                world_size=self.size,
                start_step=self.at_step,
                cause=cause,
                recomputed_steps=steps,
                init_s=max(0.0, ready - now - notice),
                restore_s=0.0,
            )
        )

    def _take_back(self) -> list[Row]:
        """The rows of the newest steps, in order, which took as long as what is undone; cut where only a part is."""
        taken: list[Row] = []
        left_s, self.undone = self.undone, 0.0
        while self.rows and left_s > 0:
            row = self.rows.pop()
            all_steps = row["step"] - self.at_step
            step_s = row["step_s"] / all_steps
            steps = min(all_steps, math.ceil(left_s / step_s - ROUNDED))
            if steps:
                taken.append(row | {"step_s": steps * step_s})
            if steps < all_steps:
                step, of_kept = row["step"] - steps, {"step_s": row["step_s"] - steps * step_s}
                of_kept |= {"step": step, "time": row["time"] - steps * step_s, "tokens_seen": step * self.tokens}
                self.rows.append(row | of_kept)
                break
            left_s -= row["step_s"]
        return taken[::-1]

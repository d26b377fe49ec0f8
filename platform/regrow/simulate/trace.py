"""One run of an estimate as rows and events, for a picture: each row stands for many steps. Pure, but for the seed."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from regrow.record.events import Cause, Event, Failure, Generation, Rollback, Row, Submitted
from regrow.simulate.estimate import FAULT, HEAD, ORIGINS, Estimating, cause_of, events_of
from regrow.simulate.faults import DAY, draw
from regrow.simulate.inputs import Inputs
from regrow.simulate.study import faults_a_day

BEGIN = 1_700_000_000.0
SHOWN_CHANGES = 24.0
ROWS = 300  # of the whole picture, about


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
            told.trained(max(began, 0.0), now, float(speed), undone)
            told.changed(now, notice if code == FAULT else 0.0, origin, code in (FAULT, HEAD), undone)
    told.trained(float(run.end[0]), days * DAY, float(run.speed[0]), 0.0)
    return told.rows, told.events


class _Told:
    """What is said of a run, as it goes on."""

    def __init__(self, inputs: Inputs, run: Estimating, tokens_a_step: int) -> None:
        self.inputs, self.run, self.tokens = inputs, run, tokens_a_step
        self.rows: list[Row] = []
        self.generation, self.at_step, self.size = 1, 0, inputs.job.gpus
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

    def trained(self, begin: float, end: float, speed: float, undone: float) -> None:
        """A stretch of training, without what was taken back."""
        step_s = self.inputs["step_s"] / speed if speed > 0 else 0.0
        steps = int(max(0.0, end - begin - undone) / step_s) if step_s else 0
        if not steps:
            return
        chunks = max(1, min(steps, round(steps * step_s / self.chunk_s)))
        edges = [0, *np.linspace(1, steps, chunks + 1).astype(int)]  # the first step by itself: it ends a standstill
        for first, last in pairwise(edges):
            if last == first:
                continue
            self.at_step += int(last - first)
            self.rows.append(
                {
                    "step": self.at_step,
                    "generation": self.generation,
                    "time": BEGIN + begin + float(last) * step_s,
                    "step_s": float(last - first) * step_s,
                    "world_size": self.size,
                    "tokens_seen": self.at_step * self.tokens,
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
        ready = float(self.run.end[0])
        if self.run.speed[0] <= 0 or ready >= self.run.horizon:
            return
        self.generation += 1
        self.size = int(self.run.used[0]) * self.inputs.job.gpus_per_node
        steps = int(undone / self.inputs["step_s"])
        if steps > 0:
            rolled = Rollback(
                time=BEGIN + ready, generation=self.generation, steps=steps, from_step=self.at_step + steps,
                to_step=self.at_step, seconds=undone, first_time=BEGIN + now - undone,
                first_step_end=BEGIN + now - undone + self.inputs["step_s"], last_time=BEGIN + now,
            )  # fmt: skip
            self.events.append(rolled)
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

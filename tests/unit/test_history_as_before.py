"""The one fold over a run's logs says what the four machines before it said, of the same logs, to the last digit."""

import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.config.schema import PretrainConfig
from regrow.record.events import from_row
from regrow.record.history import History
from regrow.record.status import status_of
from regrow.show.report import build_report
from support.before import ledger as old_ledger
from support.before import report as old_report
from support.before.state_clock import StateClock as OldClock
from support.before.status_logs import status_of as old_status_of

Row = dict[str, Any]
T0 = 1_700_000_000.0
CONFIG = {"run": {"name": "mine"}, "train": {"steps": 200}, "cluster": {"min_workers": 2, "max_workers": 4}}


class Story:
    """A run as a coordinator lives through it: rows, events, and what counts of them in the end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.step, self.generation = T0, 0, 0
        self.lived: list[Row] = []  # rows and events, in order of time
        self.rows: list[Row] = []  # that count
        self.world_size = 4

    @property
    def events(self) -> list[Row]:
        return sorted((each for each in self.lived if "event" in each), key=lambda each: each["time"])

    def pass_time(self, most_s: float) -> None:
        self.now += self.random.uniform(0.0, most_s)

    def event(self, name: str, **fields: Any) -> None:
        self.lived.append({"time": self.now, "event": name, **fields})

    def submit(self) -> None:
        self.pass_time(50)
        self.event("submitted", host="a", pid=3, geometry=["x"], versions={"torch": "2"})

    def begin(self, cause: str) -> None:
        self.pass_time(20)
        if self.random.random() < 0.8:
            self.event("forming", generation=self.generation + 1, members=[])
        self.pass_time(20)
        self.generation += 1
        start = max(0, self.step - self.random.choice([0, 0, 1, 5]))
        undone = [row for row in self.rows if row["step"] > start]
        if undone:
            self.rows = self.rows[: -len(undone)]
            times = {"first_time": undone[0]["time"] - undone[0]["step_s"], "first_step_end": undone[0]["time"]}
            fields = {"steps": len(undone), "from_step": undone[-1]["step"], "to_step": start, "seconds": 1.0}
            self.event("rollback", generation=self.generation, last_time=undone[-1]["time"], **times, **fields)
            self.pass_time(1)
        self.step, self.world_size = start, self.random.randint(1, 4)
        self.event(
            "generation",
            generation=self.generation,
            world_size=self.world_size,
            start_step=start,
            cause=cause,
            source=self.random.choice(["seed", "snapshot", "checkpoint"]),
            recomputed_steps=len(undone),
            **self.random.choice([{}, {"init_s": 3.0}, {"init_s": 40.0, "restore_s": 9.0}, {"restore_s": None}]),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            step_s = self.random.choice([0.2, 1.0, 5.0, 12.0]) * self.random.uniform(0.8, 1.2)
            self.now += step_s + self.random.choice([0.0, 0.0, 0.1])
            if self.random.random() < 0.1:
                self.now += 4.0
                self.event("validation", step=self.step, loss=3.0, seconds=self.random.choice([3.9, 1.0]))
            if self.random.random() < 0.1:
                stall = self.random.choice([{}, {"stall_s": 0.1}])
                self.event("checkpoint", step=self.step - 1, bytes=10, seconds=2.0, **stall)
            waits = {"data_wait_s": self.random.uniform(0, 0.6) * step_s, "snapshot_s": self.random.uniform(0, 0.6)}
            row = {
                "step": self.step,
                "tokens_seen": 100 * self.step,
                "loss": 8.0 / self.step,
                "step_s": step_s,
                **waits,
            }
            row |= {"tokens_per_s": 5.0, "mfu": 0.4, "world_size": self.world_size, "generation": self.generation}
            row["time"] = self.now
            self.lived.append(row)
            self.rows.append(row)

    def fail(self, cause: str) -> None:
        self.pass_time(90)
        self.event("failure", cause=cause, detail="10.0.0.3", generation=self.generation, ranks=[1])

    def incident(self, name: str) -> None:
        self.pass_time(3)
        fields: Row = {
            "stalled": {"seconds": 65.0, "stacks": "stacks/1.txt", "generation": self.generation},
            "drain": {"node": "n1", "deadline": self.now + 50},
            "quarantine": {"node": "n2", "seconds": 30.0},
            "checkpoint_failed": {"step": self.step, "detail": "disk full"},
            "snapshot_failed": {"detail": "no room"},
            "data_fallback": {"rank": 0, "window": 1, "reason": "late"},
            "parade": {"of": "another version"},
        }[name]
        self.event(name, **fields)


INCIDENTS = ["stalled", "drain", "quarantine", "checkpoint_failed", "snapshot_failed", "data_fallback", "parade"]
moves = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 12)),
        st.tuples(st.just("begin"), st.sampled_from(["grow", "drain", "worker_died", "nonfinite", "resume"])),
        st.tuples(st.just("fail"), st.sampled_from(["worker_died", "node_silent"])),
        st.tuples(st.just("incident"), st.sampled_from(INCIDENTS)),
        st.tuples(st.just("submit")),
        st.tuples(st.just("event"), st.just("stopped")),
        st.tuples(st.just("pass_time"), st.sampled_from([1.0, 100.0])),
    ),
    max_size=14,
)


def told(seed: int, story: list[tuple[Any, ...]]) -> Story:
    made = Story(seed)
    made.submit()
    for name, *arguments in story:
        fields = {"reason": "finished", "step": made.step} if name == "event" else {}
        getattr(made, name)(*arguments, **fields)
    return made


def config() -> PretrainConfig:
    made = PretrainConfig()
    made.cluster.max_workers, made.optim.num_slices = 4, 12
    return made


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), moves, st.sampled_from([0.0, 5.0, 1000.0]))
def test_the_report_is_the_same(seed: int, story: list[tuple[Any, ...]], later_s: float) -> None:
    made = told(seed, story)
    now = made.now + later_s
    history = History.of_logs(made.rows, made.events)
    ledger = history.ledger(now)
    before = old_ledger.account(made.rows, made.events, now)
    assert (ledger.begin, ledger.end, ledger.bands) == (before.begin, before.end, before.bands)
    assert build_report(history, ledger, config()) == old_report.build_report(made.rows, made.events, now, config())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), moves, st.sampled_from([0.2, 7.0, 1e9]))
def test_the_seconds_that_are_booked_as_they_pass_are_the_same(
    seed: int, story: list[tuple[Any, ...]], tick_s: float
) -> None:
    made = told(seed, story)
    history, clock = History(newest_rows=1), OldClock(T0)
    at = T0
    for line in made.lived:
        while at + tick_s < line["time"]:
            at += tick_s
            clock.tick(at)
            history.clock.tick(at)
        at = max(at, line["time"])
        if "event" not in line:
            clock.row(line, at)
            history.on(line, at)
        else:
            if line["event"] == "submitted":
                clock = OldClock(line["time"])
            clock.event(line, at)
            history.on(from_row(line), at)
        assert history.seconds == clock.seconds


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), moves, st.sampled_from([0.0, 5.0, 100.0]), st.sampled_from([None, True, False]))
def test_the_status_is_the_same(seed: int, story: list[tuple[Any, ...]], later_s: float, held: bool | None) -> None:
    made = told(seed, story)
    known: Row = {"folder": "/runs/mine", "config": CONFIG, "now": made.now + later_s, "held": held}
    before = old_status_of(rows=made.rows, events=made.events, **known)
    assert asdict(status_of(History.of_logs(made.rows, made.events), **known)) == asdict(before)


@pytest.mark.parametrize("newest", [3, 60])
def test_the_newest_rows_are_enough_for_a_status(newest: int) -> None:
    made = told(
        7, [("begin", "start"), ("train", 300), ("fail", "worker_died"), ("begin", "worker_died"), ("train", 280)]
    )
    known: Row = {"folder": "/runs/mine", "config": CONFIG, "now": made.now + 3}
    whole = status_of(History.of_logs(made.rows, made.events), **known)
    part = status_of(History.of_logs(made.rows[-newest:], made.events), **known)
    assert replace(part, eta_s=0.0, speed=None) == replace(whole, eta_s=0.0, speed=None)

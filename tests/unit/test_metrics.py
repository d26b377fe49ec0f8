"""What a run's figures are made of, and that keeping them costs nothing and harms nobody."""

import gc
import math
import re
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.util import metrics as ray_metrics

from regrow.config.schema import CheckpointConfig, ClusterConfig, PretrainConfig, RunConfig, SnapshotConfig, TrainConfig
from regrow.control.cadence import FIRST_AFTER_STEPS, Cadence
from regrow.control.spacing import FIRST
from regrow.record.events import FAILURES, GRACEFUL, Cause, Event, Rollback, from_row
from regrow.record.history import KEPT_S, History
from regrow.record.ledger import STATES
from regrow.record.status import whole_checkpoints
from regrow.record.work import RATIOS
from regrow.show import prometheus as module
from regrow.show.prometheus import FAMILIES, FIRST_ALONE_S, INCIDENTS, Figures, RunMetrics

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
T0 = 1_700_000_000.0
TOKENS = PretrainConfig().optim.global_batch_seqs * PretrainConfig().data.seq_len


def make_row(step: int, step_s: float = 1.0, **changes: Any) -> Row:
    row: Row = {
        "step": step,
        "tokens_seen": step * TOKENS,
        "loss": 8.0 - step / 100,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens_per_s": TOKENS / step_s,
        "mfu": 0.4,
        "step_s": step_s,
        "data_wait_s": 0.1 * step_s,
        "snapshot_s": 0.05 * step_s,
        "world_size": 3,
        "generation": 1,
    }
    return row | changes


def event(name: str, **fields: Any) -> Event:
    return from_row({"event": name, **fields})


def generation(number: int, start_step: int = 0, cause: str = "start", **fields: Any) -> Event:
    return event("generation", generation=number, start_step=start_step, cause=cause, world_size=3, **fields)


def make_cadence(**ways: Any) -> Cadence:
    given = {"every_steps": 100, "every_minutes": None, "automatic": False} | ways
    return Cadence(**given, mtbf_hours=24.0, now=T0)


def make_config() -> PretrainConfig:
    return PretrainConfig(
        run=RunConfig(name="llama"),
        train=TrainConfig(steps=500, stop_at_step=300),
        cluster=ClusterConfig(min_workers=2, max_workers=4),
        checkpoint=CheckpointConfig(every_steps=100),
    )


def make_figures(events: list[Event] | None = None, now: float = T0, **ways: Any) -> Figures:
    return Figures(make_config(), make_cadence(**ways), events or [], now)


def value(figures: Figures, name: str, label: str = "") -> float:
    return figures.values[f"regrow_{name}", label]


class Recorder:
    """Stands where `ray.util.metrics` does; keeps what it is handed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, tuple[str, ...]]] = []

    def Counter(self, name: str, description: str, tag_keys: tuple[str, ...]) -> "Recorder._Instrument":
        return self._Instrument(self, name, tag_keys)

    Gauge = Counter

    class _Instrument:
        def __init__(self, kept: "Recorder", name: str, tag_keys: tuple[str, ...]) -> None:
            self.kept, self.name, self.tag_keys = kept, name, tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, f"Ray refuses {value}"
            self.set(value, tags)

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == self.tag_keys
            self.kept.calls.append((self.name, value, tuple(tags.values())))

    def total(self, name: str, *labels: str) -> float:
        return math.fsum(value for called, value, tags in self.calls if (called, tags[1:]) == (name, labels))


def make_metrics(instruments: Any, notes: list[str] | None = None) -> RunMetrics:
    note = notes.append if notes is not None else pytest.fail
    return RunMetrics(make_config(), make_cadence(), [], instruments=instruments, note=note)


class Clock:
    """The time, as `time.time` tells it, which may be `set_back_s`, and `time.monotonic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.set_back_s = T0, 0.0
        monkeypatch.setattr(module.time, "time", lambda: self.now - self.set_back_s)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# time by state


def a_loss() -> list[Event | Row]:
    """Submitted at 0, ready at 10; five steps of 2 s with a validation of 1 s before the fourth's row; a rank lost at
    24 with the last step, ready again at 35, that step again and another one; stopped at 42. In order of time.
    """
    lines: list[Event | Row] = [
        event("submitted", time=T0),
        event("forming", time=T0 + 4, generation=1),
        generation(1, time=T0 + 10, init_s=5.0, restore_s=0.0, recomputed_steps=0),
    ]
    at = T0 + 10
    for step in range(1, 6):
        at += 2
        if step == 4:
            at += 1
            lines.append(event("validation", time=at, step=4, seconds=1.0))
        lines.append(make_row(step, 2.0, time=at, generation=1))
    lines += [
        event("failure", time=T0 + 24, cause="worker_died", generation=1),
        event("forming", time=T0 + 26, generation=2),
        event("rollback", time=T0 + 34.9, generation=2, steps=1, first_time=at - 2, first_step_end=at, last_time=at),
        generation(2, 4, "worker_died", time=T0 + 35, init_s=6.0, restore_s=1.0, recomputed_steps=1),
    ]
    lines += [make_row(step, 2.0, time=T0 + 35 + 2 * (step - 4), generation=2) for step in (5, 6)]
    return [*lines, event("stopped", time=T0 + 42, step=6, reason="finished")]


def time_of(line: Event | Row) -> float:
    return line.time if isinstance(line, Event) else line["time"]


def replay(history: History, lines: list[Event | Row], every_s: float = 0.2) -> None:
    """As the coordinator lives through it: ticks between what happens. It does not see rollback events."""
    at = time_of(lines[0])
    for line in lines:
        while at + every_s < time_of(line):
            at += every_s
            history.tick(at)
        if not isinstance(line, Rollback):
            history.on(line)


def found_training(at: float = T0) -> History:
    """As of a coordinator that is restarted while a group trains."""
    history = History()
    history.on(generation(1, time=at))
    history.resume(at)
    return history


def test_the_states_seconds_are_those_of_the_report() -> None:
    lines = a_loss()
    history = History()
    replay(history, lines)
    rows = [line for line in lines if not isinstance(line, Event)]
    counted = [row for row in rows if (row["step"], row["generation"]) != (5, 1)]
    events = [line for line in lines if isinstance(line, Event)]
    ledger = History.of_logs(counted, events).ledger(now=T0 + 42)
    assert ledger.time_s["recompute"] > 1
    assert ledger.time_s["down"] > 1
    # the step that was done twice had a snapshot_s each time, which the report counts once
    assert history.seconds == pytest.approx(ledger.time_s, abs=0.11)
    assert math.fsum(history.seconds.values()) == pytest.approx(42)


durations = st.floats(0.0, 200.0)
happenings = st.one_of(
    st.tuples(st.just("row"), st.integers(1, 30), durations, st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    st.tuples(st.sampled_from(["failure", "forming", "stopped", "tick", "checkpoint"])),
    st.tuples(st.just("generation"), st.integers(0, 30), durations, durations, st.integers(0, 5)),
    st.tuples(st.just("validation"), durations),
)


@given(st.lists(st.tuples(durations, happenings), max_size=40), st.booleans())
def test_whatever_happens_the_states_add_up_and_never_shrink(
    story: list[tuple[float, tuple[Any, ...]]], training: bool
) -> None:
    clock, now = History(), T0
    clock.on(event("submitted", time=T0))
    clock = found_training() if training else clock
    for passed_s, (what, *rest) in story:
        before, now = dict(clock.seconds), now + passed_s
        if what == "row":
            step, step_s, data, snapshot = rest
            waits = {"data_wait_s": data * step_s, "snapshot_s": snapshot * step_s}
            clock.on(make_row(step, 1.0) | {"step_s": step_s, **waits}, now)
        elif what == "generation":
            start, init_s, restore_s, redone = rest
            clock.on(generation(1, start, init_s=init_s, restore_s=restore_s, recomputed_steps=redone), now)
        elif what == "validation":
            clock.on(event("validation", seconds=rest[0]), now)
        elif what != "tick":
            clock.on(event(what, generation=2, step=1), now)
        clock.tick(now)
        assert all(clock.seconds[state] >= before[state] for state in STATES)
        booked_s = math.fsum(clock.seconds.values())
        assert booked_s <= now - T0 + 1e-3
        if what in ("row", "generation", "stopped", "failure"):
            assert booked_s == pytest.approx(now - T0, abs=1e-3)


def test_a_long_wait_for_nodes_is_booked_while_it_lasts() -> None:
    clock = History()
    clock.on(event("submitted", time=T0))
    clock.on(generation(1, init_s=0.0), T0)
    clock.on(make_row(1, 1.0), T0 + 1)
    clock.on(event("failure"), T0 + 2)
    clock.tick(T0 + 3600)
    assert clock.seconds["down"] == pytest.approx(3600 - 1 - KEPT_S)


def test_a_coordinator_that_is_restarted_while_its_run_waits_for_nodes_books_that_as_down_too() -> None:
    history = History()
    for line in (event("submitted", time=T0), generation(1, time=T0 + 10), event("failure", time=T0 + 100)):
        history.on(line)
    history.resume(T0 + 130)
    history.tick(T0 + 730)
    assert history.seconds["down"] == pytest.approx(600 - KEPT_S)
    assert history.seconds["init"] == 0


def test_a_group_that_says_nothing_for_a_minute_and_ten_steps_is_down_until_it_steps_again() -> None:
    clock = found_training()
    clock.on(make_row(1, 10.0, data_wait_s=0.0, snapshot_s=0.0), T0 + 10)
    clock.tick(T0 + 109)
    assert clock.seconds["down"] == 0
    clock.tick(T0 + 310)
    assert clock.seconds["down"] == pytest.approx(200)
    clock.on(make_row(2, 10.0, data_wait_s=0.0, snapshot_s=0.0), T0 + 320)
    assert clock.seconds["productive"] == pytest.approx(20)


def test_steps_that_were_done_before_are_recompute_only_as_far_as_they_were() -> None:
    clock = found_training()
    clock.on(generation(2, 4, "worker_died", recomputed_steps=2), T0)
    for step in (5, 6, 7):
        clock.on(make_row(step, 1.0, data_wait_s=0.2, snapshot_s=0.1), T0 + step - 4)
    assert clock.seconds["recompute"] == pytest.approx(2 * 0.9)
    assert clock.seconds["productive"] == pytest.approx(0.7)
    assert clock.seconds["data"] == pytest.approx(0.2)
    assert clock.seconds["snapshot"] == pytest.approx(0.3)


# figures


def test_rows_become_totals_and_newest_values() -> None:
    figures = make_figures()
    figures.event(event("submitted", time=T0), T0 + 5)
    figures.row(make_row(1, 2.0), T0 + 10)
    figures.row(make_row(2, 4.0, validation_loss=7.5), T0 + 14)
    assert value(figures, "steps_total") == 2
    assert value(figures, "tokens_total") == 2 * TOKENS
    assert value(figures, "step_seconds_total") == pytest.approx(6)
    assert value(figures, "data_wait_seconds_total") == pytest.approx(0.6)
    assert value(figures, "snapshot_wait_seconds_total") == pytest.approx(0.3)
    assert value(figures, "step") == 2
    assert value(figures, "loss") == 7.98
    assert value(figures, "validation_loss") == 7.5
    assert value(figures, "world_size") == 3
    assert value(figures, "last_step_timestamp_seconds") == T0 + 14
    assert value(figures, "submitted_timestamp_seconds") == T0
    assert (value(figures, "target_steps"), value(figures, "target_world_size")) == (300, 4)


@pytest.mark.parametrize(("address", "own"), [(None, 1), ("auto", 0)])
def test_a_ray_that_ends_with_its_job_is_told_from_one_that_it_joined(address: str | None, own: int) -> None:
    config = PretrainConfig(cluster=ClusterConfig(address=address))
    assert value(Figures(config, make_cadence(), [], T0), "own_ray") == own


def test_snapshots_are_expected_as_far_apart_as_was_set_or_chosen_and_steps_take() -> None:
    def told(figures: Figures, step_s: float) -> float | None:
        for step in (1, 2):
            figures.row(make_row(step, step_s), T0)
        figures.tick(T0)
        return figures.values.get(("regrow_snapshot_interval_seconds", ""))

    chosen = {"every_steps": 14, "before": 4, "commit_s": 5.0, "step_s": 60.0, "mtbf_s": 6e5, "steps_lost": 14}
    spaced = [event("submitted", time=T0), event("snapshot_spacing", time=T0, **chosen)]
    live = make_figures()
    for each in spaced:
        live.event(each, T0)
    for figures in (live, make_figures(spaced)):  # the second one as after a restart
        assert told(figures, 60.0) == pytest.approx(14 * 60)
    assert told(make_figures([*spaced, event("submitted", time=T0)]), 60.0) == pytest.approx(FIRST * 60)
    for every_steps, interval_s in ((3, 180.0), (0, None)):
        config = PretrainConfig(snapshot=SnapshotConfig(every_steps=every_steps))
        assert told(Figures(config, make_cadence(), [], T0), 60.0) == interval_s


def test_ranks_that_wait_are_counted_and_are_not_missing() -> None:
    config = PretrainConfig(cluster=ClusterConfig(min_workers=2, max_workers=9, spare_workers="auto"))
    config.optim.num_slices = config.optim.global_batch_seqs = 16
    figures = Figures(config, make_cadence(), [], T0)
    assert (value(figures, "target_world_size"), value(figures, "spare_ranks")) == (8, 0)
    figures.event(event("spares", count=1, nodes={"n": 1}), T0)
    assert value(figures, "spare_ranks") == 1
    figures.event(event("submitted", time=T0 + 1), T0 + 1)
    assert value(figures, "spare_ranks") == 0


@pytest.mark.parametrize("wrong", [{"loss": math.nan}, {"grad_norm": math.inf}, {"loss": math.inf}])
def test_steps_that_are_not_finite_are_counted(wrong: dict[str, float]) -> None:
    figures = make_figures()
    figures.row(make_row(1), T0 + 1)
    assert value(figures, "nonfinite_steps_total") == 0
    figures.row(make_row(2, **wrong), T0 + 2)
    assert value(figures, "nonfinite_steps_total") == 1


def test_failures_restarts_and_incidents_are_counted_by_cause() -> None:
    figures = make_figures()
    figures.event(generation(1), T0)
    figures.event(event("failure", cause="node_silent"), T0 + 1)
    assert value(figures, "world_size") == 0
    figures.event(generation(2, 7, "node_silent", recomputed_steps=3), T0 + 2)
    figures.event(event("suspected", kind="slow_compute", node="n", pid=1), T0 + 3)
    figures.event(event("note", text="of no interest"), T0 + 3)
    assert value(figures, "world_size") == 3
    assert value(figures, "generation") == 2
    assert value(figures, "failures_total", "node_silent") == 1
    assert value(figures, "restarts_total", "node_silent") == 1
    assert value(figures, "recomputed_steps_total") == 3
    assert value(figures, "incidents_total", "suspected") == 1
    assert sum(v for (name, _), v in figures.values.items() if name == "regrow_incidents_total") == 1


def test_a_group_counts_once_for_each_cause_however_many_ranks_it_loses_one_by_one() -> None:
    figures = make_figures()
    for number, causes in enumerate((["worker_died"] * 8, ["worker_hung", "worker_died", "worker_hung"]), 1):
        for rank, cause in enumerate(causes):
            figures.event(event("failure", cause=cause, generation=number, ranks=[rank]), T0 + number)
    assert value(figures, "failures_total", "worker_died") == 2
    assert value(figures, "failures_total", "worker_hung") == 1


def test_a_checkpoint_that_is_found_damaged_is_the_newest_one_no_longer() -> None:
    """Before: each damaged one renewed the time, so that no alert told of a storage that spoils them all."""
    events = [
        event("submitted", time=T0),
        generation(1, time=T0 + 5),
        event("checkpoint", step=10, time=T0 + 100),
        event("checkpoint_failed", step=10, detail="not as it was written", time=T0 + 101),
        event("checkpoint", step=20, time=T0 + 200),
        event("checkpoint", step=30, time=T0 + 300),
        event("failure", cause="worker_died", time=T0 + 300),
        event("checkpoint_damaged", step=30, detail="not as it was written", time=T0 + 350),
        generation(2, start_step=20, cause="worker_died", time=T0 + 360),
    ]
    seen = []
    figures = make_figures()
    for each in events:
        figures.event(each, each.time)
        step = figures.values.get(("regrow_checkpoint_step", ""))
        seen.append((step, value(figures, "last_checkpoint_timestamp_seconds") - T0))
    assert seen[2:] == [(10, 100), (None, 5), (20, 200), (30, 300), (30, 300), (20, 200), (20, 260)]
    again = make_figures(events, T0 + 400)
    assert (value(again, "checkpoint_step"), value(again, "last_checkpoint_timestamp_seconds") - T0) == (20, 260)


def test_a_checkpoint_that_a_run_went_back_before_is_none_any_more() -> None:
    """As after a corruption; what is undone was not trained since the one that it went back to. From memory it goes
    back to a step between two."""
    events = [
        event("submitted", time=T0),
        generation(1, time=T0 + 10),
        event("checkpoint", step=20, time=T0 + 211),
        event("checkpoint", step=50, time=T0 + 511),
        event("corruption", step=60, units=[1], ranks=[1], nodes=["n"], verified_step=40, time=T0 + 615),
        event("failure", cause="corrupted", generation=1, time=T0 + 615),
    ]
    for start_step, seen in ((20, (20, 620)), (40, (20, 216)), (0, (None, 620)), (60, (50, 516)), (50, (50, 516))):
        begun = [*events, generation(2, start_step, "corrupted", time=T0 + 620)]
        live, again = make_figures(), make_figures(begun, T0 + 630)
        for each in begun:
            live.event(each, each.time)
        for figures in (live, again):
            step = figures.values.get(("regrow_checkpoint_step", ""))
            assert (step, value(figures, "last_checkpoint_timestamp_seconds") - T0) == seen
        assert [each.step for each in whole_checkpoints(begun)][-1:] == [step] * (step is not None)


def test_what_is_safe_is_known_by_step_and_time() -> None:
    figures = make_figures()
    figures.event(event("submitted", time=T0), T0)
    assert value(figures, "last_checkpoint_timestamp_seconds") == T0
    figures.event(generation(1), T0 + 5)
    assert value(figures, "last_snapshot_timestamp_seconds") == T0 + 5
    figures.snapshot(3, T0 + 8)
    figures.event(event("checkpoint", step=3, seconds=1.5, bytes=1000), T0 + 9)
    figures.event(event("checkpoint_failed", step=4, detail="no room"), T0 + 10)
    assert (value(figures, "snapshot_step"), value(figures, "last_snapshot_timestamp_seconds")) == (3, T0 + 8)
    assert (value(figures, "checkpoint_step"), value(figures, "last_checkpoint_timestamp_seconds")) == (3, T0 + 9)
    assert (value(figures, "checkpoint_seconds_total"), value(figures, "checkpoint_bytes_total")) == (1.5, 1000)
    assert value(figures, "checkpoints_total", "committed") == 1
    assert value(figures, "checkpoints_total", "failed") == 1


def test_a_snapshot_of_a_step_that_was_taken_back_is_none() -> None:
    """The dashboard's steps that no snapshot holds were 60 below nothing."""
    for start_step, seen in ((40, None), (99, None), (100, 100), (120, 100)):
        figures = make_figures([event("submitted", time=T0)])
        figures.event(generation(1, time=T0 + 1), T0 + 1)
        figures.snapshot(100, T0 + 101)
        figures.event(event("failure", time=T0 + 102, cause="nonfinite"), T0 + 102)
        figures.event(generation(2, start_step, "nonfinite", time=T0 + 105), T0 + 105)
        assert figures.values.get(("regrow_snapshot_step", "")) == seen
        figures.snapshot(start_step, T0 + 106)
        assert value(figures, "snapshot_step") == start_step


def test_without_snapshots_no_figure_says_that_they_are_old() -> None:
    config = replace(make_config(), snapshot=SnapshotConfig(every_steps=0))
    figures = Figures(config, make_cadence(), [], T0)
    figures.event(generation(1), T0 + 5)
    assert ("regrow_last_snapshot_timestamp_seconds", "") not in figures.values


@pytest.mark.parametrize(
    ("ways", "expected"),
    [({}, 200.0), ({"every_minutes": 3}, 180.0), ({"every_steps": None, "every_minutes": 5}, 300.0)],
)
def test_the_interval_of_checkpoints_is_that_of_the_way_that_is_due_first(ways: Row, expected: float) -> None:
    figures = make_figures(**ways)
    for step in range(1, 4):
        figures.row(make_row(step, 2.0), T0 + 2 * step)
    figures.tick(T0 + 7)
    assert value(figures, "checkpoint_interval_seconds") == pytest.approx(expected)


def test_the_step_that_compiles_does_not_count_for_the_interval_of_checkpoints() -> None:
    """Before, 500 steps of 6 s were told as 150,000 s after one of 300 s, and no alert of old checkpoints came."""
    figures, now = make_figures(), T0
    for step in range(1, 6):
        now += 300.0 if step in (1, 4) else 6.0
        row = make_row(step, 300.0 if step in (1, 4) else 6.0) | {"generation": 1 + (step > 3)}
        figures.row(row, now)
        figures.tick(now)
        if step > 1:
            assert value(figures, "checkpoint_interval_seconds") == pytest.approx(6.0 * 100)


def test_before_the_first_automatic_checkpoint_the_interval_is_that_to_the_first() -> None:
    """Without one, no alert told that storage had refused every checkpoint from the beginning."""
    cadence = make_cadence(every_steps=None, automatic=True)
    figures = Figures(make_config(), cadence, [], T0)
    cadence.resumed(0, T0)
    for step in range(1, FIRST_AFTER_STEPS + 1):
        figures.row(make_row(step, 2.0), T0 + 2 * step)
    figures.tick(T0 + 50)
    assert value(figures, "checkpoint_interval_seconds") == pytest.approx(2.0 * FIRST_AFTER_STEPS)
    cadence.begun(FIRST_AFTER_STEPS, T0 + 50)
    cadence.abandoned()
    figures.tick(T0 + 60)
    assert value(figures, "checkpoint_interval_seconds") == pytest.approx(2.0 * FIRST_AFTER_STEPS)
    cadence.begun(FIRST_AFTER_STEPS, T0 + 60)
    cadence.written(took_s=10.0)
    figures.tick(T0 + 70)
    assert value(figures, "checkpoint_interval_seconds") == pytest.approx(cadence.interval_s(T0 + 70))


def test_where_no_checkpoint_is_due_no_interval_is_told() -> None:
    figures = make_figures(every_steps=None)
    figures.row(make_row(1), T0 + 1)
    figures.tick(T0 + 2)
    assert ("regrow_checkpoint_interval_seconds", "") not in figures.values


def test_a_restarted_coordinator_knows_from_the_log_what_alerts_ask_for() -> None:
    before = [
        event("submitted", time=T0 - 9000),
        event("checkpoint", time=T0 - 8000, step=10, seconds=1.0, bytes=1),
        event("submitted", time=T0 - 900),
        generation(4, 10, "resume", time=T0 - 800),
        event("checkpoint", time=T0 - 300, step=20, seconds=1.0, bytes=1),
    ]
    figures = make_figures(before)
    assert value(figures, "last_checkpoint_timestamp_seconds") == T0 - 300
    assert value(figures, "last_step_timestamp_seconds") == T0 - 800  # until the next step, which is soon
    assert value(figures, "world_size") == 3
    assert value(figures, "generation") == 4
    assert value(figures, "checkpoints_total", "committed") == 0  # counted by the process before
    figures.tick(T0 + 1000)
    assert value(figures, "state_seconds_total", "down") > 900  # a group trained, and says nothing
    assert value(figures, "state_seconds_total", "init") == 0


def restarted(*later: Event, now: float, stepped_at: float) -> Figures:
    """Of a job that began to train ten hours ago, whose coordinator is restarted, and was before."""
    events = [event("submitted", time=T0), generation(1, time=T0 + 10)]
    events += [event("checkpoint", time=T0 + 35_000, step=999), event("coordinator_restarted", time=T0 + 35_500)]
    return Figures(make_config(), make_cadence(), [*events, *later], T0 + now, stepped_at=T0 + stepped_at)


def test_a_restarted_coordinator_takes_no_snapshot_for_as_old_as_its_job() -> None:
    """Every commit is of this process' time or of one before, which no log has: ten hours were said to be at risk."""
    figures = restarted(now=36_000.0, stepped_at=35_990.0)
    assert value(figures, "last_step_timestamp_seconds") == T0 + 35_990, "or one that stands still would seem to train"
    figures.row(make_row(1000), T0 + 36_010)
    assert value(figures, "last_snapshot_timestamp_seconds") == T0 + 36_000
    figures.row(make_row(1001), T0 + 36_700)
    assert value(figures, "last_snapshot_timestamp_seconds") == T0 + 36_000, "what does not commit from here on is told"


def test_a_coordinator_that_is_restarted_without_a_group_takes_no_snapshot_for_older_either() -> None:
    failure = event("failure", time=T0 + 35_995, cause="node_silent", generation=1)
    figures = restarted(failure, now=36_000.0, stepped_at=35_990.0)
    assert value(figures, "last_step_timestamp_seconds") == T0 + 35_990
    figures.event(generation(2, 999, "node_silent", time=T0 + 38_000), T0 + 38_000)
    figures.row(make_row(1000), T0 + 38_010)
    assert value(figures, "last_snapshot_timestamp_seconds") == T0 + 38_000
    assert value(figures, "last_checkpoint_timestamp_seconds") == T0 + 35_000 + (38_000 - 35_995)


def test_a_step_of_the_job_before_is_none_of_the_job_that_a_restarted_coordinator_goes_on_with() -> None:
    figures = restarted(event("submitted", time=T0 + 35_999), now=36_000.0, stepped_at=35_990.0)
    assert value(figures, "last_step_timestamp_seconds") == T0 + 35_999
    assert ("regrow_last_snapshot_timestamp_seconds", "") not in figures.values


def test_a_run_that_is_resumed_after_a_week_has_no_old_checkpoint() -> None:
    week = 7 * 86400.0
    figures = make_figures([event("submitted", time=T0 - week), event("checkpoint", time=T0 - week, step=10)])
    figures.event(event("submitted", time=T0), T0)
    assert value(figures, "last_checkpoint_timestamp_seconds") == T0


def test_time_without_a_group_makes_no_snapshot_and_no_checkpoint_older() -> None:
    """Nodes that came after 40 minutes set off alerts until the next checkpoint. A restarted coordinator knows, too."""

    def trained_s(figures: Figures, name: str) -> float:
        return value(figures, "last_step_timestamp_seconds") - value(figures, f"last_{name}_timestamp_seconds")

    before = [
        event("submitted", time=T0),
        event("forming", time=T0 + 5, generation=1),
        generation(1, time=T0 + 10),
        event("checkpoint", time=T0 + 100, step=10, seconds=1.0, bytes=1),
        event("failure", time=T0 + 600, cause="node_silent", generation=1),
        event("forming", time=T0 + 900, generation=2),
        event("forming", time=T0 + 2990, generation=3),
        generation(3, 58, "node_silent", time=T0 + 3000),
    ]
    live, restarted = make_figures(), make_figures(before, T0 + 3000)
    for each in before:
        live.event(each, each.time)
        if each.time == T0 + 100:
            live.row(make_row(58), T0 + 598)
            live.snapshot(50, T0 + 520)
    for figures in (live, restarted):
        figures.row(make_row(59), T0 + 3010)
        assert trained_s(figures, "checkpoint") == pytest.approx(500 + 10)
    assert trained_s(live, "snapshot") == pytest.approx(80 + 10)
    live.event(generation(4, 59, "grow", time=T0 + 3020), T0 + 3020)  # with no time without a group before it
    live.row(make_row(60), T0 + 3030)
    assert trained_s(live, "checkpoint") == pytest.approx(500 + 30)
    live.event(event("failure", time=T0 + 3030, cause="node_silent"), T0 + 3030)
    live.event(event("checkpoint", time=T0 + 3060, step=60), T0 + 3060)  # of what was in memory, while none trained
    live.event(generation(5, 60, "node_silent", time=T0 + 4000), T0 + 4000)
    assert value(live, "last_checkpoint_timestamp_seconds") == T0 + 4000


def test_an_attempt_that_was_asked_to_stop_ends_at_its_last_step() -> None:
    """By that `RegrowNoProgress` knows that no step is to come, whichever coordinator tells."""
    events = [event("submitted", time=T0), generation(1, time=T0)]
    live = make_figures(events)
    live.row(make_row(7), T0 + 7)
    assert (value(live, "step"), value(live, "target_steps")) == (7, 300)
    left = event("trained", time=T0 + 8, step=7)
    live.event(left, T0 + 8)
    for figures in (live, make_figures([*events, left], T0 + 9)):
        assert (value(figures, "step"), value(figures, "target_steps")) == (7, 7)
    again = make_figures([*events, left])
    again.event(event("submitted", time=T0 + 20), T0 + 20)
    assert value(again, "target_steps") == 300
    assert ("regrow_step", "") not in again.values


def test_what_each_rank_is_does_not_stay_in_memory() -> None:
    """At 16,384 ranks that is some 20 MB a generation, in the coordinator."""

    class Kept(dict[str, Any]):
        """That a weak reference can be had of."""

    def lines(number: int) -> list[Row]:
        entries = [Kept(node="n", pid=pid) for pid in range(3)]
        kept.extend(weakref.ref(each) for each in entries)
        group = {"generation": number, "start_step": 0, "cause": "start", "world_size": 3, "workers": entries[1:]}
        return [
            {"event": "forming", "time": T0, "generation": number, "members": entries[:1]},
            {"event": "generation", "time": T0, **group},
        ]

    kept: list[weakref.ref[Kept]] = []
    made = RunMetrics(make_config(), make_cadence(), lines(1), instruments=Recorder(), note=pytest.fail)
    made.tick()
    for row in lines(2):
        made.event(from_row(row))
    row = None
    gc.collect()
    assert [each() for each in kept] == [None] * 6


def test_a_job_that_first_prepared_its_corpus_for_hours_is_late_with_nothing() -> None:
    hours = 6 * 3600.0
    figures = make_figures([])
    figures.event(event("submitted", time=T0 - hours), T0)
    figures.tick(T0 + 1)
    restarted = make_figures([event("submitted", time=T0 - hours, logged_at=T0)], T0 + 20)
    assert value(figures, "submitted_timestamp_seconds") == T0 - hours
    assert value(figures, "state_seconds_total", "init") <= 1.0
    for name in ("last_step", "last_checkpoint"):
        assert value(figures, f"{name}_timestamp_seconds") == T0
        assert value(restarted, f"{name}_timestamp_seconds") == T0
    assert value(restarted, "submitted_timestamp_seconds") == T0 - hours
    figures.event(generation(1, time=T0 + 60), T0 + 60)
    figures.event(generation(2, cause="worker_died", time=T0 + 90), T0 + 90)
    for name in ("last_step", "last_checkpoint"):
        assert value(figures, f"{name}_timestamp_seconds") == T0 + 60


# handing them to Ray


def test_every_counter_is_there_before_it_first_grows(clock: Clock) -> None:
    """Otherwise rate() and increase() miss the first failure of each kind, which is often the only one."""
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    there = {(name, *labels[1:]) for name, _, labels in kept.calls}
    assert there >= {
        (family.name, *((label,) if family.label else ()))
        for family in FAMILIES.values()
        if family.is_counter
        for label in family.values
    }
    assert kept.total("regrow_failures_total", "worker_died") < 1e-300
    clock.now += FIRST_ALONE_S
    made.event(event("failure", cause="worker_died"))
    assert kept.total("regrow_failures_total", "worker_died") == 1.0


@pytest.mark.parametrize("cause", ["worker_died", "of a newer release"])
def test_what_is_counted_before_a_counter_was_scraped_once_is_handed_over_after_that(clock: Clock, cause: str) -> None:
    """A restarted coordinator's first words, both within Ray's first report: a first value of 1 is no increase."""
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("coordinator_restarted", generation=1))
    for _ in range(int(FIRST_ALONE_S)):
        made.event(event("failure", cause=cause))
        assert kept.total("regrow_incidents_total", "coordinator_restarted") < 1e-300
        assert kept.total("regrow_failures_total", cause) < 1e-300
        clock.now += 1
    made.tick()
    assert kept.total("regrow_incidents_total", "coordinator_restarted") == 1
    made.tick()
    clock.now += 2
    made.tick()
    assert kept.total("regrow_failures_total", cause) == int(FIRST_ALONE_S)


def test_a_run_that_stops_holds_nothing_back(clock: Clock) -> None:
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    clock.now += 1
    made.event(event("failure", cause="worker_died"))
    made.event(event("stopped", reason="failed", step=3))
    assert kept.total("regrow_failures_total", "worker_died") == 1
    assert kept.total("regrow_stops_total", "failed") == 1
    only = Recorder()
    made = make_metrics(only)
    made.event(event("stopped", reason="failed", step=0))
    clock.now += 1
    made.tick()
    assert only.total("regrow_stops_total", "failed") == 1


def test_what_ray_is_handed_adds_up_and_comes_at_most_once_a_second(clock: Clock) -> None:
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    handed_at = set()
    for step in range(1, 201):
        clock.now += 0.02
        before = len(kept.calls)
        made.row(make_row(step, 0.02))
        made.tick()
        if len(kept.calls) > before:
            handed_at.add(clock.now)
    assert len(handed_at) == 3
    clock.now += FIRST_ALONE_S
    made.tick()
    assert kept.total("regrow_steps_total") == 200
    assert kept.total("regrow_step_seconds_total") == pytest.approx(4)


def test_what_does_not_change_is_told_again_and_again_but_for_counters(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray forgets a gauge that it is not told of for two of its reports."""
    monkeypatch.setattr(module, "FIRST_ALONE_S", 0.0)
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    calls = len(kept.calls)
    clock.now += 1
    made.tick()
    told = {name for name, *_ in kept.calls[calls:]}
    assert told >= {"regrow_running", "regrow_target_world_size", "regrow_last_step_timestamp_seconds"}
    assert {name for name in told if FAMILIES[name].is_counter} == {"regrow_metrics_cpu_seconds_total"}


def test_a_clock_that_is_set_back_keeps_nothing_from_ray(clock: Clock) -> None:
    """Ray had forgotten the gauges meanwhile, and `RegrowRunLost` fired."""
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    for set_back_s in (3600.0, 0.0):
        clock.set_back_s = set_back_s
        clock.now += 1
        calls = len(kept.calls)
        made.tick()
        assert "regrow_running" in {name for name, *_ in kept.calls[calls:]}


def test_an_orderly_end_is_told_at_once(clock: Clock) -> None:
    kept = Recorder()
    made = make_metrics(kept)
    made.event(event("submitted", time=T0))
    made.event(event("stopped", reason="finished", step=3))
    assert kept.total("regrow_stops_total", "finished") == 1
    assert [value for name, value, _ in kept.calls if name == "regrow_running"] == [1, 0]


def test_a_report_brings_the_goodput_of_the_whole_run(clock: Clock) -> None:
    kept = Recorder()
    made = make_metrics(kept)
    made.reported(dict.fromkeys(RATIOS))
    assert not [name for name, *_ in kept.calls if "goodput" in name]
    clock.now += 2
    made.reported({"goodput": 0.9, "effective": 0.85, "paid": 0.8, "capacity_goodput": 0.7})
    for ratio, share in (("goodput", 0.9), ("effective", 0.85), ("paid", 0.8)):
        assert [value for name, value, _ in kept.calls if name == f"regrow_{ratio}_ratio"] == [share]


def test_what_fails_here_is_noted_once_and_harms_nobody(clock: Clock) -> None:
    class Broken(Recorder):
        def Counter(self, *arguments: Any, **more: Any) -> Any:
            raise ValueError("no such thing\nas this")

    notes: list[str] = []
    made = make_metrics(Broken(), notes)
    made.event(event("submitted", time=T0))
    made.row(make_row(1))
    made.row({"step": 2})
    assert notes == ["no more metrics: no such thing"]


def test_rows_that_make_no_sense_are_noted_and_harm_nobody() -> None:
    notes: list[str] = []
    make_metrics(Recorder(), notes).row({"step": 2})
    assert len(notes) == 1


def test_a_log_that_makes_no_sense_does_not_keep_a_coordinator_from_coming_back() -> None:
    notes: list[str] = []
    broken = [{"event": "generation", "time": T0, "generation": 1}]  # of how many ranks?
    kept = Recorder()
    made = RunMetrics(make_config(), make_cadence(), broken, instruments=kept, note=notes.append)
    made.tick()
    assert notes == []
    assert [value for name, value, _ in kept.calls if name == "regrow_running"] == [1]


def test_switched_off_it_does_nothing() -> None:
    made = make_metrics(None)
    made.event(event("submitted", time=T0))
    made.row({"nonsense": 1})
    assert made.cpu_s == 0


def test_rays_own_counters_and_gauges_take_all_of_it(clock: Clock) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make_metrics(ray_metrics)
        made.event(event("submitted", time=T0))
        for step in range(1, 100):
            clock.now += 1
            made.row(make_row(step, loss=math.nan if step % 2 else 1.0))
        made.event(event("stopped", reason="failed", step=99))
    assert made.cpu_s > 0


# names


def test_ranks_are_shown_with_what_they_spend_a_step_on_and_those_that_are_gone_are_not() -> None:
    figures = Figures(make_config(), make_cadence(), [], T0)
    row = {"rank": 3, "compute_s": 0.5, "memory_bytes": 7, "temperature_c": None}
    figures.ranks([row, row | {"rank": 0, "compute_s": 0.4}], [{"kind": "slow_compute"}])
    assert value(figures, "rank_compute_seconds", "3") == 0.5
    assert value(figures, "rank_memory_bytes", "0") == 7
    assert ("regrow_rank_temperature_celsius", "3") not in figures.values
    assert (value(figures, "slowest_rank"), value(figures, "suspects", "slow_compute")) == (3, 1)
    figures.ranks([row | {"rank": 1}], [])
    assert {key[1] for key in figures.values if key[0] == "regrow_rank_compute_seconds"} == {"1"}
    assert value(figures, "suspects", "slow_compute") == 0


@pytest.mark.parametrize("over", ["failure", "forming", "stopped"])
def test_while_no_group_trains_no_rank_is_slow(over: str) -> None:
    """A rank that had died computed slowly for as long as nodes were waited for."""
    figures = make_figures()
    figures.event(generation(1, time=T0 + 1), T0 + 1)
    row, slow = {"rank": 3, "compute_s": 0.5}, [{"kind": "slow_compute"}]
    figures.ranks([row], slow)
    figures.event(event(over, time=T0 + 9, cause="node_silent", generation=2), T0 + 9)
    figures.ranks([row], slow)  # of a reading that was under way
    assert value(figures, "suspects", "slow_compute") == 0
    assert not [key for key in figures.values if key[0] in ("regrow_rank_compute_seconds", "regrow_slowest_rank")]
    figures.event(generation(2, 5, "node_silent", time=T0 + 20), T0 + 20)
    figures.ranks([row], slow)
    assert (value(figures, "slowest_rank"), value(figures, "suspects", "slow_compute")) == (3, 1)


def test_a_group_that_died_with_its_driver_trains_no_more_once_the_run_is_submitted_again() -> None:
    """Nothing in its log says that it did: it counted as ranks that train for as long as nodes were waited for."""
    died: list[Event] = [event("submitted", time=T0), generation(1, time=T0 + 5)]
    again = event("submitted", time=T0 + 2000)
    live = make_figures(died, T0 + 1000)
    live.ranks([{"rank": 3, "compute_s": 0.5}], [{"kind": "slow_compute"}])
    assert value(live, "world_size") == 3
    live.event(again, T0 + 2000)
    assert value(live, "suspects", "slow_compute") == 0
    assert ("regrow_rank_compute_seconds", "3") not in live.values
    new = make_figures()
    new.event(event("submitted", time=T0), T0)
    for figures in (live, make_figures([*died, again], T0 + 2100), new):
        assert value(figures, "world_size") == 0
        figures.event(generation(2, time=T0 + 2200), T0 + 2200)
        assert value(figures, "world_size") == 3


def test_a_row_that_comes_after_its_groups_failure_makes_no_group() -> None:
    figures = make_figures([event("submitted", time=T0)])
    figures.event(generation(1, time=T0 + 1), T0 + 1)
    figures.event(event("failure", time=T0 + 3, cause="worker_died"), T0 + 3)
    figures.row(make_row(2), T0 + 3.1)
    assert (value(figures, "step"), value(figures, "world_size")) == (2, 0)


def test_figures_by_node_are_those_of_the_newest_reports() -> None:
    figures = make_figures()
    row = {"node": "ab" * 20, "seconds": 2.0, "check_s": 0.5, "send_s": 1.5, "bytes": 10}
    figures.node_snapshots([row])
    assert value(figures, "node_snapshot_send_seconds", "abababababab") == 1.5
    figures.node_snapshots([row | {"node": "c"}])
    assert {key[1] for key in figures.values if key[0] == "regrow_node_snapshot_bytes"} == {"c"}


def test_names_follow_prometheus() -> None:
    for family in FAMILIES.values():
        assert re.fullmatch(r"regrow_[a-z]+(_[a-z]+)*", family.name), family.name
        assert not re.search(r"_(ms|s|gb|mb|percent|minutes|hours|count)(_|$)", family.name), "base units only"
        assert family.label in ("", "cause", "state", "reason", "result", "kind", "rank", "node")
        assert (family.label in ("", "rank", "node")) == (family.values == ("",))
        assert family.help[0].islower() or family.help[0].isdigit() or family.help.startswith(("CPU", "FLOPs"))


def test_labels_know_every_cause_and_incident_beforehand() -> None:
    """A value that is not known beforehand is counted all the same, but the first one shows late."""
    assert set(FAMILIES["regrow_failures_total"].values) == set(FAILURES)
    assert set(FAMILIES["regrow_restarts_total"].values) == {*FAILURES, *GRACEFUL, Cause.resume}
    events = set(re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs/file-formats.md").read_text(), re.MULTILINE))
    assert set(INCIDENTS) <= events


def test_the_documentation_lists_every_figure() -> None:
    documented = dict(re.findall(r"^\| `(ray_regrow_[a-z_]+)`[^|]* \| (.+?) \|$", DOCUMENT.read_text(), re.MULTILINE))
    assert documented == {f"ray_{family.name}": family.help for family in FAMILIES.values()}

import dataclasses
import io
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from regrow.config.schema import PretrainConfig
from regrow.errors import RegrowError
from regrow.record.events import Checkpoint, Failure, Generation, Stopped, Submitted, Validation
from regrow.record.history import History
from regrow.record.ledger import LOST, MOST_START_S, STATES, columns, on_one_clock
from regrow.record.log import RunLog, encode, read_events, read_metrics, rollback_of
from regrow.show import report as module
from regrow.show.compare import (
    MOST_RUNS,
    RunData,
    agreement,
    as_table,
    comparison,
    differing_settings,
    labels,
    load_run,
    load_runs,
)
from regrow.show.page import data_mix
from regrow.show.report import make_report, write_report
from regrow.show.timeline import LEFT, WIDTH, number_ticks, time_ticks
from regrow.storage import Storage
from support.rows import T0, event, generation, make_row

REPORT_KEYS = [
    "steps",
    "tokens",
    "final_loss",
    "wall_s",
    "goodput",
    "effective",
    "paid",
    "capacity_goodput",
    "time_s",
    "work",
    "lost_s",
    "restarts",
    "generations",
    "recoveries",
    "data_fallbacks",
    "checkpoints",
]
RECOVERY_KEYS = [
    "cause",
    "ranks_before",
    "ranks_after",
    "detect_s",
    "regroup_s",
    "reshard_s",
    "first_step_s",
    "lost_steps",
    "source",
]
REPO = Path(__file__).parents[2]


def config(max_workers: int = 4, num_slices: int = 12) -> PretrainConfig:
    made = PretrainConfig()
    made.cluster.max_workers, made.optim.num_slices = max_workers, num_slices
    return made


def build_report(metrics: list[Any], events: list[Any], now: float, config: Any) -> dict[str, Any]:
    history = History.of_logs(metrics, events)
    return module.build_report(history, history.ledger(now), config)


def assert_adds_up(report: dict[str, Any]) -> None:
    assert list(report) == REPORT_KEYS
    assert set(report["time_s"]) == set(STATES)
    assert all(seconds >= 0 for seconds in report["time_s"].values())
    assert math.fsum(report["time_s"].values()) == pytest.approx(report["wall_s"], abs=1e-5)
    lost_s = math.fsum(report["time_s"][state] for state in LOST)
    assert math.fsum(report["lost_s"].values()) == pytest.approx(lost_s, abs=1e-5)
    json.dumps(report, allow_nan=False)


def one_loss() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Submitted at 0, ready at 10 on 4 ranks; 5 steps of 2 s, a checkpoint (2 s) and a validation (1 s) with the 4th;
    a rank lost at 24, noticed at 26; ready again on 3 ranks at 35 from step 4; 3 steps of 2 s; stopped at 42.
    """
    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start", init_s=5.0, restore_s=0.0),
        event("validation", 19, step=4, loss=2.5, seconds=1.0),
        event("checkpoint", 21, step=4, stall_s=2.0, bytes=1000, generation=1),
        event("failure", 26, cause="node_died", detail="10.0.0.3", generation=1),
        event(
            "rollback",
            33,
            generation=2,
            from_step=5,
            to_step=4,
            steps=1,
            seconds=2.0,
            first_time=T0 + 21,
            last_time=T0 + 23,
        ),
        generation(2, 35, 3, 4, "node_died"),
        event("stopped", 42, step=7, reason="finished"),
    ]
    metrics = [make_row(step, T0 + 10 + 2 * step, 2.0, data_wait_s=0.25) for step in (1, 2, 3)]
    metrics.append(make_row(4, T0 + 21, 4.0, snapshot_s=2.0, data_wait_s=0.25, validation_loss=2.5))
    metrics += [make_row(step, T0 + 35 + 2 * (step - 4), 2.0, 2, world_size=3) for step in (5, 6, 7)]
    return metrics, events


def test_every_second_of_a_run_with_a_loss_is_where_it_belongs() -> None:
    metrics, events = one_loss()
    report = build_report(metrics, events, now=T0 + 1000, config=config())
    assert_adds_up(report)
    assert report["time_s"] == pytest.approx(
        {
            "productive": 7 * 2.0 - 4 * 0.25,
            "init": 10.0 + 3.0,  # from the submission, and what the second group says it took
            "restore": 1.0,
            "snapshot": 2.0,
            "data": 4 * 0.25,
            "recompute": 2.0,
            "down": 35 - 4 - 23,
            "validation": 1.0,
            "other": 1.0,  # from the last step to `stopped`
        },
        abs=1e-5,
    )
    assert report["wall_s"] == 42
    assert report["goodput"] == pytest.approx(13 / 42, abs=1e-6)
    assert report["capacity_goodput"] == pytest.approx((7.0 + 6.0 * 3 / 4) / 42, abs=1e-6)


def test_windows_that_the_stream_did_not_deliver_are_counted_though_few_events_tell_of_them() -> None:
    metrics, events = one_loss()
    told = [event("data_fallback", 12, rank=0, window=window, windows=count) for window, count in ((1, 1), (3, 2))]
    older = event("data_fallback", 11, rank=0, window=0)
    report = build_report(metrics, [*events[:2], older, *told, *events[2:]], now=T0 + 1000, config=config())
    assert report["data_fallbacks"] == 4


def test_a_recovery_is_told_by_its_parts() -> None:
    metrics, events = one_loss()
    report = build_report(metrics, events, now=T0 + 1000, config=config())
    (recovery,) = report["recoveries"]
    assert list(recovery) == RECOVERY_KEYS
    assert recovery == {
        "cause": "node_died",
        "ranks_before": 4,
        "ranks_after": 3,
        "detect_s": 3.0,
        "regroup_s": 8.0,
        "reshard_s": 1.0,
        "first_step_s": 2.0,
        "lost_steps": 1,
        "source": "checkpoint",
    }
    parts = ("detect_s", "regroup_s", "reshard_s", "first_step_s")
    assert sum(recovery[part] for part in parts) == 37 - 23  # from the last sign of life to the first new step
    assert report["restarts"] == {"node_died": 1}
    assert (report["generations"], report["checkpoints"]) == (2, {"committed": 1, "stall_s": 2.0})
    assert (report["steps"], report["tokens"], report["final_loss"]) == (7, 700, 8 / 7)


def test_what_starting_and_interruptions_cost_is_known_by_cause() -> None:
    metrics, events = one_loss()
    report = build_report(metrics, events, now=T0 + 1000, config=config())
    assert report["lost_s"] == pytest.approx({"start": 10.0, "node_died": 8.0 + 3.0 + 1.0 + 2.0})
    running = build_report(metrics[:4], events[:5], now=T0 + 50, config=config())
    assert running["lost_s"] == pytest.approx({"start": 10.0, "unfinished": 50.0 - 21.0})


def test_steps_that_were_done_again_are_the_fault_of_the_first_group_that_took_them_back() -> None:
    def undone(at: float, generation: int, first: float, last: float) -> dict[str, Any]:
        times = {"first_time": T0 + first, "last_time": T0 + last, "seconds": last - first}
        return event("rollback", at, generation=generation, from_step=9, to_step=1, steps=1, **times)

    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start", init_s=10.0, restore_s=0.0),
        event("failure", 30, cause="worker_died"),
        undone(31, 2, 26, 30),  # the last 4 of 20 s
        generation(2, 34, 3, 8, "worker_died", init_s=4.0, restore_s=0.0),
        event("failure", 54, cause="nonfinite"),
        undone(55, 3, 10, 54),  # all that was done so far, the 4 s once more
        generation(3, 56, 3, 0, "nonfinite", init_s=2.0, restore_s=0.0),
        event("stopped", 56, step=0, reason="interrupted"),
    ]
    report = build_report([], events, now=T0 + 99, config=config())
    assert_adds_up(report)
    assert report["time_s"]["recompute"] == pytest.approx(44.0)  # the gap between them counts, too
    assert report["lost_s"] == pytest.approx({"start": 10.0, "worker_died": 4.0, "nonfinite": 40.0 + 2.0})


def rolled_back(at: float, generation: int, to_step: int, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """The event of these rows, as the log writes it."""
    return {**rollback_of(taken, generation, to_step).to_row(), "time": T0 + at}


def test_what_a_group_trained_is_no_time_to_form_the_next_where_one_rollback_took_back_the_steps_of_both() -> None:
    """Ten minutes of the second group's steps were the third one's `regroup_s`, and it was drawn without width."""
    first = [make_row(step, T0 + 10 + step, 1.0, 1, world_size=2) for step in range(1, 101)]
    second = [make_row(100 + step, T0 + 112 + step, 1.0, 2, world_size=3) for step in range(1, 601)]
    third = [make_row(700 + step, T0 + 724 + step, 1.0, 3) for step in range(1, 11)]
    again = [make_row(100 + step, T0 + 750 + step, 1.0, 4, world_size=2) for step in range(1, 21)]
    events = [
        event("submitted", 0),
        generation(1, 10, 2, 0, "start", init_s=10.0, restore_s=0.0),
        generation(2, 112, 3, 100, "grow", init_s=1.0, restore_s=0.5),
        event("failure", 714, cause="worker_died", generation=2),
        generation(3, 724, 4, 700, "worker_died", init_s=3.0, restore_s=0.5),
        event("failure", 736, cause="worker_died", generation=3),
        rolled_back(749, 4, 100, second + third),
        generation(4, 750, 2, 100, "worker_died", init_s=3.0, restore_s=1.0, recomputed_steps=610),
        event("stopped", 770, step=120, reason="interrupted"),
    ]
    report = build_report(first + again, events, now=T0 + 999, config=config())
    assert_adds_up(report)
    assert report["time_s"]["recompute"] == pytest.approx(610.0)
    assert report["lost_s"] == pytest.approx({"start": 10.0, "grow": 2.0, "worker_died": 12.0 + 610.0 + 16.0})
    told = [(each["detect_s"], each["regroup_s"], each["reshard_s"]) for each in report["recoveries"]]
    assert told == [(None, 1.5, 0.5), (2.0, 9.5, 0.5), (2.0, 13.0, 1.0)]
    attempts = History.of_logs(first + again, events).ledger(T0 + 999).attempts
    lives = [(each.first_step_begin, each.last_life) for each in attempts]
    assert lives[1:3] == [(T0 + 112, T0 + 712), (T0 + 724, T0 + 734)]


@pytest.mark.parametrize(
    ("behind_s", "between_s", "told"),
    [
        (0.0, 86400.0 - 112.0, {"spans", "heard_at"}),
        (90000.0, 0.0, {"spans", "heard_at"}),
        (0.0, 86400.0 - 112.0, {"heard_at"}),  # older logs
        (0.0, 86400.0 - 112.0, set[str]()),
    ],
)
def test_steps_of_two_jobs_that_one_rollback_took_back_were_done_again_and_the_day_between_was_not(
    behind_s: float, between_s: float, told: set[str]
) -> None:
    """A day without a job was `recompute`. Where the second job's clock is behind, its own steps move alone."""
    day = 86400.0 - behind_s  # by the second job's clock
    first = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 101)]
    second = [make_row(100 + step, T0 + day + 10 + step, 1.0, 2) for step in range(1, 21)]
    again = [make_row(50 + step, T0 + day + 36 + step, 1.0, 3) for step in range(1, 101)]
    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start", init_s=10.0, restore_s=0.0),
        event("stopped", 112, step=100, reason="interrupted"),
        event("submitted", day, heard_at=T0 + 110),
        generation(2, day + 10, 4, 100, "resume", init_s=5.0, restore_s=1.0),
        event("failure", day + 32, cause="worker_died", generation=2),
        rolled_back(day + 34, 3, 50, first[50:] + second),
        generation(3, day + 36, 4, 50, "worker_died", init_s=3.0, restore_s=1.0, recomputed_steps=70),
        event("stopped", day + 136, step=150, reason="finished"),
    ]
    without = {"spans", "heard_at"} - told
    events = [{key: value for key, value in each.items() if key not in without} for each in events]
    report = build_report(first[:50] + again, events, now=T0 + 1e6, config=config())
    assert_adds_up(report)
    waited_s = 0.0 if told else 2.0  # of the first job for its end
    assert report["time_s"]["recompute"] == pytest.approx(70.0 + waited_s, abs=1e-5)
    assert report["time_s"]["down"] == pytest.approx(between_s + 2.0, abs=1e-5)
    assert report["lost_s"] == pytest.approx(
        {"start": 10.0, "resume": between_s + 10.0, "worker_died": 70.0 + waited_s + 6.0}, abs=1e-5
    )


def test_jobs_without_a_step_between_those_that_a_rollback_took_back_are_none_of_it() -> None:
    """Of an older log, which tells of one span: the second job had a group, and no step."""
    taken = [make_row(step, T0 + 10 + step, 1.0) for step in range(51, 101)]
    taken += [make_row(100 + step, T0 + 6010 + step, 1.0, 3) for step in range(1, 21)]
    whole = rolled_back(6034, 4, 50, taken)
    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start", init_s=10.0, restore_s=0.0),
        event("submitted", 3000, heard_at=T0 + 110),
        generation(2, 3010, 4, 100, "resume", init_s=9.0, restore_s=1.0),
        event("stopped", 3020, step=100, reason="failed"),
        event("submitted", 6000, heard_at=T0 + 110),
        generation(3, 6010, 4, 100, "resume", init_s=9.0, restore_s=1.0),
        event("failure", 6030, cause="worker_died", generation=3),
        {key: value for key, value in whole.items() if key != "spans"},
        generation(4, 6034, 4, 50, "worker_died", init_s=4.0, restore_s=0.0),
        event("stopped", 6044, step=60, reason="interrupted"),
    ]
    metrics = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 51)]
    metrics += [make_row(50 + step, T0 + 6034 + step, 1.0, 4) for step in range(1, 11)]
    report = build_report(metrics, events, now=T0 + 1e6, config=config())
    assert_adds_up(report)
    assert report["time_s"]["recompute"] == pytest.approx(70.0)
    attempts = History.of_logs(metrics, events).ledger(T0 + 1e6).attempts
    assert [each.first_step_begin for each in attempts] == [T0 + 10, None, T0 + 6010, T0 + 6034]


def test_a_run_resumed_after_its_driver_was_killed_counts_the_time_between_as_down() -> None:
    metrics = [make_row(step, T0 + 10 + step, 1.0) for step in (1, 2)]
    metrics += [make_row(3, T0 + 520, 2.0, 2)]
    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start"),
        event("submitted", 500),
        generation(2, 518, 4, 2, "resume", restore_s=4.0),
        event("stopped", 520, step=3, reason="stop_at_step"),
    ]
    report = build_report(metrics, events, now=T0 + 9999, config=config())
    assert_adds_up(report)
    assert report["time_s"] == pytest.approx(
        dict.fromkeys(STATES, 0.0) | {"init": 9 + 14, "restore": 5, "productive": 4, "down": 488}
    )
    (recovery,) = report["recoveries"]
    assert (recovery["cause"], recovery["ranks_before"], recovery["lost_steps"]) == ("resume", 4, 0)
    assert recovery["detect_s"] is None  # nobody was there to notice
    assert (recovery["regroup_s"], recovery["reshard_s"], recovery["first_step_s"]) == (14.0, 4.0, 2.0)


def test_a_validation_between_a_step_and_its_row_does_not_eat_the_step() -> None:
    events = [
        event("submitted", 0),
        generation(1, 0, 4, 0, "start", init_s=0.0, restore_s=0.0),
        event("validation", 9.001, step=1, loss=1.0, seconds=8.0),
        event("stopped", 10, step=2, reason="finished"),
    ]
    metrics = [make_row(1, T0 + 9.0, 1.0), make_row(2, T0 + 10, 1.0)]
    report = build_report(metrics, events, now=T0, config=config())
    assert_adds_up(report)
    assert report["time_s"] == pytest.approx(
        dict.fromkeys(STATES, 0.0) | {"productive": 2.0, "validation": 8.0}, abs=0.01
    )


def test_a_checkpoint_is_counted_once_whether_or_not_its_step_includes_it() -> None:
    for step_s, snapshot_s in ((5.0, 4.0), (5.0, 0.0), (1.0, 0.0)):
        events = [event("submitted", 0), event("checkpoint", 5, step=1, stall_s=4.0), event("stopped", 5, step=1)]
        row = make_row(1, T0 + (5 if step_s == 5 else 1), step_s, snapshot_s=snapshot_s)
        report = build_report([row], events, now=T0, config=config())
        assert_adds_up(report)
        assert report["time_s"]["snapshot"] == pytest.approx(4.0)
        assert report["time_s"]["productive"] == pytest.approx(1.0)


def test_a_run_that_ends_waits_for_its_last_checkpoint_until_that_is_in_storage_or_given_up() -> None:
    """Storage was away: a node that is lost meanwhile changes nothing of it. What comes after, with no group there, is
    `down`: 8 s until Ctrl-C were in `other` in soak seed 2451."""
    begun = [event("submitted", 0), generation(1, 0, 2, 0, "start", init_s=0.0, restore_s=0.0)]
    failed = [event("failure", 6, cause="node_silent", generation=1, ranks=[1]), event("checkpoint_failed", 9, step=2)]
    stored = event("checkpoint", 12, step=2, stall_s=0.0, seconds=0.4)
    stopped = event("stopped", 12.5, step=2, reason="interrupted")
    metrics = [make_row(1, T0 + 3.0, 2.0), make_row(2, T0 + 5, 2.0)]
    ends = (([*begun, *failed, stored, stopped], 7.0, "other"), ([*begun, *failed, stopped], 4.0, "down"))
    for events, waited_s, state in ends:
        report = build_report(metrics, events, now=T0, config=config())
        assert_adds_up(report)
        assert report["time_s"]["snapshot"] == pytest.approx(waited_s)
        assert report["time_s"][state] == pytest.approx(7.5 - waited_s)


@pytest.mark.parametrize(
    ("written", "waited_s"),
    [(event("checkpoint_failed", 3665, step=3650), 5.0), (event("checkpoint", 3662, step=3650), 2.0)],
    ids=["given_up", "deleted_since"],
)
def test_a_last_checkpoint_begins_behind_steps_that_the_next_job_took_back(
    written: dict[str, Any], waited_s: float
) -> None:
    """The hour that these had taken was `snapshot`, though the job had waited for seconds."""
    steps_back = {"from_step": 3650, "to_step": 50, "steps": 3600, "seconds": 3600.0}
    times = {"first_time": T0 + 60, "first_step_end": T0 + 61, "last_time": T0 + 3660}
    events = [
        event("submitted", 0),
        generation(1, 10, 4, 0, "start", init_s=10.0, restore_s=0.0),
        event("checkpoint", 61, step=50),
        written,
        event("stopped", 3666, step=50, reason="failed"),
        event("submitted", 3700, heard_at=T0 + 3660),
        event("rollback", 3705, generation=2, **steps_back, **times),
        generation(2, 3710, 4, 50, "resume", init_s=5.0, restore_s=1.0, recomputed_steps=3600),
    ]
    metrics = [make_row(step, T0 + 10 + step, 1.0) for step in range(1, 51)]
    metrics += [make_row(50 + step, T0 + 3710 + step, 1.0, 2) for step in range(1, 101)]
    report = build_report(metrics, events, now=T0 + 3810, config=config())
    assert_adds_up(report)
    assert report["time_s"]["snapshot"] == pytest.approx(waited_s)
    assert report["time_s"]["recompute"] == pytest.approx(3600.0)
    assert report["lost_s"]["resume"] >= 3600.0


def test_a_job_that_ends_before_its_first_step_waited_for_no_last_checkpoint_of_an_earlier_jobs_step() -> None:
    """The time between the jobs was `snapshot`, and missing from what the first one's end had cost."""
    events = [
        event("submitted", 0),
        generation(1, 0, 2, 0, "start", init_s=0.0, restore_s=0.0),
        event("submitted", 300),
        generation(2, 400, 2, 2, "resume"),
        event("checkpoint", 410, step=2),
        event("stopped", 411, step=2, reason="interrupted"),
    ]
    report = build_report([make_row(1, T0 + 2, 2.0), make_row(2, T0 + 4, 2.0)], events, now=T0, config=config())
    assert_adds_up(report)
    assert report["time_s"]["snapshot"] == 0.0
    assert math.fsum(report["lost_s"].values()) == pytest.approx(407.0)


def test_a_job_behind_one_that_died_without_a_word_begins_where_that_one_was_last_heard() -> None:
    """Its command is older than the first job's last rows, as it waited for the run's lock."""
    events = [
        event("submitted", 0),
        generation(1, 0, 2, 0, "start", init_s=0.0, restore_s=0.0),
        event("submitted", 3, heard_at=T0 + 4),
        generation(2, 20, 2, 2, "resume", init_s=4.0, restore_s=1.0),
    ]
    metrics = [make_row(1, T0 + 2, 2.0), make_row(2, T0 + 4, 2.0), make_row(3, T0 + 22, 2.0, 2)]
    first, second = History.of_logs(metrics, events).ledger(T0 + 22).attempts
    assert (first.last_life, second.begin) == (T0 + 4, pytest.approx(T0 + 4, abs=1e-5))
    report = build_report(metrics, events, now=T0 + 22, config=config())
    assert_adds_up(report)
    assert math.fsum(report["lost_s"].values()) == pytest.approx(16.0)


def test_a_job_on_a_machine_with_another_clock_comes_behind_the_one_before_it_as_a_whole() -> None:
    """Its group was taken for one of the first job, and the run, which has ended, for one that goes on."""
    events = [
        event("submitted", 0),
        generation(1, 0, 2, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 100, step=2, reason="interrupted"),
        event("submitted", 50),
        generation(2, 60, 2, 2, "resume", init_s=4.0, restore_s=1.0),
        event("stopped", 66, step=3, reason="finished"),
    ]
    metrics = [make_row(1, T0 + 50, 50.0), make_row(2, T0 + 100, 50.0), make_row(3, T0 + 65, 2.0, 2)]
    ledger = History.of_logs(metrics, events).ledger(T0 + 900)
    first, second = ledger.attempts
    assert second.submitted
    assert first.stopped is not None
    assert second.stopped is not None
    assert ledger.end - T0 == pytest.approx(116, abs=1e-5)  # the second took 16 s


def two_jobs(behind_s: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of the first job's ten steps the second one, by a clock that is `behind_s` behind, takes back two; it comes 10 s
    later, loses a step itself, and one of its ranks is slow for four.
    """

    def rolled(at: float, generation: int, to_step: int, first: float, last: float) -> dict[str, Any]:
        times = {"first_time": T0 + first, "first_step_end": T0 + first + 10, "last_time": T0 + last}
        return event("rollback", at, generation=generation, to_step=to_step, steps=2, seconds=last - first, **times)

    events = [
        event("submitted", 0, max_workers=4),
        generation(1, 0, 4, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 100, step=8, reason="interrupted"),
        event("submitted", 110 - behind_s, max_workers=2, heard_at=T0 + 100),
        rolled(112 - behind_s, 2, 8, 80, 100),
        generation(2, 120 - behind_s, 2, 8, "resume", init_s=4.0, restore_s=1.0),
        event("suspected", 180 - behind_s, kind="slow_compute", node="n", pid=1, since=T0 + 161 - behind_s),
        event("cleared", 201 - behind_s, kind="slow_compute", node="n", pid=1, since=T0 + 161 - behind_s),
        event("validation", 205 - behind_s, step=16, loss=1.0, seconds=5.0),
        event("failure", 230 - behind_s, cause="worker_died", generation=2),
        rolled(231 - behind_s, 3, 17, 215 - behind_s, 225 - behind_s),
        generation(3, 240 - behind_s, 2, 17, "worker_died", init_s=4.0, restore_s=1.0),
        event("stopped", 291 - behind_s, step=22, reason="finished"),
    ]
    metrics = [make_row(step, T0 + 10 * step, 10.0) for step in range(1, 9)]
    ends = [*range(130, 210, 10), 215]
    metrics += [make_row(9 + n, T0 + end - behind_s, 10.0, 2, world_size=2) for n, end in enumerate(ends)]
    metrics += [make_row(18 + n, T0 + 250 + 10 * n - behind_s, 10.0, 3, world_size=2) for n in range(5)]
    return metrics, events


@pytest.mark.parametrize("behind_s", [30.0, 3600.0])
def test_a_job_whose_clock_is_behind_is_in_the_picture_with_all_its_steps(tmp_path: Path, behind_s: float) -> None:
    """Its curves and interruptions were drawn before the beginning of the page."""
    _, files = make_report(write_run(tmp_path / "run", *two_jobs(behind_s)), config(), now=T0 + 900)
    html = files["report.html"].decode()
    assert "a worker died · 20.0 s" in html
    for points in re.findall(r'<polyline class="curve" points="([^"]*)"', html):
        assert all(LEFT - 1 <= float(point.split(",")[0]) <= WIDTH for point in points.split())
    strips = re.findall(r'class="strip" x="([-\d.]+)"', html)
    assert len(strips) == 22
    assert all(LEFT - 1 <= float(x) <= WIDTH for x in strips)


@pytest.mark.parametrize("behind_s", [30.0, 120.0, 3600.0])
def test_a_job_whose_clock_is_behind_took_as_long_as_by_a_right_one(behind_s: float) -> None:
    """Steps were squeezed into none, and counted as useful in full: `effective` was more than 1."""
    right = build_report(*two_jobs(0.0), now=T0 + 900, config=config())
    found = build_report(*two_jobs(behind_s), now=T0 + 900, config=config())
    assert_adds_up(right)
    assert_adds_up(found)
    assert right["time_s"]["down"] - found["time_s"]["down"] == pytest.approx(10.0, abs=1e-5)  # between the jobs
    assert found["wall_s"] == pytest.approx(right["wall_s"] - 10.0, abs=1e-5)
    without = {state: seconds for state, seconds in right["time_s"].items() if state != "down"}
    assert {state: found["time_s"][state] for state in without} == pytest.approx(without, abs=1e-5)
    assert found["work"] == {**right["work"], "slower_s": pytest.approx(right["work"]["slower_s"], abs=1e-5)}
    assert found["effective"] == pytest.approx(right["effective"] * right["wall_s"] / found["wall_s"], abs=1e-5)
    assert found["effective"] <= 1.0
    for told, of_right in zip(found["recoveries"], right["recoveries"], strict=True):
        for name in ("regroup_s", "reshard_s", "first_step_s"):
            assert told[name] == pytest.approx(of_right[name], abs=1e-5), name


@pytest.mark.parametrize("behind_s", [0.0, 0.4, 0.6, 2.0])
def test_a_job_that_waited_for_the_one_before_did_not_start_for_so_long(behind_s: float) -> None:
    events = [
        event("submitted", 0),
        generation(1, 0, 4, 0, "start", init_s=0.0, restore_s=0.0),
        event("submitted", 600 - behind_s, heard_at=T0 + 3600),
        generation(2, 3600.5 - behind_s, 4, 36, "resume", init_s=0.2, restore_s=0.1),
        event("stopped", 3680.5 - behind_s, step=44, reason="finished"),
    ]
    metrics = [make_row(step, T0 + 100 * step, 100.0) for step in range(1, 37)]
    metrics += [make_row(36 + n, T0 + 3600.5 + 10 * n - behind_s, 10.0, 2) for n in range(1, 9)]
    report = build_report(metrics, events, now=T0 + 9000, config=config())
    assert_adds_up(report)
    assert report["wall_s"] - 3680 == pytest.approx(0.5 - behind_s if behind_s < 0.5 else MOST_START_S, abs=1e-5)
    assert report["time_s"]["productive"] == pytest.approx(3680, abs=1e-5)


def test_three_jobs_with_other_clocks_come_one_behind_the_other() -> None:
    """The third one's clock is right: it begins where the second, moved, was last heard, and no sooner."""
    events, metrics = [], list[dict[str, Any]]()
    for number, at in ((1, 0.0), (2, -500.0), (3, 100.0)):
        events += [
            event("submitted", at, heard_at=metrics[-1]["time"] if metrics else None),
            generation(number, at + 10, 4, 5 * number - 5, "resume", init_s=9.0, restore_s=1.0),
        ]
        metrics += [make_row(5 * number - 4 + each, T0 + at + 20 + 10 * each, 10.0, number) for each in range(5)]
    report = build_report(metrics, events, now=T0, config=config())
    assert_adds_up(report)
    assert report["time_s"]["productive"] == pytest.approx(150.0, abs=1e-5)
    assert report["wall_s"] == pytest.approx(180.0, abs=1e-5)
    assert report["effective"] == pytest.approx(150 / 180, abs=1e-5)


def test_a_job_whose_drivers_clock_is_ahead_of_its_groups_begins_with_what_it_logged_first() -> None:
    events = [
        event("submitted", 15),
        generation(1, 10, 4, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 30, step=2, reason="finished"),
    ]
    metrics = [make_row(1, T0 + 20, 10.0), make_row(2, T0 + 30, 10.0)]
    (attempt,) = History.of_logs(metrics, events).ledger(T0).attempts
    assert (attempt.begin, attempt.ready, attempt.first_step_begin) == (T0 + 10, T0 + 10, T0 + 10)


def test_rows_and_events_of_one_clock_are_left_as_they_are() -> None:
    rows, events = two_jobs(0.0)
    history = History.of_logs(rows, events)
    found, by_time = on_one_clock(rows, history.events)
    assert all(each is row for each, row in zip(found, rows, strict=True))
    assert all(each is event for each, event in zip(by_time, history.events, strict=True))


def test_a_job_that_waited_for_the_one_before_it_begins_where_that_one_stopped() -> None:
    """Its command is older than the first job's end, which was taken for its own."""
    events = [
        event("submitted", 0),
        generation(1, 0, 2, 0, "start", init_s=0.0, restore_s=0.0),
        event("stopped", 6, step=2, reason="interrupted"),
        event("submitted", 3),
        generation(2, 16, 2, 2, "resume", init_s=4.0, restore_s=1.0),
    ]
    metrics = [make_row(1, T0 + 2, 2.0), make_row(2, T0 + 4, 2.0), make_row(3, T0 + 18, 2.0, 2)]
    history = History.of_logs(metrics, events)
    first, second = history.ledger(T0 + 18).attempts
    assert first.stopped is not None
    assert second.stopped is None
    assert second.begin == pytest.approx(T0 + 6, abs=1e-5)
    report = build_report(metrics, events, now=T0 + 20, config=config())
    assert_adds_up(report)
    assert report["wall_s"] == 20.0
    assert {state: seconds for state, seconds in report["time_s"].items() if seconds > 1e-3} == pytest.approx(
        {"productive": 6.0, "other": 4.0, "init": 9.0, "restore": 1.0}, abs=1e-5
    )


def test_a_run_without_steps_is_starting_up_to_now() -> None:
    report = build_report([], [event("submitted", 0)], now=T0 + 12, config=config())
    assert_adds_up(report)
    assert report["time_s"] == dict.fromkeys(STATES, 0.0) | {"init": 12.0}
    assert (report["steps"], report["tokens"], report["final_loss"], report["goodput"]) == (0, None, None, 0.0)
    assert (report["restarts"], report["recoveries"]) == ({}, [])


def test_nothing_at_all_is_reported_as_nothing() -> None:
    report = build_report([], [], now=T0, config={})
    assert_adds_up(report)
    assert (report["wall_s"], report["goodput"], report["capacity_goodput"]) == (0.0, None, None)


def test_metrics_alone_make_a_report() -> None:
    report = build_report([make_row(1, T0, 2.0), make_row(2, T0 + 3, 2.0)], [], now=T0 + 3, config=config())
    assert_adds_up(report)
    assert report["time_s"] == dict.fromkeys(STATES, 0.0) | {"productive": 4.0, "other": 1.0}


def test_a_run_that_fell_silent_is_down_and_one_that_just_stepped_is_not() -> None:
    events = [event("submitted", 0), generation(1, 1, 4, 0, "start")]
    metrics = [make_row(1, T0 + 2, 1.0)]
    for now, state in ((5.0, "other"), (5000.0, "down")):
        report = build_report(metrics, events, now=T0 + now, config=config())
        assert_adds_up(report)
        assert report["time_s"][state] == pytest.approx(now - 2)


def test_a_run_that_failed_is_down_until_it_is_back() -> None:
    events = [event("submitted", 0), generation(1, 1, 4, 0, "start"), event("failure", 5, cause="worker_died")]
    report = build_report([make_row(1, T0 + 2, 1.0)], events, now=T0 + 9, config=config())
    assert_adds_up(report)
    assert report["time_s"]["down"] == pytest.approx(7.0)
    assert report["restarts"] == {}


def test_a_group_that_fails_while_starting_was_starting_until_then() -> None:
    events = [
        event("submitted", 0),
        event("failure", 8, cause="worker_died"),
        generation(1, 20, 4, 0, "worker_died"),
        event("stopped", 20, step=0, reason="interrupted"),
    ]
    report = build_report([], events, now=T0 + 99, config=config())
    assert_adds_up(report)
    assert report["time_s"]["init"] + report["time_s"]["restore"] == pytest.approx(20.0)
    assert report["recoveries"][0]["detect_s"] is None


def test_numbers_that_are_not_finite_do_not_reach_the_report() -> None:
    row = make_row(1, T0 + 1, 1.0, loss=float("nan"), data_wait_s=float("nan"), mfu=None)
    report = build_report([row], [event("submitted", 0)], now=T0 + 1, config=config())
    assert_adds_up(report)
    assert report["final_loss"] is None


def test_idle_passes_count_as_lost_capacity() -> None:
    metrics = [make_row(1, T0 + 10, 10.0, world_size=5)]
    events = [event("submitted", 0), event("stopped", 10, step=1, reason="finished")]
    report = build_report(metrics, events, now=T0, config=config(max_workers=10, num_slices=12))
    assert report["goodput"] == 1.0
    assert report["capacity_goodput"] == pytest.approx(5 / 10 * 12 / 15)


def test_idle_passes_are_counted_in_units_also_where_an_earlier_group_was_smaller_than_one() -> None:
    events = [event("submitted", 0), event("stopped", 10, step=1, reason="finished")]
    in_units = config(max_workers=10, num_slices=12)
    in_units.parallel.tp = 2
    for world_size, share in ((10, 10 / 10 * 12 / 15), (1, 1 / 10)):
        metrics = [make_row(1, T0 + 10, 10.0, world_size=world_size)]
        report = build_report(metrics, events, now=T0, config=in_units)
        assert report["capacity_goodput"] == pytest.approx(share)


def test_idle_passes_of_pipelines_are_counted_in_units_of_as_many_stages_as_the_group_had() -> None:
    in_stages = config(max_workers=6, num_slices=9)
    in_stages.parallel.pp = 2
    for axes, share in (({"pp": 2}, 9 / 9), ({"pp": 1}, 9 / 12)):
        begun = generation(1, 0, world_size=6, start_step=0, cause="start", axes=axes)
        events = [event("submitted", 0), begun, event("stopped", 10, step=1, reason="finished")]
        metrics = [make_row(1, T0 + 10, 10.0, world_size=6)]
        report = build_report(metrics, events, now=T0, config=in_stages)
        assert report["capacity_goodput"] == pytest.approx(share)


@dataclass
class Simulation:
    """A run that notes beside its logs what each second was, through the real writer."""

    log: RunLog
    random: random.Random
    now: float = T0
    step: int = 0
    commits: list[int] = field(default_factory=lambda: [0])  # steps that can be gone back to
    generation: int = 0
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    rows_s: dict[int, dict[str, float]] = field(default_factory=dict)  # of each step that still counts

    def spend(self, state: str, most_s: float) -> float:
        seconds = self.random.uniform(0.01, most_s)
        self.now += seconds
        self.truth[state] += seconds
        return seconds

    def submit(self) -> None:
        self.log.event(Submitted(time=self.now))

    def start(self, cause: str) -> None:
        init_s, restore_s = self.spend("init", 20), self.spend("restore", 5)
        self.generation += 1
        if self.random.random() < 0.5:  # what is newest is damaged
            del self.commits[self.random.randint(1, len(self.commits)) :]
        committed = self.commits[-1]
        self.log.begin(self.generation, committed)
        for step in range(committed + 1, self.step + 1):
            undone = self.rows_s.pop(step)
            for state, seconds in undone.items():
                self.truth[state] -= seconds
                self.truth["recompute"] += seconds
        self.step = committed
        self.log.event(
            Generation(
                time=self.now,
                generation=self.generation,
                world_size=self.random.randint(1, 4),
                start_step=self.step,
                cause=cause,
                source="checkpoint",
                init_s=init_s,
                restore_s=restore_s,
            )
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            validate, save = self.random.random() < 0.2, self.random.random() < 0.2
            parts = {"data": self.spend("data", 0.5), "productive": self.spend("productive", 3)}
            if validate:
                seconds = self.spend("validation", 4)
                self.log.event(Validation(time=self.now, step=self.step, loss=1.0, seconds=seconds))
            snapshot_s = self.spend("snapshot", 2) if save else 0.0
            if save:
                self.log.event(Checkpoint(time=self.now, step=self.step, stall_s=snapshot_s, bytes=1))
                self.commits.append(self.step)
            step_s = sum(parts.values()) + snapshot_s
            row = make_row(self.step, self.now, step_s, self.generation)
            self.log.row(row | {"data_wait_s": parts["data"], "snapshot_s": snapshot_s})
            self.rows_s[self.step] = parts


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), ends=st.lists(st.sampled_from(["failure", "killed", "stopped"]), max_size=5))
def test_the_ledger_finds_back_what_each_second_of_a_simulated_run_was(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ends: list[str]
) -> None:
    storage = Storage.at(tmp_path_factory.mktemp("run"))
    with RunLog(storage) as log:
        run = Simulation(log, random.Random(seed))
        run.submit()
        run.start("start")
        for end in ends:
            run.train(run.random.randint(1, 12))
            if end == "stopped":
                run.spend("other", 1)
                log.event(Stopped(time=run.now, step=run.step, reason="interrupted"))
            run.spend("down", 30)
            if end == "failure":
                log.event(Failure(time=run.now, cause="worker_died", generation=run.generation))
                run.spend("down", 30)
            else:
                run.submit()
            run.start("worker_died" if end == "failure" else "resume")
        run.train(5)
        run.spend("other", 1)
        log.event(Stopped(time=run.now, step=run.step, reason="finished"))
    report = build_report(read_metrics(storage), read_events(storage), now=run.now + 100, config=config())
    assert_adds_up(report)
    # A validation or a checkpoint of a step that is rolled back stays what it was; a step's own parts are recomputed.
    assert report["time_s"] == pytest.approx(run.truth, abs=1e-4)
    assert report["steps"] == run.step
    assert sum(report["restarts"].values()) == len(report["recoveries"]) == len(ends)


times = st.floats(0, 1000, allow_nan=False)
durations = st.one_of(st.none(), st.floats(0, 100), st.just(float("nan")), st.floats(-5, 0))
any_event = st.builds(
    lambda name, at, seconds, number: event(
        name,
        at,
        stall_s=seconds,
        seconds=seconds,
        init_s=seconds,
        restore_s=seconds,
        generation=number,
        world_size=number,
        start_step=number,
        cause="start" if number == 1 else "resize",
        steps=2,
        first_time=T0 + at - (seconds if seconds and seconds > 0 else 0),
        last_time=T0 + at,
        reason="failed" if number == 2 else "finished",
    ),
    st.sampled_from(["submitted", "generation", "checkpoint", "validation", "failure", "rollback", "stopped", "else"]),
    times,
    durations,
    st.integers(1, 4),
)
any_row = st.tuples(times, durations, durations, durations, st.integers(1, 20))


@settings(max_examples=120)
@given(events=st.lists(any_event, max_size=12), rows=st.lists(any_row, max_size=12), now=times)
def test_the_states_add_up_to_wall_time_whatever_the_logs_hold(
    events: list[dict[str, Any]], rows: list[Any], now: float
) -> None:
    metrics = [
        make_row(step, T0 + at, 1.0) | {"step_s": took, "data_wait_s": data, "snapshot_s": snapshot, "world_size": size}
        for step, (at, took, data, snapshot, size) in enumerate(sorted(rows, key=lambda row: row[0]), start=1)
    ]
    ordered = sorted(events, key=lambda entry: entry["time"])
    report = build_report(metrics, ordered, now=T0 + now, config=config())
    assert_adds_up(report)
    assert report["goodput"] is None or 0 <= report["capacity_goodput"] <= report["goodput"] + 1e-6 <= 1.00001
    work = report["work"]
    if report["effective"] is not None:
        worth = math.fsum([work["useful_s"], *work["slower_s"].values()])
        assert worth == pytest.approx(report["time_s"]["productive"], abs=1e-4)
        assert report["effective"] * report["wall_s"] == pytest.approx(work["useful_s"], abs=1e-3, rel=1e-4)


class Page(HTMLParser):
    """Checks that tags nest, and keeps what a browser would fetch or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.words = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src", "onload", "onclick")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def write_run(folder: Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]]) -> Storage:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(encode(row) for row in metrics))
    (folder / "events.jsonl").write_bytes(b"".join(encode(entry) for entry in events))
    return Storage.at(folder)


def test_the_page_is_self_contained_and_shows_what_happened(tmp_path: Path) -> None:
    storage = write_run(tmp_path / "run", *one_loss())
    report = write_report(storage, config(), now=T0 + 100)
    assert json.loads(storage.read_bytes("report.json")) == report
    html = storage.read_bytes("report.html").decode()
    page = Page(html)
    assert page.links == []
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in html
    assert "@import" not in html
    shown = ("ranks", "loss", "tokens/s", "step 3, 300 tok", "node died · 11.0 s", "4 → 3", "Configuration")
    for words in shown:
        assert words in page.words
    for state in ("productive", "recompute", "down", "validation"):
        assert state in page.words
    assert "step 4: validation loss 2.5000" in page.words
    assert "prefers-color-scheme: dark" in html


def test_the_page_tells_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    metrics, events = one_loss()
    events = [each for each in events if each["event"] != "checkpoint"]
    read_back = event("checkpoint_failed", 300, step=9, detail="crc", generation=2)
    damaged = event("checkpoint_damaged", 301, step=5, detail="crc", generation=3)
    written = [event("checkpoint", 290 + step, step=step, generation=2) for step in (5, 9)]
    for more, said in (
        ([], "None committed yet"),
        (written, "The last is of step 9"),
        ([*written, read_back], "The last is of step 5"),
        ([*written, read_back, damaged], "2 committed, none is whole"),
    ):
        storage = write_run(tmp_path / str(len(more)), metrics, [*events, *more])
        write_report(storage, config(), now=T0 + 400)
        html = storage.read_bytes("report.html").decode()
        assert said in html[html.index("<h2>Checkpoints</h2>") :].partition("</section>")[0]


def test_everything_on_the_page_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"\ud800"
    metrics, events = one_loss()
    for entry in events:
        entry.update(
            cause=evil, source=evil, reason=evil, detail=evil, host=evil, versions={evil: evil}, geometry=[evil]
        )
        entry["step"] = evil if entry["event"] in ("stopped", "checkpoint") else entry.get("step")
    mine = config()
    mine.run.name = mine.model.name = evil
    _, files = make_report(write_run(tmp_path / "run", metrics, events), mine, now=T0 + 100)
    page = Page(files["report.html"].decode())
    assert "script" not in page.tags
    assert page.words.count("<script>alert('x')</script>") > 8


@pytest.mark.parametrize("number", range(len(one_loss()[1]) + 1))
def test_the_page_can_be_drawn_at_any_moment_of_a_run(tmp_path: Path, number: int) -> None:
    metrics, events = one_loss()
    so_far = events[:number]
    now = so_far[-1]["time"] if so_far else T0
    rows = [row for row in metrics if row["time"] <= now]
    storage = write_run(tmp_path / "run", rows, so_far)
    report, files = make_report(storage, {}, now=now)
    assert_adds_up(report)
    Page(files["report.html"].decode())


def test_long_runs_are_drawn_with_a_bounded_number_of_points(tmp_path: Path) -> None:
    metrics = [make_row(step, T0 + step, 1.0) for step in range(1, 5001)]
    events = [event("submitted", 0), generation(1, 0, 4, 0, "start"), event("stopped", 5000, step=5000)]
    _, files = make_report(write_run(tmp_path / "run", metrics, events), config(), now=T0)
    assert len(files["report.html"]) < 300_000
    assert "steps 4,976 to 5,000: 500k tokens, 4 ranks" in files["report.html"].decode()


def test_ticks_are_round_and_inside() -> None:
    assert number_ticks(0, 40, 4) == [(0.0, "0"), (10.0, "10"), (20.0, "20"), (30.0, "30"), (40.0, "40")]
    assert [label for _, label in number_ticks(3.91, 4.2, 4)] == ["4.0", "4.1", "4.2"]
    assert [label for _, label in number_ticks(0, 2.2e6, 4)] == ["0", "1M", "2M"]
    assert [label for _, label in number_ticks(0, 2.2, 5, whole=True)] == ["0", "1", "2"]
    assert time_ticks(0, 3 * 3600)[-1] == (3 * 3600, "3.0 h")


@settings(max_examples=100)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_never_leave_their_range(low: float, width: float) -> None:
    high = low + width
    if high > low and width > 1e-9 * max(abs(low), abs(high)):
        slack = 1e-6 * width + 1e-9 * max(abs(low), abs(high))
        ticks = number_ticks(low, high)
        assert 1 <= len(ticks) <= 14
        assert all(low - slack <= value <= high + slack for value, _ in ticks)


def mixing(first: float = 3.0) -> dict[str, Any]:
    return {
        "run": {"name": "mixing"},
        "data": {
            "seq_len": 10,
            "corpora": {"web": "/web", "code": "/code"},
            "mixture": [
                {"from_tokens": 0, "weights": {"web": first, "code": 1}},
                {"from_tokens": 500, "weights": {"web": 0, "code": 1}},
            ],
        },
    }


def test_the_data_mix_is_told_by_stage_and_by_what_was_trained_on() -> None:
    mix = data_mix(mixing(), 1000)
    assert mix is not None
    assert mix.head == ["corpus", "from 0", "from 500", "tokens so far", "share"]
    assert [getattr(row[0], "text", "") for row in mix.rows] == ["web", "code"]
    assert [list(row[1:]) for row in mix.rows] == [
        ["75.0%", "0.0%", "370", "37.0%"],
        ["25.0%", "100.0%", "630", "63.0%"],
    ]
    assert mix.bar[1] == (0.63, "r1", "code: 63.0% of the tokens so far")
    assert data_mix(mixing(first=-1.0), 1000) is None  # a folder's config is not ours to judge
    assert data_mix({"data": {"corpora": {"web": "/web"}}}, 1000) is None


def test_columns_cover_the_run_without_gaps() -> None:
    ledger = History.of_logs(*one_loss()).ledger(T0 + 100)
    for count in (1, 7, 300):
        found = columns(ledger, count)
        assert (found[0][0], found[-1][1]) == (ledger.begin, pytest.approx(ledger.end))
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in itertools.pairwise(found))


def two_runs(folder: Path) -> list[str]:
    """The run of `one_loss`, and one that went on undisturbed with another learning rate, on other batches at last."""
    metrics, events = one_loss()
    other = [make_row(step, T0 + 10 + 2 * step, 2.0, loss=8.0 / step + 0.01 * step) for step in range(1, 7)]
    other[5]["batch_digest"] = "f" * 16
    undisturbed = [event("submitted", 0, git="abc", versions={"torch": "2"}), generation(1, 10, 4, 0, "start")]
    for name, run, rate in (("first", (metrics, events), 0.1), ("second", (other, undisturbed), 0.2)):
        storage = write_run(folder / name, *run)
        settings = {"run": {"name": name}, "optim": {"lr": rate, "num_slices": 12}, "model": {"dim": 8}}
        storage.write_bytes("config.yaml", yaml.safe_dump(settings).encode())
    return [str(folder / "first"), str(folder / "second")]


def test_two_runs_are_compared_setting_by_setting_and_batch_by_batch(tmp_path: Path) -> None:
    first, second = load_runs(two_runs(tmp_path), now=T0 + 30)
    assert differing_settings([first, second]) == {
        "optim.lr": ["0.1", "0.2"],
        "commit": ["-", "abc"],
        "version of torch": ["-", "2"],
    }
    found = agreement(first, second)
    assert (found.common_steps, found.same_batches, found.first_other) == (6, 5, 6)
    assert (found.largest_loss_difference, found.at_step) == (pytest.approx(0.05), 5)
    data = comparison([first, second])
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert data["runs"][0]["report"] == first.report
    assert data["agreement_with_first"]["second"]["same_batches"] == 5
    text = shown([first, second])
    for words in (
        "node died",
        "14.0 s",
        "optim.lr",
        "against the first run",
        "3 to 4",
        "5.00e-02 at step 5",
        "productive",
    ):
        assert words in text
    assert "model.dim" not in text


def shown(runs: list[RunData]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(as_table(runs))
    return stream.getvalue()


def test_runs_that_are_the_same_or_hold_nothing_can_be_compared_too(tmp_path: Path) -> None:
    empty = [write_run(tmp_path / name, [], [event("submitted", 0)]) for name in ("a", "b")]
    assert "steps" in shown([load_run(each, T0) for each in empty])
    same = load_run(write_run(tmp_path / "c", *one_loss()), T0 + 100)
    assert "differing settings: none" in shown([same, dataclasses.replace(same, folder="/elsewhere/c")])


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = []
    for place in ("east", "west"):
        storage = write_run(tmp_path / place / "mine", *one_loss())
        storage.write_bytes("config.yaml", b"run: {name: mine}")
        runs.append(load_run(storage, T0 + 100))
    assert labels(runs) == ["east/mine", "west/mine"]
    assert labels(runs[:1]) == ["mine"]


def test_what_a_run_says_is_no_markup_of_the_table(tmp_path: Path) -> None:
    metrics, events = one_loss()
    for entry in events:
        entry.update(cause="[red]gone[/]", git="[/]")
    run = load_run(write_run(tmp_path / "0", metrics, events), T0 + 100)
    runs = [
        dataclasses.replace(run, name=f"[b]{number}", config={"[a]": {"[i]": f"[{number}]"}}) for number in range(2)
    ]
    text = shown(runs)
    for words in ("[b]0", "[red]gone[/]", "[a].[i]", "[1]"):
        assert words in text


def test_too_many_or_too_few_different_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegrowError, match="1 different runs are given; 2 to 8 can be compared"):
        load_runs([str(tmp_path), f"{tmp_path}/"])
    with pytest.raises(RegrowError, match=f"{MOST_RUNS + 1} different runs"):
        load_runs([str(tmp_path / str(number)) for number in range(MOST_RUNS + 1)])


def test_the_job_compares_runs_and_names_one_that_is_none(tmp_path: Path) -> None:
    def job(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": f"{REPO}:{REPO}/platform", "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "jobs.report", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    folders = two_runs(tmp_path)
    done = job(*folders)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +first +second$", done.stdout, re.MULTILINE)
    assert re.search(r"^optim\.lr +0\.1 +0\.2$", done.stdout, re.MULTILINE)
    assert not (tmp_path / "first" / "report.html").exists()  # the runs are left as they are
    done = job(*folders, "--json", "--out=~/figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(done.stdout)
    assert list(json.loads(done.stdout)["differing_settings"]) == ["optim.lr", "commit", "version of torch"]
    assert job(folders[0], "--out=memory://x/r.html").returncode == 0, "a URI is no folder here"
    assert not list(tmp_path.glob("memory*"))
    done = job(*folders, "--out", "ab.html")
    assert done.returncode == 2
    assert "--out ab.html: a comparison is a table and JSON; name a file that ends in .json" in done.stderr
    done = job(folders[0], str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nowhere holds no run" in done.stderr


def test_the_job_writes_a_report_and_says_where(tmp_path: Path) -> None:
    storage = write_run(tmp_path / "run", *one_loss())
    storage.write_bytes("config.yaml", yaml.safe_dump({"run": {"name": "mine"}, "optim": {"num_slices": 12}}).encode())

    def job(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "jobs.report", *arguments]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)

    done = job(str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "7 steps, loss 1.1429, 42.0 s, goodput 31.0%, effective 29.2%, paid 29.2%, 1 restarts: "
    )
    assert b"<h1>mine</h1>" in storage.read_bytes("report.html")
    assert not {"torch", "ray", "hydra", "pyarrow"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}

    done = job(str(tmp_path / "run"), "--out", str(tmp_path / "copy.json"))
    assert json.loads((tmp_path / "copy.json").read_bytes())["steps"] == 7

    storage.delete("report.json")
    done = job(str(tmp_path / "run"), "--json")
    assert json.loads(done.stdout)["steps"] == 7
    assert "report.json" not in storage.list()

    done = job(str(tmp_path / "nowhere"))
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(errors) == 1
    assert "holds no run" in errors[0]

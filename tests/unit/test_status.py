"""What a run does now, from its logs: never training when no rank trains."""

import fcntl
import json
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import yaml
from jobs import status as status_job
from ray.job_submission import JobStatus

from regrow.errors import ClusterError, RegrowError
from regrow.record import log as run_log
from regrow.record.events import Cause, Generation, Note, Stopped, Submitted
from regrow.record.history import History
from regrow.record.lock import LOCK_FILE, is_held, lock_run
from regrow.record.log import METRIC_KEYS, RANKS, LogReader, RunLog, encode, read_metrics
from regrow.record.run_folder import read_node_snapshots, read_ranks, read_status, why_unwritable
from regrow.record.status import State, Status, status_of
from regrow.show.status import body, describe, heading, one_line
from regrow.storage import RemoteStorage, Storage
from regrow.submit import job_status
from regrow.submit.job_status import _newest, is_here, on_kubernetes, on_ray, use_token
from support import stand_in_kubectl
from support.commands import call
from support.stand_in_kubectl import STATE, store

T0 = 1_700_000_000.0
REPO = Path(__file__).parents[2]
CONFIG = {
    "run": {"name": "mine"},
    "train": {"steps": 200, "stop_at_step": None},
    "cluster": {"min_workers": 2, "max_workers": 4},
}


def row(step: int, at: float, generation: int = 1, step_s: float = 2.0, **changes: Any) -> dict[str, Any]:
    made = dict.fromkeys(METRIC_KEYS, 0.0) | {
        "step": step,
        "tokens_seen": 100 * step,
        "loss": 8.0 / step,
        "tokens_per_s": 50.0,
        "mfu": 0.4,
        "step_s": step_s,
        "data_wait_s": 0.5,
        "world_size": 4,
        "generation": generation,
        "batch_digest": f"{step:016x}",
        "time": T0 + at,
    }
    return made | changes


def event(name: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": T0 + at, "event": name, **fields}


def submitted(at: float, **fields: Any) -> dict[str, Any]:
    return event("submitted", at, host="elsewhere", **fields)


def generation(number: int, at: float, world_size: int, cause: str, start_step: int = 0) -> dict[str, Any]:
    fields = {"source": "snapshot" if start_step else "seed", "init_s": 3.0, "restore_s": 1.0, "recomputed_steps": 1}
    return event(
        "generation", at, generation=number, world_size=world_size, cause=cause, start_step=start_step, **fields
    )


FAILURE = event("failure", 31, cause="node_silent", detail="node 10.0.0.3: no answer", generation=1, ranks=[3])
STARTED = [submitted(0), generation(1, 10, 4, "start")]
ROWS = [row(step, 10 + 2 * step) for step in range(1, 11)]  # the last one at 30


def status(
    rows: list[dict[str, Any]], events: list[dict[str, Any]], at: float, held: bool | None = None, **more: Any
) -> Status:
    given: dict[str, Any] = {"config": CONFIG} | more
    return status_of(History.of_logs(rows, events), folder="/runs/mine", now=T0 + at, held=held, **given)


def test_a_run_that_trains_says_since_when_how_fast_and_how_long_it_will_take() -> None:
    rows = [*ROWS[:-1], row(10, 32, step_s=4.0)]
    found = status(rows, STARTED, 33)
    assert (found.run, found.state, found.since) == ("mine", State.training, T0 + 10)
    assert (found.step, found.steps, found.tokens, found.loss) == (10, 200, 1000, 0.8)
    assert (found.world_size, found.min_workers, found.max_workers, found.generation) == (4, 2, 4, 1)
    assert found.speed is not None
    assert (found.speed.tokens_per_s, found.speed.step_s, found.speed.mfu) == (50.0, 2.0, 0.4)
    assert found.speed.data_wait_share == pytest.approx(9 * 0.5 / (8 * 2.0 + 4.0))  # of all but the first step
    assert found.eta_s == pytest.approx(190 * (32 - 14) / 8)  # the first step of a group does not count
    assert found.heard_at == T0 + 32


def test_the_time_left_is_to_where_this_attempt_stops() -> None:
    config = CONFIG | {"train": {"steps": 200, "stop_at_step": 15}}
    assert status(ROWS, STARTED, 31, config=config).eta_s == pytest.approx(5 * 2.0)


def test_the_pace_of_a_group_that_has_just_begun_is_that_of_the_one_before() -> None:
    events = [*STARTED, FAILURE, generation(2, 40, 3, "node_silent", 9)]
    found = status([*ROWS[:9], row(10, 49, 2, step_s=9.0), row(11, 52, 2, step_s=3.0)], events, 53)
    assert found.eta_s == pytest.approx(189 * 2.0)
    assert found.speed is not None
    assert found.speed.step_s == 2.0


def test_nothing_but_a_submission_is_starting() -> None:
    found = status([], [submitted(0)], 100)
    assert (found.state, found.since, found.eta_s, found.speed) == (State.starting, T0, None, None)
    assert "not known yet" in dict(body(found))["goodput"]


def test_a_job_that_first_prepared_its_corpus_was_heard_when_its_first_line_was_written(tmp_path: Path) -> None:
    """That it was submitted is dated by the command."""
    storage, begun = Storage.at(tmp_path), time.time()
    with RunLog(storage) as log:
        log.event(Submitted(host="elsewhere", time=begun - 3600.0))
    found = read_status(storage)
    assert (found.state, found.since, found.submitted_at) == (State.starting, begun - 3600.0, begun - 3600.0)
    assert found.heard_at is not None
    assert begun <= found.heard_at <= time.time()
    assert read_status(storage, begun + 3600.0).state is State.silent


def test_nothing_at_all_is_starting_too() -> None:
    found = status([], [], 100, config={})
    assert (found.state, found.detail, found.run) == (State.starting, "nothing is logged yet", "mine")
    assert describe(found) == ["mine: starting", f"{'':18}nothing is logged yet"]


def test_a_lost_rank_is_regrouping_since_it_was_noticed_and_says_what_was_lost() -> None:
    found = status(ROWS, [*STARTED, FAILURE], 36)
    assert (found.state, found.since) == (State.regrouping, T0 + 31)
    assert found.detail == "a node fell silent: node 10.0.0.3: no answer"
    assert found.eta_s is not None
    assert "4 of 4 (at least 2) in the last group" in dict(body(found))["ranks"]


def test_a_larger_group_that_forms_is_regrouping() -> None:
    found = status(ROWS, [*STARTED, event("forming", 32, generation=2, members=[])], 33)
    assert (found.state, found.since) == (State.regrouping, T0 + 32)


def test_after_the_next_group_is_ready_it_trains_again_and_the_interruption_is_told() -> None:
    events = [*STARTED, FAILURE, event("failure", 32, cause="worker_died"), generation(2, 40, 3, "node_silent", 9)]
    found = status([*ROWS[:9], row(10, 42, 2)], events, 43)
    assert (found.state, found.since, found.world_size) == (State.training, T0 + 40, 3)
    (interruption,) = found.interruptions  # two failures, one interruption
    assert (interruption.cause, interruption.time) == ("node_silent", T0 + 31)
    assert (interruption.ranks_before, interruption.ranks_after, interruption.back_s) == (4, 3, 9.0)
    assert (interruption.lost_steps, interruption.source) == (1, "snapshot")
    assert found.causes == {"node_silent": 1}


def test_a_group_that_grew_or_left_a_node_was_interrupted_for_as_long_as_it_took_to_form() -> None:
    events = [*STARTED, generation(2, 40, 5, "grow", 10), generation(3, 60, 3, "drain", 12)]
    found = status(ROWS, events, 61)
    assert [(each.cause, each.time - T0, each.back_s) for each in found.interruptions] == [
        ("drain", 56.0, 4.0),
        ("grow", 36.0, 4.0),
    ]


def test_a_job_that_died_without_a_word_is_an_interruption_of_the_next_one() -> None:
    events = [*STARTED, submitted(100), generation(2, 120, 4, "resume", 10)]
    found = status([*ROWS, row(11, 122, 2)], events, 123)
    (interruption,) = found.interruptions
    assert (interruption.cause, interruption.time, interruption.back_s) == (Cause.driver_died, T0 + 30, 90.0)
    assert found.attempts == 2


def test_a_failure_that_ended_a_job_was_back_once_the_next_job_had_a_group() -> None:
    """It stood as not yet back for ever. The time without a job counts, as after one that ended without a word."""
    failed = event("stopped", 40, reason="failed", step=10)
    found = status(ROWS, [*STARTED, FAILURE, failed, submitted(100), generation(2, 120, 3, "resume", 10)], 121)
    (interruption,) = found.interruptions
    assert (interruption.cause, interruption.time, interruption.back_s) == ("node_silent", T0 + 31, 89.0)
    assert (interruption.ranks_before, interruption.ranks_after, interruption.source) == (4, 3, "snapshot")


def test_a_job_that_waited_for_the_one_before_it_is_the_one_that_is_shown() -> None:
    """The same command was started again while the first job's last checkpoint was still being written."""
    stopped = event("stopped", 31, reason="interrupted", step=10)
    waiting = [*STARTED, stopped, submitted(25)]
    assert status(ROWS, waiting, 32).state is State.starting
    found = status([*ROWS, row(11, 62, 2)], [*waiting, generation(2, 60, 4, "resume", 10)], 63)
    assert (found.state, found.since) == (State.training, T0 + 60)
    assert found.interruptions == []


def test_a_drivers_clock_says_nothing_about_what_a_run_does() -> None:
    for ahead_s in (-1000.0, 1000.0):
        events = [*STARTED, submitted(100 + ahead_s), generation(2, 120, 4, "resume", 10)]
        rows = [*ROWS, row(11, 122, 2)]
        assert status(rows, events, 123).state is State.training
        lost = event("failure", 123, cause="worker_died", generation=2)
        assert status(rows, [*events, lost], 124).state is State.regrouping
        assert status(rows, [*events, event("stopped", 124, reason="failed")], 125).state is State.failed


@pytest.mark.parametrize("log", ["events.jsonl", "events-w000001-ab-00000.jsonl"])
def test_a_run_is_here_where_its_log_is_in_segments_too(tmp_path: Path, log: str) -> None:
    """As of one that began in an object store and went on on a disk."""
    assert not is_here(str(tmp_path), T0, T0 + 9)
    (tmp_path / log).write_text(json.dumps(event("submitted", 1)) + "\n")
    assert is_here(str(tmp_path), T0, T0 + 9)
    assert not is_here(str(tmp_path), T0 + 5000, T0 + 5009)


def test_a_run_in_a_store_with_options_is_called_as_its_folder_is() -> None:
    history = History.of_logs(ROWS, STARTED)
    found = status_of(history, folder="s3://b/runs/mine?region=x", config={}, now=T0 + 31)
    assert found.run == "mine"


def test_a_job_that_starts_has_nothing_to_say_of_failures_before_it() -> None:
    events = [*STARTED, FAILURE, event("stopped", 40, reason="failed", step=10), submitted(100)]
    found = status(ROWS, events, 101)
    assert (found.state, found.since, found.detail) == (State.starting, T0 + 100, "")


def test_an_orderly_stop_is_no_interruption() -> None:
    events = [*STARTED, event("stopped", 31, reason="interrupted", step=10), submitted(100)]
    assert status(ROWS, events, 101).interruptions == []
    assert status(ROWS, events, 101).state is State.starting


@pytest.mark.parametrize(
    ("reason", "detail", "state"),
    [
        ("finished", "", State.finished),
        ("failed", "gradients are not finite", State.failed),
        ("interrupted", "", State.stopped),
        ("stop_at_step", "", State.stopped),
        ("of a later version", "", State.stopped),
    ],
)
def test_a_run_that_ended_says_how_and_has_no_time_left(reason: str, detail: str, state: State) -> None:
    ended = event("stopped", 31, step=10, reason=reason, detail=detail)
    for lock in (None, True, False):  # whoever holds it is not this attempt
        found = status(ROWS, [*STARTED, ended], 99_999, lock)
        assert (found.state, found.since, found.eta_s) == (state, T0 + 31, None)
        assert state.over
        assert detail in found.detail


@pytest.mark.parametrize("lock", [None, True, False])
def test_a_run_whose_last_step_is_old_is_never_shown_as_training(lock: bool | None) -> None:
    found = status(ROWS, STARTED, 30 + 61, lock)
    assert found.state is {None: State.silent, True: State.stalled, False: State.gone}[lock]
    assert found.since == found.heard_at == T0 + 30
    assert found.eta_s is None
    text = heading(found)
    assert "training" not in text
    assert "(1 min 1 s)" in text
    assert "2023-11-14 22:13:50 UTC" in text


@pytest.mark.parametrize("lock", [None, True])
def test_a_run_whose_folder_takes_no_writes_is_not_stalled(lock: bool | None) -> None:
    assert status(ROWS, STARTED, 30 + 59, lock, refusal="no room").state is State.training
    said = "the run folder takes no writes (no room): the job may well train; its own output says"
    for events, at in ((STARTED, 30 + 61), ([*STARTED, FAILURE], 31 + 601), ([submitted(0)], 601)):
        found = status(ROWS if events[1:] else [], events, at, lock, refusal="no room")
        assert (found.state, found.since, found.detail) == (State.silent, found.heard_at, said)
    assert status(ROWS, STARTED, 30 + 61, False, refusal="no room").state is State.gone


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"f_bavail": 200}, "no room"),
        ({"f_favail": 0}, "no room"),
        ({"f_favail": 0, "f_files": 0}, ""),  # a file system that does not count them
        ({"f_bavail": 0, "f_blocks": 0, "f_favail": 0, "f_files": 0}, ""),
        ({"f_flag": os.ST_RDONLY}, "it is read-only"),
    ],
)
def test_a_full_or_read_only_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, int], said: str
) -> None:
    here, elsewhere = Submitted(host=socket.gethostname()), Submitted(host="elsewhere")
    storage = write(tmp_path / "mine", ROWS, [STARTED[0] | {"host": here.host}, STARTED[1]])
    lock = lock_run(storage)
    room = {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1000, "f_bfree": 500, "f_bavail": 500, "f_files": 100}
    room |= {"f_ffree": 50, "f_favail": 50, "f_flag": 0, "f_namemax": 255}
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((room | changed).values()))
    assert why_unwritable(storage, here) == said
    found = read_status(storage, T0 + 30 + 61)
    assert (found.state, said in found.detail) == (State.silent if said else State.stalled, True)
    if "f_flag" in changed:  # as it is mounted on a machine that looks
        assert why_unwritable(storage, elsewhere) == ""
    assert why_unwritable(Storage.at("memory://nothing"), None) == ""
    assert lock is not None
    lock.close()


def test_slow_steps_are_not_silence() -> None:
    slow = [row(step, 100 * step, step_s=100.0) for step in range(1, 6)]
    assert status(slow, STARTED, 500 + 990).state is State.training
    assert status(slow, STARTED, 500 + 1010).state is State.silent


def test_a_group_that_starts_or_regroups_may_be_quiet_for_longer() -> None:
    for events in ([submitted(0)], [*STARTED, FAILURE]):
        last = events[-1]["time"] - T0
        assert not status([], events, last + 599).state.over
        assert status([], events, last + 601).state is State.silent
        assert status([], events, last + 601, held=True).state in (State.starting, State.regrouping)


def test_where_nobody_holds_the_run_it_is_gone_at_once_but_for_the_time_of_a_restarted_coordinator() -> None:
    assert status(ROWS, STARTED, 30 + 14, held=False).state is State.training
    found = status(ROWS, STARTED, 30 + 16, held=False)
    assert (found.state, found.since) == (State.gone, T0 + 30)
    assert found.detail == "it was training; then the job ended without a word"
    found = status(ROWS, [*STARTED, FAILURE], 31 + 16, held=False)
    assert found.detail.startswith("it was regrouping: a node fell silent")


def test_a_stalled_run_says_where_everybodys_stacks_are() -> None:
    events = [*STARTED, event("stalled", 95, generation=1, seconds=65.0, stacks="stacks/1.txt")]
    found = status(ROWS, events, 160, held=True)
    assert found.state is State.stalled
    assert "stacks/1.txt" in found.detail


@pytest.mark.parametrize("held", [True, None])
def test_a_group_that_stands_still_is_stalled_whatever_else_happens(held: bool | None) -> None:
    """What keepers, nodes and the coordinator tell is no step, and does not hide where the stacks are."""
    others = [
        event("stalled", 70, generation=1, seconds=40.0, stacks="stacks/1.txt"),
        event("snapshot_failed", 85, detail="no snapshot was committed for long"),
        event("ready", 130, node="n5", ranks=1),
        event("spares", 190, count=1, nodes={"n5": 1}),
    ]
    for at, number in ((86, 2), (91, 2), (135, 3), (191, 4)):
        found = status(ROWS, [*STARTED, *others[:number]], at, held)
        if at == 86:
            assert found.state is State.training
            continue
        assert (found.state, found.since, found.eta_s) == (State.stalled, T0 + 30, None)
        assert found.heard_at == others[number - 1]["time"]
        assert "stacks/1.txt" in found.detail
    scored = [*STARTED, *others, event("validation", 195, step=10, loss=1.0, seconds=160.0)]
    assert status(ROWS, scored, 200, held).state is State.training


@pytest.mark.parametrize("held", [True, None])
def test_a_run_that_writes_its_last_checkpoint_is_neither_stalled_nor_silent(held: bool | None) -> None:
    """That may take minutes, after its last step as after Ctrl-C."""
    trained = [*STARTED, event("trained", 30.5, step=10)]
    config = CONFIG | {"checkpoint": {"timeout_s": 1800.0}}
    lost = event("failure", 200, cause="node_silent", detail="node c", generation=1)
    for events, at in ((trained, 31), (trained, 31 + 599), (trained, 31 + 1799), ([*trained, lost], 300)):
        found = status(ROWS, events, at, held, config=config)
        assert (found.state, found.since, found.eta_s) == (State.training, T0 + 10, None)
        assert found.detail == "the last step is trained; its checkpoint is being written"
    found = status(ROWS, trained, 31 + 1801, held, config=config)
    assert found.state is (State.training if held else State.silent)
    assert status(ROWS, trained, 31 + 601).state is State.silent, "where the settings are not known"
    assert status(ROWS, trained, 31 + 16, held=False).state is State.gone
    assert status(ROWS, [*trained, event("stopped", 300, step=10, reason="interrupted")], 301).state is State.stopped


def test_what_the_job_before_had_trained_does_not_end_this_one() -> None:
    trained = [*STARTED, event("trained", 30.5, step=10), submitted(100)]
    assert status(ROWS, trained, 101).state is State.starting
    again = [*trained, generation(2, 120, 4, "resume", 10)]
    found = status([*ROWS, row(11, 122, 2)], again, 123)
    assert (found.state, found.detail) == (State.training, "")
    assert found.eta_s is not None
    assert status([*ROWS, row(11, 122, 2)], again, 122 + 61, held=True).state is State.stalled


def test_a_clock_that_was_ahead_in_the_job_before_does_not_hide_that_a_group_stands_still() -> None:
    ahead = [each | {"time": each["time"] + 5000} for each in [*STARTED, event("stopped", 31, reason="interrupted")]]
    events = [*ahead, submitted(100), generation(2, 120, 4, "resume", 10)]
    rows = [*(each | {"time": each["time"] + 5000} for each in ROWS), row(11, 122, 2)]
    assert status(rows, events, 180, held=True).state is State.training
    assert status(rows, events, 190, held=True).state is State.stalled


def test_a_run_that_waits_for_its_storage_says_so_until_the_next_step() -> None:
    waits = [*STARTED, event("data_waits", 29, rank=3, reason="503 Slow Down", generation=1)]
    found = status(ROWS, waits, 300, held=True)
    said = "rank 3 waits for rows that storage does not give: 503 Slow Down"
    assert (found.state, found.warnings) == (State.stalled, [said])
    assert status([*ROWS, row(11, 302)], waits, 303).warnings == []
    lost = event("failure", 200, cause="worker_died", generation=1)
    assert status(ROWS, [*waits, lost, generation(2, 210, 4, "worker_died", 10)], 211).warnings == []


def test_a_checkpoint_that_cannot_be_gone_back_to_is_not_told() -> None:
    """It was the newest one, and the run was at a step before it."""
    saved = [event("checkpoint", 20, step=5, seconds=1.0), event("checkpoint", 30, step=10, seconds=1.0)]
    again = [*STARTED, *saved, event("stopped", 31, step=10, reason="interrupted"), submitted(100)]
    damaged = [*again, event("checkpoint_damaged", 105, step=10, detail="crc", generation=2)]
    older = generation(2, 110, 4, "resume", 5) | {"source": "checkpoint"}
    rows = [*ROWS[:5], row(6, 112, 2), row(7, 114, 2)]
    for events in (damaged, [*damaged, older], [*again, older]):
        found = status(rows, events, 115)
        assert [each.step for each in found.checkpoints] == [5]
        assert dict(body(found))["checkpoints"].endswith("; 2 steps since")
    read_back = [*STARTED, *saved, event("checkpoint_failed", 31, step=10, detail="crc", generation=1)]
    assert [each.step for each in status(ROWS, read_back, 32).checkpoints] == [5]
    written = [*damaged, older, event("checkpoint", 122, step=10, seconds=1.0)]
    assert [each.step for each in status(rows, written, 123).checkpoints] == [10, 5]


def test_a_node_is_left_alone_by_the_job_that_found_it_to_fail() -> None:
    alone = [*STARTED, event("quarantine", 20, node="n7", seconds=3600.0, host="h7")]
    assert "left alone" in " ".join(status(ROWS, alone, 31).warnings)
    next_job = [event("stopped", 31, reason="interrupted"), submitted(40), generation(2, 50, 4, "resume", 10)]
    assert status(ROWS, [*alone, *next_job], 51).warnings == []


def test_the_table_of_the_json_has_every_key() -> None:
    text = (REPO / "docs" / "watching.md").read_text()
    table = text[text.index("### JSON") : text.index("## Where a step")]
    named = [name for keys in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", keys)]
    assert sorted(named) == sorted(each.name for each in fields(Status))


def test_the_newest_checkpoints_are_told() -> None:
    saved = [event("checkpoint", 12 + n, step=n, bytes=17_000_000, seconds=0.5) for n in range(1, 9)]
    found = status(ROWS, [*STARTED, *saved], 31)
    assert [each.step for each in found.checkpoints] == [8, 7, 6, 5, 4]
    assert dict(body(found))["checkpoints"] == "step 8, 11.0 s ago, 17 MB in 0.50 s; 2 steps since"


def test_who_is_suspected_of_what_and_since_when_is_told_until_it_is_over() -> None:
    slow = {"kind": "slow_compute", "node": "n1", "pid": 7, "rank": 2, "since": T0 + 5, "factor": 1.2, "detail": "why"}
    link = {"kind": "slow_link", "node": "n2", "since": T0 + 6, "factor": 1.3, "detail": "GB/s"}
    events = [*STARTED, event("suspected", 12, **slow), event("suspected", 13, **link)]
    ranks = [{"rank": 2, "node": "n1", "compute_s": 0.5, "wait_all_s": 0.1, "memory_bytes": 1000, "power_w": 650.2}]
    found = status_of(History.of_logs(ROWS, events), folder="runs/x", config={}, now=T0 + 31, ranks=ranks)
    told = dict(body(found))
    assert told["suspects"].startswith("rank 2 on node n1 computes slowly since ")
    assert told["suspects"].endswith("(26.0 s), steps take 1.20 times as long: why")
    assert [each.kind for each in found.suspects] == ["slow_compute", "slow_link"]
    assert told["slowest rank"] == "2 on node n1: computes 0.50 s a step, waits 0.10 s for others, memory 1 kB, 650 W"
    assert Status.from_dict(json.loads(found.to_json())) == found
    later = [*events, event("cleared", 14, kind="slow_compute", node="n1", pid=7)]
    assert [each.kind for each in status(ROWS, later, 31).suspects] == ["slow_link"]
    assert status(ROWS, [*later, generation(2, 130, 4, "worker_died", 10)], 134).suspects == []


def test_what_somebody_should_look_at_is_told_once_and_as_long_as_it_holds() -> None:
    events = [
        *STARTED,
        event("snapshot_failed", 12, detail="2.0 times as long"),
        event("snapshot_failed", 13, detail="2.0 times as long"),
        event("checkpoint_failed", 14, step=3, detail="disk full"),
        event("checkpoint_failed", 17, step=5, detail="bucket gone"),
        event("checkpoint", 16, step=4, bytes=1, seconds=1.0),
        event("quarantine", 15, node="n2", seconds=100.0),
        event("drain", 15, node="n3", deadline=T0 + 40),
        event("data_fallback", 18, rank=0, window=1, reason="late"),
        event("data_fallback", 18, rank=0, window=3, reason="late", windows=2),
        event("unfit", 19),  # of another version: no field of it is there
    ]
    ordered = sorted(events, key=lambda each: each["time"])
    found = " | ".join(status(ROWS, ordered, 31).warnings)
    for words in ("2.0 times as long", "bucket gone", "node n2 failed again", "node n3 is to be taken away", "late 3"):
        assert found.count(words) == 1, (words, found)
    assert "disk full" not in found  # a later one was committed
    assert "unfit" in found
    later = [*ordered, generation(2, 130, 4, "worker_died", 10)]
    found = " | ".join(status([*ROWS, row(11, 133, 2, loss=float("nan"))], later, 134).warnings)
    assert "times as long" not in found
    assert "quarantine" not in found
    assert found.endswith("the loss of step 11 is not finite")


def test_json_holds_everything_and_comes_back() -> None:
    events = [*STARTED, FAILURE, event("checkpoint", 32, step=10, bytes=1, seconds=0.1), generation(2, 40, 3, "drain")]
    found = status([*ROWS, row(11, 42, 2, loss=float("inf"))], events, 43, report={"goodput": 0.5, "wall_s": 30.0})
    text = found.to_json()
    assert "\n" not in text
    content = json.loads(text)
    assert content["state"] == "training"
    again = Status.from_dict(content | {"of_a_later_version": 1})
    assert again.interruptions == found.interruptions
    assert again.speed == found.speed
    assert again.checkpoints == found.checkpoints
    assert (again.goodput, again.goodput_as_of) == (0.5, T0 + 30)
    assert describe(again)[1:5] == describe(found)[1:5]
    with pytest.raises(ValueError, match="dancing"):
        Status.from_dict({"state": "dancing"})


def test_one_line_says_the_essentials() -> None:
    assert one_line(status(ROWS, STARTED, 31)) == (
        "2023-11-14 22:13:51 UTC mine: training, step 10/200, loss 0.8000, 50 tokens/s, 4 of 4 ranks, ETA 6 min 20 s"
    )
    assert one_line(status(ROWS, STARTED, 95)).endswith(
        "silent, step 10/200, last heard 1 min 5 s ago: it was training"
    )


def write(folder: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> Storage:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(map(encode, rows)))
    (folder / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return Storage.at(folder)


def test_a_folder_is_read_with_its_report_and_configuration(tmp_path: Path) -> None:
    storage = write(tmp_path / "mine", ROWS, STARTED)
    storage.write_bytes("report.json", b'{"goodput": 0.25, "wall_s": 31.0}')
    found = read_status(storage, T0 + 31)
    assert (found.run, found.folder, found.state, found.goodput) == ("mine", str(storage), State.training, 0.25)
    storage.write_bytes("report.json", b"torn")
    assert read_status(storage, T0 + 31).goodput is None
    storage.write_bytes("config.yaml", b"run: [")
    with pytest.raises(RegrowError, match=r"config\.yaml is damaged"):
        read_status(storage, T0 + 31)


def test_only_the_end_of_long_logs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(step, 10 + 2 * step) for step in range(1, 400)]
    storage = write(tmp_path / "mine", rows, STARTED)
    whole = read_status(storage, T0 + 810)
    monkeypatch.setattr(run_log, "TAIL_BYTES", 60_000)
    assert 100 < len(read_metrics(storage, tail=True)) < 250
    assert read_status(storage, T0 + 810) == whole


def test_when_a_dead_job_was_last_heard_is_known_without_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long log only the end is read; the job's last event was taken, which may be days older."""
    monkeypatch.setattr(run_log, "TAIL_BYTES", 2000)
    storage = Storage.at(tmp_path)
    for number, start, last, at in ((1, 0, 10, 0.0), (2, 8, 100, 100.0)):
        with RunLog(storage) as log:
            log.event(Submitted(host="elsewhere", time=T0 + at))
            log.begin(number, start)
            cause = "resume" if start else "start"
            ready = T0 + at + 10
            log.event(Generation(time=ready, generation=number, world_size=4, start_step=start, cause=cause))
            for step in range(start + 1, last + 1):
                log.row(row(step, at + 10 + 2 * (step - start), number))
    assert read_metrics(storage, tail=True)[0]["step"] > 11
    (interruption,) = read_status(storage, T0 + 301).interruptions
    assert (interruption.cause, interruption.time, interruption.back_s) == (Cause.driver_died, T0 + 30, 80.0)
    assert History.read(LogReader(storage)).interruptions == [interruption]


def test_ranks_of_the_job_before_are_not_shown_as_those_of_now(tmp_path: Path) -> None:
    storage = write(tmp_path / "mine", ROWS, [*STARTED, submitted(100)])
    for at, shown in ((99, 0), (130, 1)):
        ranks, nodes = [{"rank": 2, "node": "n1", "compute_s": 0.5}], [{"node": "n1", "seconds": 2.0}]
        storage.write_bytes(RANKS, encode({"time": T0 + at, "ranks": ranks, "snapshots": nodes}))
        assert len(read_status(storage, T0 + 131).ranks) == shown
        since = T0 + 100
        assert (len(read_ranks(storage, since)), len(read_node_snapshots(storage, since))) == (shown, shown)


def test_of_an_object_store_the_newest_segments_are_read_and_what_was_rolled_back_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "SEGMENT_BYTES", 2000)
    storage = Storage.at(f"memory://{tmp_path}")
    with RunLog(storage) as log:
        log.event(Submitted(host="elsewhere", time=T0))
        for number, start, last in ((1, 0, 60), (2, 40, 45)):
            log.begin(number, start)
            log.event(Generation(time=T0 + start, generation=number, world_size=4, start_step=start, cause="start"))
            for step in range(start + 1, last + 1):
                log.row(row(step, 10 + 2 * step, number))
                log.flush()
        assert len([name for name in storage.list() if name.startswith("metrics-")]) > 5
        newest = read_metrics(storage, tail=True)
        assert newest == read_metrics(storage)[-len(newest) :]
        assert len(newest) < 45
        assert read_status(storage, T0 + 101).step == 45
        log.begin(3, 42)
        assert read_status(storage, T0 + 101).step == 42


def test_a_watched_run_in_an_object_store_is_read_again_only_where_it_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look read all events of weeks."""
    storage, num_read = Storage.at(f"memory://{tmp_path}"), list[int]()

    def counted(read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(self: RemoteStorage, name: str, *how: Any) -> Any:
            content = read(self, name, *how)
            num_read.append(len(content) if name.startswith("events-") else 0)
            return content

        return counting

    monkeypatch.setattr(run_log, "SEGMENT_BYTES", 20_000)
    for read in (RemoteStorage.read_with, RemoteStorage.read_bytes):
        monkeypatch.setattr(RemoteStorage, read.__name__, counted(read))
    storage.write_bytes("config.yaml", yaml.safe_dump(CONFIG).encode())
    options: Any = SimpleNamespace(run=f"memory://{tmp_path}")
    with RunLog(storage) as log:
        log.event(Submitted(host="elsewhere", time=T0))
        for number in range(45):
            log.event(Note(time=T0 + number, text="x" * 2000))
            log.flush()
        look, _ = status_job.source(options)
        assert look().submitted_at == T0
        assert sum(num_read) > 80_000
        num_read.clear()
        log.event(Stopped(time=T0 + 50, reason="finished"))
        log.flush()
        found = look()
        assert 0 < sum(num_read) < 20_000
        assert found == read_status(storage, found.as_of)
        assert found.state is State.finished


def test_who_holds_the_run_is_seen_by_its_lock(tmp_path: Path) -> None:
    here, elsewhere = Submitted(host=socket.gethostname()), Submitted(host="elsewhere")
    storage = Storage.at(tmp_path)
    assert is_held(storage, here) is None  # no lock yet
    lock = lock_run(storage)
    assert lock is not None
    assert is_held(storage, here) is True
    assert is_held(storage, elsewhere) is True
    lock.close()
    assert is_held(storage, here) is False
    assert is_held(storage, elsewhere) is None  # of a machine whose locks are not seen here
    with open(tmp_path / LOCK_FILE) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # looking has left it free


def test_the_job_reads_a_folder_without_torch_ray_or_hydra(tmp_path: Path) -> None:
    write(tmp_path / "mine", ROWS, [*STARTED, event("stopped", 31, step=10, reason="finished")])
    command = [sys.executable, "-X", "importtime", "-m", "jobs.status", str(tmp_path / "mine")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine: finished 2023-11-14 22:13:51 UTC (")
    assert not {"torch", "ray", "hydra", "pyarrow"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    done = call("status", tmp_path / "mine", "--json", "--watch")  # a run that is over is not watched
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [10]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "holds no run that has begun"),
        (["ray://head:10001"], "name the dashboard's"),
        (["https://127.0.0.1:9"], "no Ray cluster lets us in"),
        (["mine", "--every", "0"], "--every takes a number of seconds above 0"),
        (["mine", "--every", "nan"], "--every takes a number of seconds above 0"),
        (["mine", "--every", "inf"], "--every takes a number of seconds above 0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    done = call("status", *arguments)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("usage:") and not line.startswith(" ")]
    assert len(errors) == 1, errors
    assert words in errors[0]
    assert done.returncode in (1, 2)


def test_a_watched_run_is_redrawn_on_a_terminal_until_it_ends(tmp_path: Path) -> None:
    storage = write(tmp_path / "mine", ROWS, STARTED)
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "jobs.status", str(storage), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, cwd=REPO, stdout=terminal, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(terminal)
        give_up = threading.Timer(40.0, process.kill)
        give_up.start()
        shown = ""
        for chunk in _chunks(controller):
            shown += chunk
            if shown.count("nothing heard since") > 1 and "stopped" not in (tmp_path / "mine/events.jsonl").read_text():
                with open(tmp_path / "mine" / "events.jsonl", "ab") as events:
                    events.write(encode(event("stopped", 31, step=10, reason="stop_at_step")))
        give_up.cancel()
        assert process.wait(timeout=30) == 0
    assert "at train.stop_at_step" in shown
    assert "\x1b[" in shown


def _chunks(controller: int) -> Iterator[str]:
    while True:
        try:
            chunk = os.read(controller, 1 << 16)
        except OSError:  # nobody has it open
            return
        if not chunk:
            return
        yield chunk.decode(errors="replace")


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for kubectl whose containers are this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "kubectl"
    program.write_text(
        "#!/bin/sh\n"
        f'export PATH="{Path(sys.executable).parent}:$PATH" PYTHONPATH="{REPO}:{REPO}/platform"\n'
        'case "$*" in *" exec "*jobs.status*) while [ "$1" != -- ]; do shift; done; shift; exec "$@" ;; esac\n'
        f'exec "{sys.executable}" "{stand_in_kubectl.__file__}" "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv(STATE, str(tmp_path))
    return tmp_path


def has_job(cluster: Path, storage_path: Path | str, *, run: str = "mine", **status: Any) -> None:
    entrypoint = f"python -m jobs.pretrain +cluster=cpu3 run.name={run} 'run.storage_path={storage_path}'"
    metadata = {"name": "mine", "annotations": {"regrow/run-name": "mine", "regrow/git-sha": "0123456789ab"}}
    store(
        cluster, "rayjobs.ray.io", "mine", {"metadata": metadata, "spec": {"entrypoint": entrypoint}, "status": status}
    )


def test_a_job_of_kubernetes_is_asked_through_its_head(kubernetes: Path) -> None:
    write(kubernetes / "mine", ROWS, [*STARTED, event("stopped", 31, step=10, reason="finished")])
    look = on_kubernetes("mine", namespace="pretrain", context="east")
    with pytest.raises(ClusterError, match="no RayJob mine in namespace pretrain: not started"):
        look()

    has_job(kubernetes, kubernetes, jobDeploymentStatus="Initializing")
    found = look()
    assert (found.run, found.state, found.detail) == ("mine", State.starting, "its cluster has no head yet")
    assert found.folder == str(kubernetes / "mine")
    assert found.job[0] == "Initializing"
    assert "Initializing" in "\n".join(describe(found))

    has_job(kubernetes, kubernetes, jobDeploymentStatus="Running", jobStatus="RUNNING", rayClusterName="mine-c1")
    labels = {"ray.io/cluster": "mine-c1", "ray.io/node-type": "head"}
    store(
        kubernetes, "pods", "head-1", {"metadata": {"name": "head-1", "labels": labels}, "status": {"phase": "Running"}}
    )
    found = look()
    assert (found.state, found.step, found.run) == (State.finished, 10, "mine")
    assert found.job[0] == "Running (RUNNING)"

    has_job(kubernetes, kubernetes / "empty", jobDeploymentStatus="Running", rayClusterName="mine-c1")
    assert (look().state, look().detail) == (State.starting, "nothing is logged yet")
    (kubernetes / "damaged").mkdir()
    (kubernetes / "damaged" / "config.yaml").write_text("run: [")
    (kubernetes / "damaged" / "events.jsonl").write_text("")
    has_job(kubernetes, kubernetes, jobDeploymentStatus="Running", rayClusterName="mine-c1", run="damaged")
    assert look().state is State.unseen
    assert "config.yaml is damaged" in look().detail
    assert describe(look())[0] == "damaged: unseen"
    has_job(kubernetes, kubernetes / "empty", jobDeploymentStatus="Running", rayClusterName="mine-c1")

    (kubernetes / "objects" / "pods.head-1.json").unlink()
    assert look().detail == "its cluster has no head yet"
    for job, state in (("SUCCEEDED", State.finished), ("STOPPED", State.stopped), ("FAILED", State.failed)):
        has_job(kubernetes, kubernetes, jobDeploymentStatus="Complete", jobStatus=job, rayClusterName="mine-c1")
        assert (look().state, look().detail) == (
            state,
            f"its cluster is gone; the run itself is in {kubernetes / 'mine'}",
        )


class Job:
    """A job as Ray's client lists it."""

    def __init__(self, entrypoint: str, started: int, status: JobStatus = JobStatus.RUNNING) -> None:
        self.entrypoint, self.start_time, self.submission_id = entrypoint, started, f"job-{started}"
        self.status, self.end_time, self.metadata, self.message = status, None, None, None
        self.runtime_env: dict[str, Any] = {}


FAILED = [*STARTED, event("stopped", 31, step=10, reason="failed", detail="three groups in a row ended")]
STOPPED = [*STARTED, event("stopped", 31, step=10, reason="interrupted")]
BEFORE = "the attempt before it: failed: three groups in a row ended"
BEFORE_STOPPED = "the attempt before it: stopped: it was asked to"


def test_what_the_attempt_before_left_is_not_what_a_job_of_kubernetes_does_now(kubernetes: Path) -> None:
    storage = write(kubernetes / "mine", ROWS, FAILED)
    labels = {"ray.io/cluster": "mine-c2", "ray.io/node-type": "head"}
    store(kubernetes, "pods", "head-2", {"metadata": {"name": "head-2", "labels": labels}})
    look = on_kubernetes("mine", namespace="pretrain", context=None)

    def of_attempt_that_began(at: float, **status: Any) -> Status:
        began = datetime.fromtimestamp(T0 + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        has_job(kubernetes, kubernetes, rayClusterName="mine-c2", startTime=began, **status)
        return look()

    alive = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    found = of_attempt_that_began(90, **alive)
    assert (found.state, found.since, found.detail) == (State.starting, T0 + 90, BEFORE)
    assert (found.step, found.eta_s, found.job[0]) == (10, None, "Running (RUNNING)")
    assert of_attempt_that_began(0, **alive).state is State.failed  # it wrote that itself
    over = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "endTime": "2023-11-14T22:15:00Z"}
    assert of_attempt_that_began(90, **over).detail == BEFORE
    assert of_attempt_that_began(0, **over).detail == "three groups in a row ended"
    storage.write_bytes("events.jsonl", b"".join(map(encode, STOPPED)))  # before, the job that failed was shown as this
    found = of_attempt_that_began(90, **over)
    assert (found.state, found.since, found.detail) == (State.failed, T0 + 100, BEFORE_STOPPED)
    found = of_attempt_that_began(90, **over | {"jobStatus": "STOPPED"})
    assert (found.state, found.detail) == (State.stopped, "it was asked to")
    storage.write_bytes("events.jsonl", b"".join(map(encode, STARTED)))  # its head is gone, and said nothing
    found = of_attempt_that_began(90, **alive)
    assert (found.state, found.detail) == (State.starting, "the attempt before it: silent: it was training")


@pytest.mark.parametrize(
    ("began", "status", "left", "shown"),
    [
        (90, JobStatus.RUNNING, "failed", (State.starting, BEFORE)),
        (90, JobStatus.FAILED, "failed", (State.failed, BEFORE)),
        (90, JobStatus.FAILED, "stopped", (State.failed, BEFORE_STOPPED)),  # before, it was shown as stopped
        (90, JobStatus.STOPPED, "stopped", (State.stopped, "it was asked to")),
        (0, JobStatus.FAILED, "failed", (State.failed, "three groups in a row ended")),  # it wrote that itself
    ],
)
def test_what_the_attempt_before_left_is_not_what_a_job_of_ray_does_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: int, status: JobStatus, left: str, shown: tuple[State, str]
) -> None:
    entrypoint = f"python -m jobs.pretrain run.name=mine run.storage_path={tmp_path}"
    client = SimpleNamespace(list_jobs=lambda: [Job(entrypoint, int(T0 + began) * 1000, status)])
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: client)
    monkeypatch.setattr(job_status, "is_here", lambda *_: False)
    storage = write(tmp_path / "mine", ROWS, {"failed": FAILED, "stopped": STOPPED}[left])
    monkeypatch.setattr(job_status, "_ask", lambda client, job, folder: read_status(storage).to_json())
    found = on_ray("http://head:8265", run=None)()
    assert (found.state, found.detail) == shown


def test_a_cluster_that_goes_away_while_it_is_asked_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was asked with is a job of ours: that its submission broke off says nothing of the run."""

    def submit_job(**_: Any) -> str:
        raise requests.exceptions.ConnectionError("Connection aborted.")

    job = Job("python -m jobs.pretrain run.name=mine run.storage_path=/nowhere/runs", int(T0) * 1000)
    client = SimpleNamespace(list_jobs=lambda: [job], submit_job=submit_job)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: client)
    monkeypatch.setattr(job_status, "is_here", lambda *_: False)
    with pytest.raises(ClusterError, match=r"^http://head:8265 does not answer: Connection aborted\.$"):
        on_ray("http://head:8265", run=None)()


def test_what_kubernetes_knows_is_said_without_a_way_to_the_bucket(
    kubernetes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_way(location: object) -> Storage:
        raise AssertionError(f"{location} was opened")

    monkeypatch.setattr(Storage, "at", no_way)
    metadata = {"name": "mine"}
    entrypoint = "python -m jobs.pretrain +cluster=cpu3 run.name=mine run.storage_path=s3://nowhere/runs/"
    status = {"jobDeploymentStatus": "Initializing"}
    store(
        kubernetes,
        "rayjobs.ray.io",
        "mine",
        {"metadata": metadata, "spec": {"entrypoint": entrypoint}, "status": status},
    )
    found = on_kubernetes("mine", namespace="pretrain", context=None)()
    assert (found.state, found.folder, found.job[0]) == (State.starting, "s3://nowhere/runs/mine", "Initializing")
    has_job(kubernetes, '"s3://nowhere/runs?endpoint_override=h:9"', jobDeploymentStatus="Initializing")
    found = on_kubernetes("mine", namespace="pretrain", context=None)()
    assert found.folder == "s3://nowhere/runs/mine?endpoint_override=h:9"


def test_watching_a_job_ends_with_it_or_when_it_is_deleted(kubernetes: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "jobs.status",
        "rayjob/mine",
        "--watch",
        "--every",
        "0.1",
        "--namespace",
        "pretrain",
    ]
    has_job(kubernetes, kubernetes, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", rayClusterName="mine-c1")
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished" in done.stdout
    has_job(kubernetes, kubernetes, jobDeploymentStatus="Initializing")
    (kubernetes / "script.json").write_text(json.dumps([{"jobDeploymentStatus": "Initializing"}, {"do": ["vanish"]}]))
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "error: no RayJob mine in namespace pretrain: not started, or removed after it had ended\n"


def test_a_job_that_trains_nothing_or_has_other_settings_is_one_line(kubernetes: Path) -> None:
    look = on_kubernetes("mine", namespace="pretrain", context=None)
    for entrypoint, words in (
        ("python train.py", "not jobs.pretrain"),
        ("python -m jobs.pretrain train.stepps=4", r"unknown setting 'train.stepps'"),
    ):
        store(kubernetes, "rayjobs.ray.io", "mine", {"metadata": {"name": "mine"}, "spec": {"entrypoint": entrypoint}})
        with pytest.raises(ClusterError, match=words) as caught:
            look()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cluster", ["kubernetes", "ray"])
@pytest.mark.parametrize(
    "argument",
    [
        "run.storage_path=/d/${oc.env:MINE}",
        r"run.storage_path=/d/$\{oc.env\:MINE\}",  # the same, as Hydra reads it
        r"run={storage_path:/d/$\{oc.env\:MINE\}}",
        "hydra.searchpath=[FOLDER] +theirs=file",
    ],
)
def test_nothing_of_the_environment_that_looks_is_told_to_a_job_of_somebody_else(
    cluster: str, argument: str, kubernetes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "s3cr3t")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file.yaml").write_text("# @package _global_\nrun: {storage_path: '/d/${oc.env:MINE}'}\n")
    words = shlex.join(argument.replace("FOLDER", f"file://{tmp_path}").split(" "))
    entrypoint, told = f"python -m jobs.pretrain run.name=x {words}", list[Any]()
    if cluster == "ray":
        client = SimpleNamespace(list_jobs=lambda: [Job(entrypoint, 1)], submit_job=lambda **job: told.append(job))
        monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: client)
        look = on_ray("http://head:8265", run=None)
    else:
        store(kubernetes, "rayjobs.ray.io", "mine", {"metadata": {"name": "mine"}, "spec": {"entrypoint": entrypoint}})
        look = on_kubernetes("mine", namespace="pretrain", context=None)
    says = r"is for the job's own environment to fill in; name the run's folder$"
    with pytest.raises(ClusterError, match=says) as caught:
        look()
    assert "s3cr3t" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not told


@pytest.mark.parametrize(
    ("other", "passed_over"),
    [
        ("python -m jobs.pretrain_torchrun model=1b", ""),
        (
            "python -m jobs.pretrain run.name=other train.newer_setting=3",
            "job-2 is passed over: this checkout does not",
        ),
        ("cd /x && python -m jobs.pretrain run.name=other > log", "job-2 is passed over: this checkout does not know"),
        ("echo 'jobs.pretrain", 'job-2 is passed over: "echo \'jobs.pretrain" is no command that can be read'),
    ],
)
def test_a_job_that_cannot_be_read_hides_no_other(other: str, passed_over: str) -> None:
    mine, unread = Job("python -m jobs.pretrain run.name=mine run.storage_path=/mnt", 1), Job(other, 2)
    for run in ("mine", None):
        found, place, note = _newest([mine, unread], run, "http://h:8265")
        assert (found, place) == (mine, ("mine", "/mnt/mine"))
        assert note.startswith(passed_over)
        assert bool(note) == bool(passed_over)
        assert "\n" not in note
    assert _newest([Job(mine.entrypoint, 3), unread], None, "http://h:8265")[2] == "", "it is older"
    with pytest.raises(ClusterError, match=r"no job of a run at http://h:8265") as caught:
        _newest([unread], None, "http://h:8265")
    assert str(caught.value).endswith(passed_over and _newest([mine, unread], None, "http://h:8265")[2])


def test_a_token_that_is_there_is_used_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    use_token()
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    use_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_ray_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match=r"no Ray cluster lets us in at http://127\.0\.0\.1:9 ") as caught:
        on_ray("http://127.0.0.1:9", run=None)
    assert "\n" not in str(caught.value)


def test_ranks_that_wait_beside_the_group_are_shown_until_another_job_begins() -> None:
    spares = event("spares", 11, count=2, nodes={"a": 2}, generation=1)
    found = status(ROWS, [*STARTED, spares], 31)
    assert found.spares == 2
    assert any(
        line.startswith("  ranks") and "4 of 4 (at least 2) and 2 spares, gen" in line for line in describe(found)
    )
    assert "4 of 4 ranks and 2 spares, " in one_line(found)
    assert Status.from_dict(json.loads(found.to_json())).spares == 2
    assert status(ROWS, [*STARTED, spares, submitted(40)], 41).spares == 0

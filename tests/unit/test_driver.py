"""The driver and a coordinator that is busy, or gone: on a real Ray, the calls alone."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle

from regrow.accept.tiny import tiny_model
from regrow.config.plain import to_yaml
from regrow.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    TrainConfig,
)
from regrow.control.membership import ENDS_WITH_JOB
from regrow.control.states import Settling
from regrow.data.preflight import Outlook
from regrow.data.read.corpora import Corpora
from regrow.data.read.manifest import Manifest, Shard
from regrow.errors import DataError, RegrowError
from regrow.record import events
from regrow.record.claim import OWNER, Claim
from regrow.record.lock import in_use, lock_run
from regrow.record.log import METRIC_KEYS, RunLog, read_events
from regrow.record.run_folder import read_status
from regrow.record.status import State
from regrow.runtime import driver, ended, shell
from regrow.runtime.cluster import Connection
from regrow.runtime.driver import Session
from regrow.runtime.ended import end_again
from regrow.runtime.run_folder import Run
from regrow.state.disk.catalog import committed_steps
from regrow.storage import Storage
from regrow.submit.ending import taken_over
from support.corpus import write_corpus, write_rows
from support.runs import RUN_ID, save_run
from support.trainers import trainer_of


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


class Reference:
    """Of a call that is answered at the third look, or never: as `ray.get` tells of it."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes: Iterator[Any] = iter(outcomes)

    def get(self) -> Any:
        outcome = next(self.outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference.get())
    made = object.__new__(Session)
    made.console, made.config = Lines(), PretrainConfig()  # type: ignore[assignment]
    return made


def test_a_coordinator_that_is_busy_for_minutes_is_waited_for_and_told_of_once(session: Session) -> None:
    """Started anew while storage is away, it answers nothing: before, the driver ended the run after a minute."""
    late = ray.exceptions.GetTimeoutError("timed out")
    assert session.answer(Reference(late, late, late, "answer")) == "answer"
    assert session.console.said == ["the run's coordinator has not answered for 60 s: waiting for it"]  # type: ignore[attr-defined]


def test_a_coordinator_that_is_gone_for_good_ends_the_job_in_one_line(session: Session) -> None:
    gone = ray.exceptions.ActorDiedError()
    with pytest.raises(RegrowError, match=r"^the run's coordinator has ended: [^\n]+$"):
        session.answer(Reference(gone))


def test_a_coordinator_that_does_not_end_in_time_does_not_fail_a_job_that_is_done(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Coordinator:
        class close:
            remote = staticmethod(lambda *arguments, keep: Reference(ray.exceptions.GetTimeoutError("timed out")))

    session.coordinator = Coordinator()
    assert "has not ended within" in session.close(4, "finished", "")
    assert driver.END_S > shell.CLOSE_S + shell.DELETE_S


def test_a_group_of_which_a_restarted_coordinator_saw_no_beginning_is_shown_without_how_it_started(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the driver ended with KeyError: 'startup_s', without a checkpoint."""
    unseen = events.Generation(time=1.0, generation=1, world_size=1, start_step=0, cause="start", workers=[])
    updates = [shell.Update(1, "event", unseen.to_row()), shell.Update(2, "row", {"step": 1, "step_s": 0.5})]
    rows = list[int]()
    session.console.row = lambda row: rows.append(row["step"])  # type: ignore[method-assign]
    session.coordinator = SimpleNamespace(
        updates=SimpleNamespace(remote=lambda after: Reference((updates[after:], "", False)))
    )
    session.interrupts = SimpleNamespace(asked_to_stop=False)  # type: ignore[assignment]
    session.shown, session.startup_s, session.messages = 0, {"model": 1.0}, SimpleQueue()
    assert session._show() == ""
    assert (rows, session.shown) == ([1], 2)
    assert session.console.said == [unseen.sentence()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_in_memory_alone_is_kept_only_where_the_ray_cluster_outlives_the_job(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RayJob's ends with it: the line promised that the same command goes on from the step, and it never did."""
    if ends:
        monkeypatch.setenv(ENDS_WITH_JOB, "1")
    config = PretrainConfig(cluster=ClusterConfig(address="auto"))
    line = driver._missing(config, Settling(False, "no room", 7, ("0123456789abcdef",)))
    assert line.startswith("step 7 is committed in memory and is not in storage (no room); ")
    assert line.endswith("it is lost with the Ray cluster, which ends with this job") is ends
    assert ("node 0123456789ab keeps it for snapshot.abandon_after_s=600: the same command" in line) is not ends


def test_a_batch_larger_than_the_corpus_is_refused_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, run.json was there by then, and the batch that the line asks for was refused as another setting."""
    rows = np.zeros((100, 17), np.uint32)
    write_corpus(tmp_path / "rows", rows, rows_per_group=8, rows_per_shard=64, vocab_size=512)
    config = PretrainConfig(
        run=RunConfig(name="mine", storage_path=str(tmp_path)),
        data=DataConfig(seq_len=16, corpora={"rows": str(tmp_path / "rows")}),
        optim=OptimConfig(global_batch_seqs=120, num_slices=12),
        cluster=ClusterConfig(address="ray://elsewhere"),
    )
    # as of a corpus whose rows were estimated, and no other cluster
    monkeypatch.setattr(driver, "check_corpus", lambda config: Outlook(None, 16, 1, 120, "guessed"))
    monkeypatch.setattr(driver, "cluster_for", lambda *_: nullcontext(Connection("", "")))
    with pytest.raises(DataError, match="lower it to at most 100"):
        driver.pretrain(config)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_job_whose_run_another_submission_has_ends_so_that_nothing_starts_it_anew(
    is_ours: bool, is_locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KubeRay's next attempt took the run back, and ended the job that a user had started."""
    folder = Storage.at(tmp_path) / "mine"
    Claim.take(folder, job="a0", owner="rayjob-a")
    Claim.take(folder, job="a1", owner="rayjob-a" if is_ours else "")
    error = in_use(folder) if is_locked else "run folder x is written by another job now (process 7 on h)"

    def ends(config: PretrainConfig) -> None:
        raise RegrowError(error)

    config = PretrainConfig(run=RunConfig(name="mine", storage_path=str(tmp_path)))
    monkeypatch.setenv(OWNER, "rayjob-a")
    monkeypatch.setattr(driver, "_pretrain", ends)
    with pytest.raises(RegrowError, match=re.escape(error)) if is_ours else nullcontext():
        driver.pretrain(config)
    said = capsys.readouterr().err
    line = (
        f"error: {error}; ends with status 0, so that nothing starts it anew; once the other one has ended, "
        "submit.action=apply goes on with the run"
    )
    assert said == ("" if is_ours else f"{line}\n")
    assert taken_over(said) == said.strip(), "the submitter's reader knows the line"


def test_what_ray_train_copies_to_each_worker_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A manifest of 20,000 shards was pickled for each of 16,384 workers: 90 GB out of one node.

    Ray Train puts the train function into the object store once, and its context into a call to each worker.
    """
    write_rows(tmp_path, num_rows=24)
    corpora = Corpora.at(tmp_path)
    (manifest,) = corpora.manifests
    shards = tuple(
        Shard(f"{k:05d}.parquet", 8192, 170_000_000 + k, f"{k:064x}", 12345, f"{2 * k:064x}", f"{3 * k:064x}")
        for k in range(20_000)
    )
    splits = {"train": replace(manifest.splits["train"], shards=shards)}
    corpora.__dict__["manifests"] = (replace(manifest, splits=splits),)
    trainer = trainer_of(tmp_path, corpora, PretrainConfig(), run_id="run")
    assert len(cloudpickle.dumps(trainer.train_run_context)) < 500e3
    assert len(cloudpickle.dumps(trainer._get_train_func())) > 2e6


def test_a_run_on_a_corpus_without_all_of_its_source_says_so_in_its_log(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the manifest alone named them: half of a source may be torn where it is copied."""
    noted = list[Any]()
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        write_rows(folder, num_rows=24)
    replace(Manifest.load(torn), damaged={"1.parquet[0:60]": "no footer", "2.parquet": "cut short"}).save(torn)
    corpora = Corpora.of({"a": str(whole), "b": str(torn)}, DataConfig())
    monkeypatch.setattr(driver, "start_stream", lambda *_, **__: None)
    monkeypatch.setattr(Session, "_trainer", lambda session: None)
    session.coordinator = SimpleNamespace(note=SimpleNamespace(remote=lambda *said: noted.append(said)))
    session.run = Run(Storage.at(tmp_path / "run"), RUN_ID, None)
    session._prepare(corpora, driver.Startup(), {})
    line = (
        f"b: 2 pieces of its source could not be read and are left out, the first: 1.parquet[0:60]: no footer; "
        f"python -m jobs.inspect_data {torn} names them"
    )
    assert noted == [("note", {"text": line})]


@pytest.mark.parametrize(("reason", "kept"), [("interrupted", True), ("stop_at_step", False)])
def test_the_command_to_resume_stops_where_the_run_was_to_stop_unless_it_has(
    monkeypatch: pytest.MonkeyPatch, reason: str, kept: bool
) -> None:
    """Before, a run that was interrupted at step 3 of 10 went on past 10."""
    monkeypatch.setattr("sys.argv", ["pretrain", "run.name=mine", "train.stop_at_step=10"])
    run = Run(Storage.at("runs") / "mine", "run", None)
    said = driver._farewell(PretrainConfig(run=RunConfig(name="mine")), run, 3, reason, None)
    command = "python -m jobs.pretrain run.name=mine"
    assert said.endswith(f"{command} train.stop_at_step=10" if kept else command)


@pytest.mark.parametrize(("step", "reason"), [(3, "interrupted"), (4, "stop_at_step"), (9, "stop_at_step")])
def test_a_run_that_is_past_where_it_was_to_stop_has_stopped_there(step: int, reason: str) -> None:
    """To stop earlier than what memory held: it was `interrupted`, status 130, and the printed command did nothing."""
    config = PretrainConfig(train=TrainConfig(steps=10, stop_at_step=4))
    assert driver._reason(config, step, "") == reason


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_command_to_resume_does_what_it_says_however_its_settings_were_given(
    monkeypatch: pytest.MonkeyPatch, plus: str
) -> None:
    """Before, it was refused, as the run had begun, or had nothing to do."""
    given = [f"{plus}run.resume=false", f"{plus}train.stop_at_step=10", "run.name=mine"]
    monkeypatch.setattr("sys.argv", ["pretrain", *given])
    assert driver._resume_command("stop_at_step") == "python -m jobs.pretrain run.name=mine"
    assert driver._resume_command("interrupted") == f"python -m jobs.pretrain {given[1]} run.name=mine"


@pytest.fixture
def started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Run the command of a run in `tmp_path` that is over; all that it says."""
    said = list[str]()

    def start(**checkpoint: int) -> list[str]:
        config = PretrainConfig(
            run=RunConfig(name="mine", storage_path=str(tmp_path)),
            train=TrainConfig(steps=5),
            cluster=ClusterConfig(address="auto"),
            checkpoint=CheckpointConfig(**checkpoint),
        )
        driver.pretrain(config)
        return said

    run = Run(Storage.at(tmp_path) / "mine", RUN_ID, 5)
    monkeypatch.setattr(driver, "check_may_start", lambda config: None)
    monkeypatch.setattr(driver, "check_corpus", lambda config: SimpleNamespace(line=lambda: ""))
    monkeypatch.setattr(driver, "cluster_for", lambda *_: nullcontext(Connection("", "")))
    monkeypatch.setattr(driver, "find_corpora", lambda *_, **__: SimpleNamespace(sha256=""))
    monkeypatch.setattr(driver, "find_or_create", lambda *_, **__: run)
    monkeypatch.setattr(driver, "_opening", lambda *_: "opening")
    monkeypatch.setattr(driver.Console, "message", lambda console, text: said.append(text))
    return start


def write_log(
    folder: Storage,
    *,
    ends: bool,
    note: str = "",
    trained: int = 5,
    stored: int = 5,
    train: TrainConfig | None = None,
    claim: Claim | None = None,
    ago_s: float = 3600.0,
    has_lock: bool = True,
) -> float:
    """Of a job that trained five steps, an hour ago; when it was heard last."""
    begun = time.time() - ago_s - trained - 4.0
    with RunLog(folder, claim=claim) as log:
        log.event(events.Submitted(time=begun, host=socket.gethostname(), pid=1))
        log.event(
            events.Generation(time=begun + 1.0, generation=1, world_size=1, start_step=0, cause="start", workers=[])
        )
        log.begin(1, 0)
        for step in range(1, trained + 1):
            fields = {"generation": 1, "step": step, "batch_digest": 1, "time": begun + 1.0 + step}
            log.row(dict.fromkeys(METRIC_KEYS, 0.1) | fields)
        if trained == stored:
            log.event(events.Trained(time=begun + trained + 2.0, step=trained))
        log.event(events.Checkpoint(time=begun + trained + 3.0, step=stored, seconds=1.0, bytes=1))
        if note:
            log.event(events.Note(time=begun + trained + 3.5, text=note))
        if ends:
            log.event(events.Stopped(time=begun + trained + 4.0, step=trained, reason="finished"))
    folder.write_bytes("config.yaml", to_yaml(PretrainConfig(train=train or TrainConfig(steps=5))).encode())
    if has_lock:
        (folder.local_path / ".lock").touch()
    return begun + trained + 3.0


def test_a_run_whose_driver_died_behind_its_last_commit_has_an_end_once_it_is_started_again(
    started_again: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Before, it was `gone` for good: there was nothing to do, so that nothing was written."""
    save_run(tmp_path / "mine", tiny_model(num_layers=1), steps=(5,))
    folder = Storage.at(tmp_path / "mine")
    heard_at = write_log(folder, ends=False)
    assert read_status(folder).state is State.gone
    said = started_again()
    assert [line for line in said if "nothing to do" in line or "have their end now" in line] == said[-2:]
    status = read_status(folder)
    assert (status.state, status.since) == (State.finished, heard_at)
    assert folder.exists("report.html")
    before = read_events(folder)
    started_again()
    assert read_events(folder) == before, "once"


def test_a_run_that_another_process_writes_is_left_to_it(
    started_again: Callable[..., list[str]], tmp_path: Path
) -> None:
    save_run(tmp_path / "mine", tiny_model(num_layers=1), steps=(5,))
    folder = Storage.at(tmp_path / "mine")
    write_log(folder, ends=False)
    before = read_events(folder)
    held = lock_run(folder)
    started_again()
    assert held is not None
    held.close()
    assert read_events(folder) == before


@pytest.mark.parametrize(
    ("trained", "stored", "again", "ago_s", "has_lock"),
    [
        (9, 6, TrainConfig(steps=10, stop_at_step=4), 3600.0, False),  # the same run, to stop earlier
        (10, 10, TrainConfig(steps=10), 0.0, False),  # behind its last COMMIT, where there are no locks
        (10, 10, TrainConfig(steps=10), 100.0, False),
        (10, 10, TrainConfig(steps=10), 0.0, True),  # as its coordinator is started anew
    ],
)
def test_a_job_that_may_live_is_left_alone(
    tmp_path: Path, trained: int, stored: int, again: TrainConfig, ago_s: float, has_lock: bool
) -> None:
    """Before, the claim of a command with nothing to do ended it, with `stopped` in its log."""
    folder = Storage.at(tmp_path)
    claim = Claim.take(folder)
    write_log(
        folder,
        ends=False,
        trained=trained,
        stored=stored,
        train=TrainConfig(steps=10),
        claim=claim,
        ago_s=ago_s,
        has_lock=has_lock,
    )
    before, told = read_events(folder), list[str]()
    end_again(PretrainConfig(train=again), Run(folder, RUN_ID, stored), told.append)
    assert (read_events(folder), told) == (before, [])
    claim.check()


@pytest.mark.parametrize(
    ("trained", "train", "state"),
    [
        (9, TrainConfig(steps=20), State.gone),
        (9, TrainConfig(steps=8), State.gone),  # rows past the last step: of another attempt
        (8, TrainConfig(steps=20), State.gone),
        (8, TrainConfig(steps=20, stop_at_step=8), State.stopped),
        (8, TrainConfig(steps=8), State.finished),
    ],
)
def test_the_end_that_a_dead_job_is_given_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: int, train: TrainConfig, state: State
) -> None:
    """Before, the command that a run was begun with recorded one that was extended, and crashed, as finished."""
    monkeypatch.setattr(ended, "write_report", lambda *_: None)
    folder = Storage.at(tmp_path)
    write_log(folder, ends=False, trained=trained, stored=8, train=train)
    end_again(PretrainConfig(train=TrainConfig(steps=5)), Run(folder, RUN_ID, 8), list[str]().append)
    assert read_status(folder).state is state
    assert [event["reason"] for event in read_events(folder) if event["event"] == "stopped"] == {
        State.gone: [],
        State.stopped: ["stop_at_step"],
        State.finished: ["finished"],
    }[state]


@pytest.mark.parametrize(
    ("ends", "note", "left"),
    [
        (True, "", [5, 4, 2, 1]),
        (False, "", [5, 4, 3, 2, 1]),  # the newest was not read back
        (True, "the checkpoint of step 5 could not be read back (is gone): older ones stay", [5, 4, 3, 2, 1]),
    ],
)
def test_old_checkpoints_that_a_finished_run_was_still_deleting_are_deleted_by_the_next_attempt(
    started_again: Callable[..., list[str]], tmp_path: Path, ends: bool, note: str, left: list[int]
) -> None:
    """As it says where it ends while it deletes; before, there was nothing to do for the next attempt."""
    save_run(tmp_path / "mine", tiny_model(num_layers=1), steps=(0, 1, 2, 3, 4, 5))
    folder = Storage.at(tmp_path / "mine")
    write_log(folder, ends=ends, note=note)
    (folder / "checkpoints").write_bytes("step-00000001/KEEP", b"{}")
    (folder / "checkpoints").delete("step-00000000/COMMIT")  # a deletion that was cut short
    started_again(every_steps=1, keep=2, keep_every_steps=2)
    assert committed_steps(folder / "checkpoints") == left
    assert not (folder / "checkpoints").list("step-00000000")
    taken = folder.list("writers")
    started_again(every_steps=1, keep=2, keep_every_steps=2)
    assert folder.list("writers") == taken, "there is nothing left to do"

"""The driver and a coordinator that is busy, or gone: on a real Ray, the calls alone."""

from collections.abc import Iterator
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

from regrow.config.schema import ClusterConfig, DataConfig, OptimConfig, PretrainConfig, RunConfig
from regrow.control.membership import ENDS_WITH_JOB
from regrow.control.states import Settling
from regrow.data.preflight import Outlook
from regrow.data.read.corpora import Corpora
from regrow.data.read.manifest import Shard
from regrow.errors import DataError, RegrowError
from regrow.record import events
from regrow.runtime import driver, shell
from regrow.runtime.cluster import Connection
from regrow.runtime.driver import Session
from regrow.runtime.run_folder import Run
from regrow.storage import Storage
from support.corpus import write_corpus, write_rows
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
    monkeypatch.setattr(driver, "cluster_for", lambda config, unit: nullcontext(Connection("", "")))
    with pytest.raises(DataError, match="lower it to at most 100"):
        driver.pretrain(config)
    assert not (tmp_path / "mine").exists()


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

"""Snapshots in the real job: what dies is restored from the memory of the nodes, without storage."""

import os
import signal
from pathlib import Path

import pytest

from regrow.testing.cluster import SMALL, Job, run_to_end

STEPS = 60
BASE = [*SMALL, "+cluster=cpu3", f"train.steps={STEPS}", "checkpoint.every_steps=1000", "snapshot.every_steps=1"]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(storage: Path) -> Job:
    job = run_to_end(storage, "undisturbed", *BASE)
    assert job.memory() == []  # a run that has ended leaves nothing there
    return job


def assert_same_run(job: Job, undisturbed: Job) -> None:
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1))
    for key in ("batch_digest", "loss"):  # bitwise: the group is as large as before
        assert [row[key] for row in job.metrics()] == [row[key] for row in undisturbed.metrics()]
    assert job.memory() == []
    assert not job.events("snapshot_unreadable")


def test_dead_workers_and_a_nodes_memory_gone_cost_at_most_a_step_and_no_storage(
    undisturbed: Job, storage: Path
) -> None:
    with Job(storage, "memory", *BASE) as job:
        job.wait_for(lambda: job.last_step() >= 20)
        assert len(job.memory()) == 3
        for pid in job.workers():  # all at once, so that nothing is sealed any more
            os.kill(pid, signal.SIGKILL)
        for path in job.memory()[0].glob("*.slot*"):
            path.unlink()
        assert job.wait() == 0, job.printed()
        generations = job.events("generation")
        assert [event["source"] for event in generations] == ["seed", "snapshot"]
        assert generations[1]["start_step"] >= 19
        assert_same_run(job, undisturbed)


def test_without_enough_of_it_left_the_run_goes_back_to_its_checkpoint(undisturbed: Job, storage: Path) -> None:
    arguments = [argument for argument in BASE if "checkpoint" not in argument]
    with Job(storage, "storage", *arguments, "checkpoint.every_steps=10") as job:
        job.wait_for(lambda: job.last_step() >= 20 and len(job.events("checkpoint")) >= 2)
        for pid in job.workers():
            os.kill(pid, signal.SIGKILL)
        for folder in job.memory()[:2]:  # a node and its peer
            for path in folder.glob("*.slot*"):
                path.unlink()
        assert job.wait() == 0, job.printed()
        assert [event["source"] for event in job.events("generation")] == ["seed", "checkpoint"]
        assert "no file holds elements" in job.events("snapshot_unreadable")[0]["detail"]
        assert [row["loss"] for row in job.metrics()] == [row["loss"] for row in undisturbed.metrics()]
        assert job.memory() == []

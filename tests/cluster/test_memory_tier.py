"""Snapshots in the real job: what dies is restored from the memory of the nodes, without storage."""

import os
import signal
from pathlib import Path

import pytest

from regrow.state.memory.slots import Committed
from support.cluster import SMALL, Job, run_to_end

STEPS = 60
ALONE = [*SMALL, f"train.steps={STEPS}", "checkpoint.every_steps=1000", "snapshot.every_steps=1"]
BASE = [*ALONE, "+cluster=cpu3"]


@pytest.fixture(scope="module")
def undisturbed(storage: Path) -> Job:
    """At one rank."""
    job = run_to_end(storage, "undisturbed", *ALONE)
    assert job.memory() == []  # a run that has ended leaves nothing there
    return job


def assert_same_run(job: Job, undisturbed: Job, unreadable: int = 0) -> None:
    rows, expected = job.metrics(), undisturbed.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["batch_digest"] for row in rows] == [row["batch_digest"] for row in expected]
    assert max(abs(row["loss"] - other["loss"]) for row, other in zip(rows, expected, strict=True)) <= 1e-5
    assert job.memory() == []
    assert len(job.events("snapshot_unreadable")) == unreadable


@pytest.mark.long
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
        first, *later = job.events("generation")
        assert first["source"] == "seed"
        assert {event["source"] for event in later} == {"snapshot"}
        assert later[0]["start_step"] >= 19
        assert_same_run(job, undisturbed)


@pytest.mark.long
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
        assert [event["source"] for event in job.events("generation")][:2] == ["seed", "checkpoint"]
        assert "no file holds elements" in job.events("snapshot_unreadable")[0]["detail"]
        assert_same_run(job, undisturbed, unreadable=1)


def committed_step(job: Job) -> int:
    """The newest step that every node knows to be committed."""
    return min(Committed.read(folder).newest.step for folder in job.memory())


@pytest.mark.long
def test_a_keeper_that_was_killed_takes_its_place_again(storage: Path) -> None:
    with Job(storage, "keeper", *SMALL, "+cluster=cpu3", "train.steps=2000", "checkpoint.every_steps=1000") as job:
        job.wait_for(lambda: job.last_step() >= 10)
        keepers = [pid for pid in job.processes() if b"ray::Keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(keepers) == 3
        os.kill(keepers[1], signal.SIGKILL)
        died_at = job.last_step()
        job.wait_for(lambda: committed_step(job) > died_at + 5)
        assert len(job.events("generation")) == 1  # training never noticed
        for pid in job.workers():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: len(job.events("generation")) == 2)
        again = job.events("generation")[1]
        assert again["source"] == "snapshot"
        assert again["start_step"] > died_at + 5
        job.interrupt()
        assert job.wait() == 130, job.printed()
        assert job.events("checkpoint")[-1]["step"] == job.last_step()
        assert job.memory() == []


@pytest.mark.long
@pytest.mark.usefixtures("ray_folder")
def test_a_new_driver_finds_the_snapshots_of_the_one_that_died(undisturbed: Job, storage: Path) -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(3):
            nodes.add_node(num_cpus=1, resources={"regrow_worker": 1}, wait=True)
        arguments = [*BASE, "cluster.local_nodes=0", f"cluster.address={nodes.address}"]
        with Job(storage, "driver", *arguments) as job:
            job.wait_for(lambda: job.last_step() >= 20)
            job.kill_driver_and_workers()
            assert len(job.memory()) == 3
            again = Job(storage, "driver", *arguments)
            with again:
                assert again.wait() == 0, again.printed()
                generations = again.events("generation")
                assert generations[-1]["source"] == "snapshot"
                assert generations[-1]["start_step"] >= 19
                assert_same_run(again, undisturbed)
    finally:
        nodes.shutdown()

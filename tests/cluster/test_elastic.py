"""Nodes and workers die and come back under the real job: survivors stay, batches and losses are what they would be."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.drill.nodes import LocalNodes, local_nodes
from regrow.record.run_folder import checkpoints_of
from regrow.runtime.liveness.pulse import read_pulses, started_at
from regrow.runtime.worker import THREAD_NAME
from regrow.state.disk.catalog import choose
from regrow.state.entries import Progress
from support.cluster import SMALL, Job, run_without_ray
from support.counted import expected
from support.fail_once import can_fail_once
from support.hold import held, thread_named

pytestmark = pytest.mark.timeout(600)  # a step of a third of a second, on machines that do other things too
STEPS, COMPARED = 160, 100  # losses are compared over so many: beyond, the order of additions tells
SLOW = ["model.dim=256", "model.ffn_dim=704", "data.seq_len=128"]  # a step of a third of a second
CALM = ["optim.lr=3e-4"]  # at the default a spike, as with the corpus of another Python, tells that order sooner
BASE = [*SMALL, *SLOW, *CALM, "snapshot.every_steps=1", "checkpoint.every_steps=1000", "cluster.cpus_per_worker=2"]


class Undisturbed:
    """The same run at one rank, as far as it is compared with."""

    def __init__(self, storage: Path) -> None:
        self._storage, self._rows = storage, list[dict[str, Any]]()

    def first(self, steps: int) -> list[dict[str, Any]]:
        """Its rows up to this step, or COMPARED: each is trained once."""
        wanted = min(steps, COMPARED)
        if len(self._rows) < wanted:
            settings = [f"train.steps={STEPS}", f"train.stop_at_step={wanted}"]
            self._rows = run_without_ray(self._storage, "undisturbed", *BASE, *settings, ranks=1).metrics()
        return self._rows[:wanted]


@pytest.fixture(scope="module")
def undisturbed(storage: Path) -> Undisturbed:
    return Undisturbed(storage)


@pytest.fixture(params=[pytest.param("gloo", marks=pytest.mark.long), "asynchronous"])
def backend(request: pytest.FixtureRequest) -> str:
    """Also the one on which a dead peer raises nothing, as on NCCL."""
    return str(request.param)


def start(storage: Path, name: str, nodes: LocalNodes, backend: str, least: int, most: int, *more: str) -> Job:
    settings = [f"cluster.address={nodes.address}", f"cluster.backend={backend}"]
    settings += [f"cluster.min_workers={least}", f"cluster.max_workers={most}"]
    return Job(storage, f"{name}-{backend}", *BASE, f"train.steps={STEPS}", *settings, *more)


def wait_for_generation(job: Job, number: int) -> dict[str, Any]:
    job.wait_for(lambda: len(job.events("generation")) >= number, 150)
    return job.events("generation")[number - 1]


def pids(generation: dict[str, Any]) -> set[int]:
    return {worker["pid"] for worker in generation["workers"]}


def began_at(pid: int) -> float:
    """Unix time, within the kernel's tick."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + started_at(pid) / os.sysconf("SC_CLK_TCK")


def assert_same_run(job: Job, undisturbed: Undisturbed, *, steps: int = STEPS) -> None:
    rows, expected = job.metrics(), undisturbed.first(steps)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert len(expected) == min(steps, COMPARED)
    for row, other in zip(rows, expected, strict=False):
        assert row["batch_digest"] == other["batch_digest"], row["step"]
        assert abs(row["loss"] - other["loss"]) <= 1e-5, row["step"]
    assert job.memory() == []


def test_three_nodes_lose_one_with_its_memory_and_get_one_back(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    name = "tests.support.counted:Counted"
    callback = f"train.callback={name}"
    with local_nodes(3, cpus=2) as nodes, start(storage, "nodes", nodes, backend, 2, 3, callback) as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        assert first["world_size"] == 3
        nodes.kill(1)
        second = wait_for_generation(job, 2)
        assert (second["world_size"], second["source"], second["cause"]) == (2, "snapshot", "worker_died")
        assert second["recomputed_steps"] <= 1
        assert pids(second) < pids(first)
        nodes.add()
        third = wait_for_generation(job, 3)
        assert (third["world_size"], third["source"], third["recomputed_steps"]) == (3, "snapshot", 0)
        (newcomer,) = {worker["node"] for worker in third["workers"]} - {worker["node"] for worker in first["workers"]}
        links = {link["node"]: link for link in job.events("link")}
        assert min(links[newcomer][way] for way in ("sent", "received")) > 1e6
        (ready,) = (event for event in job.events("ready") if event["node"] == newcomer)
        (worker,) = pids(third) - pids(first)
        raylet, up_at = nodes.pids(2)[0], ready["time"] - ready["start_s"]
        assert began_at(raylet) - 0.1 <= up_at < began_at(worker)  # not when Ray was asked about nodes next
        assert pids(second) < pids(third)
        job.wait_for(lambda: job.last_step() >= third["start_step"] + 10, 240)
        job.interrupt()
        assert job.wait(300) == 130, job.printed()
        assert len(job.events("generation")) == 3
        assert_same_run(job, undisturbed, steps=job.last_step())
        _, index = choose(*checkpoints_of(str(job.folder)))
        best = min(row["loss"] for row in job.metrics())
        kept = expected(job.last_step()) | {"best": best, "train.callback": name}  # of each step once, in order
        assert Progress.of(index.scalars).user == kept


@pytest.mark.long
def test_a_rank_that_fails_by_itself_costs_nobody_its_process(
    undisturbed: Undisturbed, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """As one that runs out of memory: where collectives raise nothing, nobody else would hear of it."""
    fail = can_fail_once(tmp_path, monkeypatch)
    with local_nodes(3, cpus=2) as nodes, start(storage, "fails", nodes, backend, 2, 3) as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        fail(job.workers()[1])
        second = wait_for_generation(job, 2)
        assert (second["world_size"], second["source"]) == (3, "snapshot")
        assert second["recomputed_steps"] <= 1
        assert pids(second) == pids(job.events("generation")[0])
        assert job.wait(300) == 0, job.printed()
        assert len(job.events("generation")) == 2
        assert_same_run(job, undisturbed)


@pytest.mark.long
def test_a_group_grows_past_the_size_it_started_with_and_shrinks_again(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    with local_nodes(2, cpus=2) as nodes, start(storage, "grow", nodes, backend, 2, 4) as job:
        job.wait_for(lambda: job.last_step() >= 5, 240)
        assert job.events("generation")[0]["world_size"] == 2
        nodes.add()
        nodes.add()
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 4, 150)
        before = job.events("generation")[-1]
        assert pids(job.events("generation")[0]) < pids(before)
        nodes.kill(3)
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 3, 150)
        survived = job.events("generation")[-1]["start_step"] + 5  # its own snapshots are safe
        job.wait_for(lambda: job.last_step() >= survived, 150)
        nodes.kill(2)
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 2, 150)
        assert pids(job.events("generation")[-1]) == pids(job.events("generation")[0])
        assert job.wait(300) == 0, job.printed()
        assert all(event["recomputed_steps"] <= 1 for event in job.events("generation"))
        assert_same_run(job, undisturbed)


@pytest.mark.long
def test_a_node_with_room_for_four_joins_at_once(storage: Path) -> None:
    """It joined as 3, 4 and 5 ranks, each of them a stop of all."""
    settings = [*SMALL, "snapshot.every_steps=1", "cluster.cpus_per_worker=2", "train.steps=100000"]
    settings += ["optim.num_slices=15", "optim.global_batch_seqs=15"]
    with local_nodes(1, cpus=2) as nodes:
        cluster = [f"cluster.address={nodes.address}", "cluster.min_workers=1", "cluster.max_workers=5"]
        with Job(storage, "four", *settings, *cluster) as job:
            job.wait_for(lambda: job.last_step() >= 5, 240)
            nodes.cpus = 8
            nodes.add()
            job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 5, 300)
            assert [event["world_size"] for event in job.events("generation")] == [1, 5]
            survived = job.last_step() + 5
            job.wait_for(lambda: job.last_step() >= survived, 120)


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "lost_steps"), [(1, 1), (2, 0)])
def test_two_nodes_of_two_workers_lose_one_and_get_it_back(
    undisturbed: Undisturbed, storage: Path, backend: str, replicas: int, lost_steps: int
) -> None:
    """Where each node has a replica, the survivors have all of the newest step between them."""
    layout = f"parallel.dp_replicate={replicas}"
    with local_nodes(2, cpus=4) as nodes, start(storage, f"pairs-{replicas}", nodes, backend, 2, 4, layout) as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        assert first["world_size"] == 4
        nodes.kill(0)
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 2, 150)
        assert pids(job.events("generation")[-1]) < pids(first)
        nodes.add()
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 4, 150)
        assert job.wait(300) == 0, job.printed()
        assert all(event["recomputed_steps"] <= lost_steps for event in job.events("generation"))
        assert_same_run(job, undisturbed)


@pytest.mark.long
def test_units_of_tensor_parallel_ranks_are_lost_and_come_back_whole(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    with local_nodes(2, cpus=4) as nodes, start(storage, "units", nodes, backend, 2, 4, "parallel.tp=2") as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        assert first["world_size"] == 4
        os.kill(job.workers()[1], signal.SIGKILL)  # the other one of its unit has nobody to work with
        second = wait_for_generation(job, 2)
        assert (second["world_size"], second["source"]) == (2, "snapshot")
        assert len({worker["node"] for worker in second["workers"]}) == 1
        assert any("wait: parallel.tp=2" in note["text"] for note in job.events("note"))
        third = wait_for_generation(job, 3)
        assert third["world_size"] == 4
        assert len(pids(third) & pids(first)) == 3
        nodes.kill(0)
        assert wait_for_generation(job, 4)["world_size"] == 2
        nodes.add()
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 4, 150)
        assert job.wait(300) == 0, job.printed()
        assert all(event["recomputed_steps"] <= 1 for event in job.events("generation"))
        assert_same_run(job, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes_of", "left", "then"),
    [
        pytest.param((4, 1), 3, (1, 3), id="a rank of a stage"),
        pytest.param((2, 2), 2, (2, 1), id="all ranks of a stage"),
    ],
)
def test_a_pipeline_loses_a_node_of_one_stage_is_planned_anew_and_gets_it_back(
    undisturbed: Undisturbed, storage: Path, backend: str, nodes_of: tuple[int, int], left: int, then: tuple[int, int]
) -> None:
    count, ranks = nodes_of
    with (
        local_nodes(count, cpus=2 * ranks) as nodes,
        start(storage, f"stages-{count}", nodes, backend, 2, 4, "parallel.pp=2") as job,
    ):
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        assert axes(first) == (4, 2, 2)
        nodes.kill(1)
        second = wait_for_generation(job, 2)
        assert (axes(second), second["source"]) == ((left, *then), "snapshot")
        assert second["recomputed_steps"] <= 1
        assert pids(second) < pids(first)
        nodes.add()
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 4, 150)
        last = job.events("generation")[-1]
        assert (axes(last), last["source"], last["recomputed_steps"]) == ((4, 2, 2), "snapshot", 0)
        assert pids(second) < pids(last)
        assert job.wait(300) == 0, job.printed()
        assert_same_run(job, undisturbed)
        assert job.events("suspected") == []


@pytest.mark.long
def test_ranks_that_share_rows_lose_a_node_go_on_with_one_unit_less_and_get_it_back(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    with local_nodes(4, cpus=2) as nodes, start(storage, "rows", nodes, backend, 2, 4, "parallel.cp=2") as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        assert (axes(first), first["axes"]["cp"]) == ((4, 1, 2), 2)
        nodes.kill(1)
        second = wait_for_generation(job, 2)
        assert (axes(second), second["axes"]["cp"], second["source"]) == ((2, 1, 1), 2, "snapshot")
        assert second["recomputed_steps"] <= 1
        assert pids(second) < pids(first)
        job.wait_for(lambda: job.events("spares") != [], 60)  # the one that shared rows with what is gone
        assert job.events("spares")[0]["count"] == 1
        job.wait_for(lambda: job.last_step() >= second["start_step"] + 5, 150)
        nodes.add()
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 4, 150)
        last = job.events("generation")[-1]
        assert (axes(last), last["source"], last["recomputed_steps"]) == ((4, 1, 2), "snapshot", 0)
        assert len(pids(first) & pids(last)) == 3
        assert job.wait(300) == 0, job.printed()
        assert_same_run(job, undisturbed)
        assert job.events("suspected") == []


def axes(generation: dict[str, Any]) -> tuple[int, int, int]:
    """World size, ranks of a pipeline, units."""
    sizes = generation["axes"]
    return generation["world_size"], sizes["pp"], sizes["dp_replicate"] * sizes["dp_shard"]


@pytest.mark.long
def test_a_stopped_worker_is_ended_and_replaced(undisturbed: Undisturbed, storage: Path, backend: str) -> None:
    with local_nodes(3, cpus=2) as nodes, start(storage, "stopped", nodes, backend, 2, 3) as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        victim = job.workers()[2]
        os.kill(victim, signal.SIGSTOP)
        second = wait_for_generation(job, 2)
        assert (second["world_size"], second["cause"]) == (2, "worker_hung")
        assert victim not in pids(second)
        (stalled,) = job.events("stalled")
        assert f"process {victim}, state T" in (job.folder / stalled["stacks"]).read_text()
        third = wait_for_generation(job, 3)
        assert third["world_size"] == 3
        assert victim not in pids(third)
        assert job.wait(300) == 0, job.printed()
        assert_same_run(job, undisturbed)


@pytest.mark.long
def test_a_worker_that_runs_and_never_arrives_is_ended_and_replaced(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    with local_nodes(3, cpus=2) as nodes, start(storage, "stuck", nodes, backend, 2, 3, "cluster.stuck_s=6") as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        victim, everyone = job.workers()[2], set(job.workers())
        with held_and_beating(job, victim):
            second = wait_for_generation(job, 2)
        assert (second["world_size"], second["cause"]) == (2, "worker_hung")
        assert pids(second) == everyone - {victim}
        (failure,) = job.events("failure")
        assert f"process {victim} runs, and is not in the collective that others wait in" in failure["detail"]
        third = wait_for_generation(job, 3)
        assert third["world_size"] == 3
        ahead = int(backend == "asynchronous")  # its device trained one more of the steps that its host never confirmed
        assert all(event["recomputed_steps"] <= 1 + ahead for event in job.events("generation"))
        assert job.wait(300) == 0, job.printed()
        assert_same_run(job, undisturbed)


@contextlib.contextmanager
def held_and_beating(job: Job, pid: int) -> Iterator[None]:
    """The thread that trains is held; not where it has the interpreter's lock, which would stop the others, too."""
    with contextlib.ExitStack() as holding:
        for _ in range(30):
            try:
                holding.enter_context(held(thread_named(pid, THREAD_NAME)))
            except PermissionError as error:
                pytest.skip(f"{error}: a process of the same user may not be traced here")
            time.sleep(1.0)
            (pulse,) = (pulse for folder in job.memory() for pulse in read_pulses(folder) if pulse.pid == pid)
            if pulse.silent_s < 0.5:
                yield
                return
            holding.close()
            time.sleep(0.5)
        raise AssertionError("it always had the lock")


@pytest.mark.long
def test_without_changes_in_place_all_workers_restart_from_memory(
    undisturbed: Undisturbed, storage: Path, backend: str
) -> None:
    """What a Ray whose insides are not known falls back to."""
    with (
        local_nodes(3, cpus=2) as nodes,
        start(storage, "restart", nodes, backend, 2, 3, "cluster.in_place=false") as job,
    ):
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        os.kill(job.workers()[1], signal.SIGKILL)
        second = wait_for_generation(job, 2)
        assert second["cause"] == "worker_died"
        assert second["source"] == "snapshot"
        assert second["recomputed_steps"] <= 1
        assert not pids(second) & pids(first)
        assert job.wait(300) == 0, job.printed()
        assert_same_run(job, undisturbed)


@pytest.mark.long
def test_without_changes_in_place_ray_train_restarts_all_workers_for_a_node_that_came(
    storage: Path, backend: str
) -> None:
    """It looks for one once a minute, and tells no process."""
    more = ["cluster.in_place=false", "train.steps=5000"]
    with local_nodes(2, cpus=2) as nodes, start(storage, "resized", nodes, backend, 2, 3, *more) as job:
        job.wait_for(lambda: job.last_step() >= 15, 240)
        (first,) = job.events("generation")
        nodes.add()
        second = wait_for_generation(job, 2)
        assert (first["world_size"], second["world_size"]) == (2, 3)
        assert (second["source"], second["cause"]) == ("snapshot", "grow")
        assert not pids(second) & pids(first)
        assert job.events("failure") == []
        job.wait_for(lambda: job.last_step() >= second["start_step"] + 10, 240)
        job.interrupt()
        assert job.wait(300) == 130, job.printed()
        assert [row["step"] for row in job.metrics()] == list(range(1, job.last_step() + 1))

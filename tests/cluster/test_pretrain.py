"""`python -m jobs.pretrain` on real raylets: the same batches at every world size, and no sample lost to a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import SMALL, Job, run_to_end, run_without_ray

FITS = ["data=python_docs", "data.seq_len=128"]  # a corpus that is large enough for the batch of any cluster
TOLERANCE = 1e-5  # of losses near 8, over at most 40 steps: reduction order alone stays within 2e-6


def workers(count: int) -> list[str]:
    return [f"cluster.min_workers={count}", f"cluster.max_workers={count}"]


def digests(job: Job) -> list[str]:
    return [row["batch_digest"] for row in job.metrics()]


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in job.metrics()]


@pytest.fixture(scope="module")
def undisturbed(storage: Path) -> Job:
    """40 steps at two ranks with nothing happening."""
    return run_without_ray(storage, "undisturbed", *SMALL, "train.steps=40", "checkpoint.every_steps=10", ranks=2)


@pytest.mark.parametrize(
    ("count", "settings", "validated"),
    [
        pytest.param(1, [], [], marks=pytest.mark.long, id="1"),  # test_elastic compares one and three
        pytest.param(
            3, ["+cluster=cpu3", "train.validate_every_steps=20", "train.validation_seqs=30"], [20, 30], id="3 nodes"
        ),
    ],
)
def test_30_steps_are_those_of_two_ranks(
    storage: Path, undisturbed: Job, count: int, settings: list[str], validated: list[int]
) -> None:
    """Three ranks are three nodes here, each a raylet of its own, and validate midway."""
    until_30 = [*SMALL, *workers(count), "train.steps=40", "train.stop_at_step=30"]
    job = run_to_end(storage, f"w{count}", *until_30, *settings)
    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert {row["world_size"] for row in rows} == {count}
    assert digests(job) == digests(undisturbed)[:30]
    assert losses(job) == pytest.approx(losses(undisturbed)[:30], abs=TOLERANCE)
    assert len(set(digests(undisturbed))) == 40
    assert losses(undisturbed)[-1] < losses(undisturbed)[0] - 0.5  # it learns
    assert [row["step"] for row in rows if row.get("validation_loss")] == validated


@pytest.mark.long
@pytest.mark.parametrize("resumed_at", [2, 3])
def test_after_kill_9_at_step_20_the_run_goes_on_as_if_nothing_had_happened(
    storage: Path, undisturbed: Job, resumed_at: int
) -> None:
    arguments = [*SMALL, "train.steps=40", "checkpoint.every_steps=10"]
    name = f"killed-{resumed_at}"
    with Job(storage, name, *arguments, *workers(2)) as job:
        job.wait_for(lambda: job.last_step() >= 20 and len(job.events("checkpoint")) >= 2)
        job.kill_driver_and_workers()
    resumed = run_to_end(storage, name, *arguments, *workers(resumed_at))
    start = resumed.events("generation")[-1]["start_step"]
    assert start in (20, 30)
    assert [row["step"] for row in resumed.metrics()] == list(range(1, 41))
    assert digests(resumed) == digests(undisturbed)
    assert len(set(digests(resumed))) == 40
    if resumed_at == 2:
        assert losses(resumed) == losses(undisturbed)  # bitwise: same layout, same kernels
    else:
        assert losses(resumed) == pytest.approx(losses(undisturbed), abs=TOLERANCE)
    assert resumed.report()["restarts"] == {"resume": 1}


@pytest.mark.long  # test_drill kills workers too
def test_a_worker_killed_midway_is_replaced_and_the_run_finishes_unchanged(storage: Path, undisturbed: Job) -> None:
    arguments = [*SMALL, *workers(2), "train.steps=40", "checkpoint.every_steps=10"]
    with Job(storage, "worker-killed", *arguments) as job:
        job.wait_for(lambda: job.last_step() >= 15)
        os.kill(job.workers()[1], 9)
        assert job.wait() == 0, job.printed()
    assert digests(job) == digests(undisturbed)
    assert losses(job) == losses(undisturbed)
    assert job.report()["generations"] == 2
    assert "a worker died" in job.printed()


@pytest.mark.long
def test_a_run_in_float8_ends_in_bfloat16_as_one_that_is_stopped_there_and_goes_on_without(
    storage: Path, undisturbed: Job
) -> None:
    arguments = [*SMALL, *workers(2), "train.steps=40", "parallel.dtype=bfloat16"]
    float8 = "parallel.float8=tensorwise_all_gather"
    run_to_end(storage, "by-hand", *arguments, float8, "train.stop_at_step=30")
    by_hand = run_to_end(storage, "by-hand", *arguments)
    job = run_to_end(storage, "tail", *arguments, float8, "parallel.bfloat16_tail=0.25")
    first, second = job.events("generation")
    assert (second["start_step"], second["cause"], second["recomputed_steps"]) == (30, "end_of_float8", 0)
    assert [worker["pid"] for worker in second["workers"]] == [worker["pid"] for worker in first["workers"]]
    assert digests(job) == digests(by_hand) == digests(undisturbed)
    assert losses(job) == losses(by_hand)  # bitwise


@pytest.mark.parametrize(
    ("number", "local_nodes"),
    [
        pytest.param(signal.SIGTERM, 0, id="SIGTERM"),
        pytest.param(signal.SIGTERM, 2, id="SIGTERM on nodes", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 0, id="ctrl-c", marks=pytest.mark.long),  # test_elastic has it too
    ],
)
def test_a_signal_to_its_group_commits_a_checkpoint_says_how_to_resume_and_leaves_no_process(
    number: int, local_nodes: int, storage: Path, undisturbed: Job
) -> None:
    """A terminal and GNU `timeout` signal the whole group of processes that the driver is in."""
    name = f"{signal.Signals(number).name}-{local_nodes}"
    arguments = [*SMALL, *workers(2), "train.steps=40", "checkpoint.every_steps=1000"]
    with Job(storage, name, *arguments, f"cluster.local_nodes={local_nodes}") as job:
        job.wait_for(lambda: job.last_step() >= 5)
        os.killpg(job.process.pid, number)
        assert job.wait() == 130, job.printed()
        assert job.processes() == []
        assert job.memory() == []
    stopped = job.last_step()
    assert 5 <= stopped < 40
    assert job.events("checkpoint")[-1]["step"] == stopped
    assert f"stopped at step {stopped} of 40" in job.printed()
    assert "python -m jobs.pretrain" in job.printed()
    assert "Traceback" not in job.printed()
    resumed = run_to_end(storage, name, *arguments)
    assert digests(resumed) == digests(undisturbed)
    assert losses(resumed) == losses(undisturbed)


@pytest.mark.long
def test_ctrl_c_while_workers_start_leaves_nothing_in_memory(storage: Path) -> None:
    with Job(storage, "early", *SMALL, *workers(2), "train.steps=40") as job:
        job.wait_for(lambda: bool(job.memory()))  # a keeper is up, which no group has made known yet
        job.interrupt()
        assert job.wait() == 130, job.printed()
        assert job.memory() == []
        assert job.processes() == []


@pytest.mark.long
def test_stop_at_step_leaves_the_schedule_of_the_whole_run(storage: Path, undisturbed: Job) -> None:
    arguments = [*SMALL, *workers(2), "train.steps=40"]
    stopped = run_to_end(storage, "stopped", *arguments, "train.stop_at_step=12")
    assert stopped.last_step() == 12
    finished = run_to_end(storage, "stopped", *arguments)
    assert [row["lr"] for row in finished.metrics()] == [row["lr"] for row in undisturbed.metrics()]
    assert losses(finished) == losses(undisturbed)
    again = run_to_end(storage, "stopped", *arguments)
    assert "nothing to do" in again.printed()


def test_a_changed_setting_is_refused_with_the_difference(storage: Path, undisturbed: Job) -> None:
    with Job(storage, "undisturbed", *SMALL, *workers(2), "train.steps=40", "optim.lr=0.1") as job:
        assert job.wait() == 1
        assert "optim.lr: 0.003 -> 0.1" in job.printed().splitlines()[-1]


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(storage: Path, undisturbed: Job) -> None:
    arguments = [*SMALL, *workers(2), "checkpoint.every_steps=10"]
    first = run_to_end(storage, "damaged", *arguments, "train.steps=40", "train.stop_at_step=20")
    (data, *_) = (first.folder / "checkpoints/step-00000020").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    second = run_to_end(storage, "damaged", *arguments, "train.steps=40")
    assert second.events("checkpoint_damaged")[-1]["step"] == 20
    assert data.name in second.events("checkpoint_damaged")[-1]["detail"]
    assert second.events("generation")[-1]["start_step"] == 10
    assert losses(second) == losses(undisturbed)


@pytest.mark.usefixtures("ray_folder")
def test_a_job_joins_a_running_cluster_with_the_checkouts_code_or_says_what_is_missing(storage: Path) -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        address = f"cluster.address={nodes.address}"
        job = run_to_end(storage, "joined", *SMALL, *workers(2), address, "train.steps=6")
        assert job.last_step() == 6
        shipped = job.events("generation")[-1]["regrow"]
        assert "py_modules" in shipped, f"workers ran {shipped}, not what the driver shipped"
        with Job(storage, "too-large", "+cluster=h100x64", *FITS, address) as refused:
            assert refused.wait() == 1
        assert "needs 64 GPUs (at least 32), found 0 with room for 0 workers" in refused.printed()
    finally:
        nodes.shutdown()


RESERVE = """
import sys, ray
ray.init(sys.argv[1])
group = ray.util.placement_group([{"CPU": 2}], name=sys.argv[2], lifetime="detached")
assert group.wait(30)
"""


@pytest.mark.long
def test_what_the_controller_of_an_earlier_driver_still_reserves_is_given_back(storage: Path) -> None:
    """Ray does not take back what is reserved just after its job's end: a node was kept from the run for good."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    try:
        cluster = [*SMALL, *workers(2), f"cluster.address={nodes.address}", "train.steps=12"]
        job = run_to_end(storage, "reserved", *cluster, "train.stop_at_step=4")
        run_id = json.loads((job.folder / "run.json").read_text())["run_id"]
        subprocess.run([sys.executable, "-c", RESERVE, nodes.address, f"{run_id}:left"], check=True, timeout=120)
        assert run_to_end(storage, "reserved", *cluster).last_step() == 12
    finally:
        nodes.shutdown()


HOLD = """
import sys, ray
ray.init(sys.argv[1], namespace="others")
if sys.argv[2] == "hold":
    kind = type("Other", (), {"there": lambda self: True})
    other = ray.remote(num_cpus=1, name="other", lifetime="detached")(kind).remote()
    assert ray.get(other.there.remote(), timeout=60)
else:
    ray.kill(ray.get_actor("other"))
"""


@pytest.mark.long
@pytest.mark.usefixtures("ray_folder")
def test_a_run_begins_with_what_others_on_the_cluster_leave_and_takes_the_rest_once_they_end(storage: Path) -> None:
    """It waited for all that the nodes could hold, without a word and for good."""
    from ray.cluster_utils import Cluster

    def others(what: str) -> None:
        subprocess.run([sys.executable, "-c", HOLD, nodes.address, what], check=True, timeout=120)

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2, wait=True)
        others("hold")
        elastic = ["cluster.min_workers=1", "cluster.max_workers=4", f"cluster.address={nodes.address}"]
        with Job(storage, "shared", *SMALL, *elastic, "train.steps=100000") as job:
            job.wait_for(lambda: job.last_step() >= 5, 300)
            assert {row["world_size"] for row in job.metrics()} == {3}
            assert any("begins with 3 of 4 workers" in note["text"] for note in job.events("note"))
            others("end")
            job.wait_for(lambda: len(job.workers()) == 4)
            job.interrupt()
            assert job.wait() == 130
    finally:
        nodes.shutdown()

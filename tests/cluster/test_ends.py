"""Whatever ends a run in good order has its newest committed step in storage, or one line says where it still is."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from regrow.drill.nodes import local_nodes
from regrow.drill.processes import of_ray
from regrow.runtime.interrupts import SAME_ASK_S
from regrow.state.disk.catalog import committed_steps
from regrow.state.memory.slots import Committed
from regrow.storage import Storage
from support.cluster import ROOT, SMALL, Job

pytestmark = pytest.mark.timeout(900)
SLOW = ["model.dim=256", "model.ffn_dim=704", "data.seq_len=128"]  # a step of a third of a second
TWO = [*SMALL, *SLOW, "cluster.min_workers=2", "cluster.max_workers=2", "cluster.cpus_per_worker=2"]
ENDLESS = [*TWO, "train.steps=100000", "checkpoint.every_steps=100000", "snapshot.every_steps=1"]
PREPARES = """
import threading
from jobs import pretrain
from regrow.config.store import run_job
from regrow.runtime import driver

def find_corpora(*_, **__):
    print("preparing a corpus", flush=True)
    threading.Event().wait()

driver.find_corpora = find_corpora
run_job(pretrain.main, name="pretrain")
"""


@pytest.mark.parametrize("where", ["starting Ray on this machine", "preparing a corpus"])
def test_sigterm_before_there_is_a_run_is_as_ctrl_c(storage: Path, where: str) -> None:
    """Before, Ray took the signal: status 15 without a word, or a stack of C++ and SIGABRT."""
    with tempfile.TemporaryDirectory(prefix="rgt", dir="/tmp", ignore_cleanup_errors=True) as folder:
        job = subprocess.Popen(
            [sys.executable, "-c", PREPARES, *SMALL, f"run.storage_path={storage}"],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert job.stdout is not None
        before = next(line for line in job.stdout if where in line)
        for _ in range(2):  # as GNU `timeout` does
            os.killpg(job.pid, signal.SIGTERM)
        printed = before + job.communicate(timeout=120)[0]
        assert job.returncode == 130, printed
        assert printed.endswith("\ninterrupted\n")
        assert "Traceback" not in printed
        assert of_ray(folder) == []


def committed_in_memory(job: Job) -> int:
    return max(Committed.read(folder).newest.step for folder in job.memory())


def in_storage(job: Job) -> list[int]:
    return committed_steps(Storage.at(job.folder / "checkpoints"))


@pytest.mark.long  # 200 random instants of all ends are in tests/unit, over real files
def test_a_job_that_waits_below_min_workers_and_is_stopped_has_its_newest_step_in_storage(storage: Path) -> None:
    with (
        local_nodes(2, cpus=2) as nodes,
        Job(storage, "below", *ENDLESS, f"cluster.address={nodes.address}") as job,
    ):
        job.wait_for(lambda: job.last_step() >= 15, 500)
        nodes.kill(1)
        job.wait_for(lambda: bool(job.events("failure")), 60)
        committed = committed_in_memory(job)
        assert committed >= 14
        job.interrupt()
        assert job.wait() == 130, job.printed()
        assert in_storage(job)[0] >= committed
        assert f"stopped at step {in_storage(job)[0]} of 100000" in job.printed()
        assert job.memory() == []


@pytest.mark.long
def test_what_storage_does_not_take_stays_in_memory_one_line_says_so_and_the_next_start_goes_on_from_it(
    storage: Path,
) -> None:
    with local_nodes(2, cpus=2) as nodes:
        settings = [*ENDLESS, f"cluster.address={nodes.address}", "checkpoint.timeout_s=15"]
        with Job(storage, "away", *settings) as job:
            job.wait_for(lambda: job.last_step() >= 15, 500)
            (job.folder / "checkpoints").write_text("no folder: nothing can be written below it")
            job.interrupt()
            assert job.wait() == 1, job.printed()
            last, folders = job.last_step(), job.memory()
            assert f"step {last} is committed in memory and is not in storage" in job.printed()
            assert len(job.events("checkpoint_failed")) > 1, "it was tried again"
            assert len(folders) == 2
            (job.folder / "checkpoints").unlink()
            again = Job(storage, "away", *settings)
            with again:
                again.wait_for(lambda: again.last_step() >= last + 5, 500)
                generation = again.events("generation")[-1]
                assert (generation["source"], generation["start_step"]) == ("snapshot", last)
                again.interrupt()
                assert again.wait() == 130, again.printed()
                assert in_storage(again)[0] == again.last_step()
                assert again.memory() == []


@pytest.mark.long
def test_who_leaves_at_once_is_told_what_stays_behind_and_finds_it_again(storage: Path) -> None:
    with local_nodes(2, cpus=2) as nodes:
        settings = [*ENDLESS, f"cluster.address={nodes.address}"]
        with Job(storage, "at-once", *settings) as job:
            job.wait_for(lambda: job.last_step() >= 15, 500)
            (job.folder / "checkpoints").write_text("no folder: nothing can be written below it")
            job.interrupt()
            job.wait_for(lambda: bool(job.events("checkpoint_failed")), 60)
            time.sleep(SAME_ASK_S)  # sooner it would be the same one
            os.killpg(job.process.pid, signal.SIGINT)
            assert job.wait(60) == 130, job.printed()
            last = job.last_step()
            assert f"step {last} is committed in memory and is not in storage" in job.printed()
            (job.folder / "checkpoints").unlink()
            with Job(storage, "at-once", *settings, f"train.stop_at_step={last + 5}") as again:
                assert again.wait() == 0, again.printed()
                assert again.events("generation")[-1]["start_step"] == last
                assert in_storage(again)[0] == last + 5
                assert again.memory() == []

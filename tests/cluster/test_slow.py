"""A rank that computes slowly, in the real job: named in the log, the status and ranks.json, and cleared afterwards."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from regrow.record.run_folder import read_status
from regrow.storage import Storage
from support.cluster import SMALL, Job

SHARE, PERIOD_S = 0.5, 0.1  # of its time a slow worker stands still


def stand_still_now_and_then(pid: int, over: threading.Event) -> None:
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SHARE * PERIOD_S)
        os.kill(pid, signal.SIGCONT)
        time.sleep((1 - SHARE) * PERIOD_S)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_at_half_its_speed_is_named_and_cleared_once_it_is_as_fast_as_the_others(storage: Path) -> None:
    overrides = [*SMALL, "cluster.local_nodes=3", "cluster.max_workers=3", "train.steps=100000", "model.dim=128"]
    with Job(storage, "slow", *overrides) as job:
        job.wait_for(lambda: job.last_step() >= 20, 400)
        victim, over = job.workers()[1], threading.Event()
        slowing = threading.Thread(target=stand_still_now_and_then, args=(victim, over))
        slowing.start()
        try:
            job.wait_for(lambda: bool(job.events("suspected")), 300)
            status = read_status(Storage.at(job.folder))
        finally:
            over.set()
            slowing.join()
        (suspected,) = job.events("suspected")
        assert (suspected["kind"], suspected["pid"], suspected["rank"]) == ("slow_compute", victim, 1)
        assert [each.kind for each in status.suspects] == ["slow_compute"]
        job.wait_for(lambda: bool(job.events("cleared")), 300)
        job.wait_for(lambda: (job.folder / "ranks.json").exists())
        ranks = json.loads((job.folder / "ranks.json").read_bytes())["ranks"]
        assert sorted(each["rank"] for each in ranks) == [0, 1, 2]
        assert job.events("failure") == []  # it is slow, not dead
        job.interrupt()
        assert job.wait() == 130, job.printed()  # as a shell has it of Ctrl-C

"""What `jobs.status` says of a real run, while it trains and after it was killed."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from regrow.observe.status import State, Status
from regrow.observe.status_folder import read_status
from regrow.observe.status_logs import GONE_S
from regrow.storage import Storage
from regrow.testing.cluster import ROOT, SMALL, Job

FROM_AFAR = """
import sys
from regrow.submit import job_status
job_status._is_here = lambda *_: False  # as if the folder were the cluster's alone
print(job_status.on_ray(sys.argv[1], run="watched")().to_json())
"""
SETTINGS = [*SMALL, "cluster.min_workers=1", "cluster.max_workers=2", "train.steps=100000", "checkpoint.every_steps=50"]


def until(look: Callable[[], Status], condition: Callable[[Status], bool], timeout_s: float = 90.0) -> Status:
    give_up_at = time.monotonic() + timeout_s
    while not condition(found := look()):
        assert time.monotonic() < give_up_at, found
        time.sleep(0.1)
    return found


def test_a_run_is_seen_from_its_folder_and_from_its_cluster_until_it_is_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with Job(tmp_path, "watched", *SETTINGS, "cluster.dashboard=true", f"cluster.dashboard_port={port}") as job:
        job.wait_for(lambda: job.last_step() >= 60 and bool(job.events("checkpoint")))
        storage = Storage.at(job.folder)
        found = read_status(storage)
        assert (found.run, found.state, found.world_size, found.max_workers) == ("watched", State.training, 2, 2)
        assert found.speed is not None
        assert found.eta_s is not None
        assert found.checkpoints[0].step >= 50
        assert found.interruptions == []

        address = re.findall(r"Ray dashboard: (http://\S+)", job.printed())[-1]
        for program in (["-m", "jobs.status", address, "--json"], ["-c", FROM_AFAR, address]):
            printed = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, timeout=240)
            assert printed.returncode == 0, printed.stderr
            seen = Status.from_dict(json.loads(printed.stdout))
            assert (seen.run, seen.state, seen.folder, seen.world_size) == ("watched", "training", str(storage), 2)
            assert "RUNNING" in seen.job[0]
            assert seen.step >= found.step

        subprocess.run(["kill", "-9", str(job.workers()[1])], check=True)
        found = until(lambda: read_status(storage), lambda each: bool(each.causes))
        assert found.state in (State.regrouping, State.training)
        assert list(found.causes) == ["worker_died"]
        found = until(lambda: read_status(storage), lambda each: each.state is State.training and each.generation == 2)
        assert found.interruptions[0].back_s is not None
        assert found.interruptions[0].ranks_before == 2

        job.kill_driver_and_workers()
        killed_at = time.time()
        found = until(lambda: read_status(storage), lambda each: each.state is not State.training)
        assert found.state in (State.gone, State.regrouping)
        found = until(lambda: read_status(storage), lambda each: each.state is State.gone)
        assert time.time() - killed_at < 3 * GONE_S
        assert found.since == found.heard_at
        assert found.heard_at is not None
        assert found.heard_at < killed_at + 2.0
        command = [sys.executable, "-m", "jobs.status", str(job.folder), "--json"]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert json.loads(printed)["state"] == "gone"

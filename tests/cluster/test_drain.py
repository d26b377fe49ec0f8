"""`jobs.drain` of each node of a running group in turn, on real raylets, as an operator would type it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.cluster import ROOT, SMALL, Job

pytestmark = [pytest.mark.timeout(1500), pytest.mark.long]
# of four slices the one of two ranks that has most has two, and so it has of three
GROUP = ["cluster.local_nodes=3", "cluster.min_workers=1", "cluster.max_workers=3", "cluster.spare_workers=auto"]
BATCH = ["optim.num_slices=4", "optim.global_batch_seqs=8", "train.steps=1000000"]


def drain(job: Job, *arguments: str, timeout_s: float = 900.0) -> tuple[int, list[dict[str, Any]], str]:
    """Its exit status, the lines of JSON that it printed, and what it said of errors."""
    command = [sys.executable, "-m", "jobs.drain", str(job.folder), "--json", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, lines, done.stderr


def test_each_node_in_turn_is_out_of_service_once_and_no_step_is_lost(storage: Path) -> None:
    """The spare takes over, and the node's own worker comes back as the next spare."""
    with Job(storage, "maintained", *SMALL, *GROUP, *BATCH) as job:
        job.wait_for(lambda: job.last_step() > 10 and bool(job.events("spares")), 300.0)
        status, nodes, _ = drain(job)
        assert status == 0
        assert sorted((node["ranks"], node["waiting"]) for node in nodes) == [(0, 1), (1, 0), (1, 0)]
        done = storage / "done"
        status, told, errors = drain(job, "all", "--each", f"echo $REGROW_NODE_ID >> {done}")
        assert status == 0, errors
        assert sorted(done.read_text().split()) == sorted(node["id"] for node in nodes)
        whole = [each for each in told if each["event"] in ("asked", "out", "back", "whole", "short")]
        assert [each["event"] for each in whole] == ["asked", "out", "back", "whole"] * 3
        assert {each["world_size"] for each in whole if each["event"] == "whole"} == {2}
        assert told[-1]["event"] == "done"
        assert sorted(told[-1]["back"]) == sorted(node["id"] for node in nodes)

        step = job.last_step()
        job.wait_for(lambda: job.last_step() > step + 5)
        groups = job.events("generation")
        assert {group["world_size"] for group in groups} == {2}
        assert {group["cause"] for group in groups[1:]} == {"drain"}
        assert {group["recomputed_steps"] for group in groups} == {0}
        assert job.events("failure") == []

        status, _, errors = drain(job, "nowhere")
        assert status == 1
        assert "error: no node 'nowhere' in this run; there are " in errors
        job.interrupt()
        assert job.wait() == 130
    status, _, errors = drain(job, "all")
    assert status == 1
    assert "does not run: interrupted at step" in errors


def test_a_node_too_many_is_refused_and_what_was_asked_for_survives_the_coordinator(storage: Path) -> None:
    with Job(
        storage, "few", *SMALL, *GROUP, *BATCH, "cluster.local_nodes=2", "cluster.max_workers=2", "optim.num_slices=2"
    ) as job:
        job.wait_for(lambda: job.last_step() > 5 and job.events("generation")[-1]["world_size"] == 2, 300.0)
        status, told, errors = drain(job, "all", "--patience", "8")
        assert status == 1
        assert [each["event"] for each in told if each["event"] not in ("leaving", "waiting")] == [
            *("asked", "out", "short", "left")
        ]
        assert "has 1 of the 1 workers that are there; without it 0 are left, and cluster.min_workers=1" in errors
        (out,) = told[-1]["out"]
        _, nodes, _ = drain(job)
        assert [node["id"] for node in nodes if node["asked"]] == [out]
        status, told, _ = drain(job, out[:12], "--undrain")
        assert (status, told[0]["event"]) == (0, "back")
        job.wait_for(lambda: job.events("generation")[-1]["world_size"] == 2, 300.0)
        assert {group["recomputed_steps"] for group in job.events("generation")} == {0}

"""Drills of the real job on real raylets: what they do, what they say of it, and that they leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from regrow.drill.log import Record
from regrow.drill.nodes import local_nodes
from regrow.drill.session import TAIL_STEPS
from support.cluster import ROOT, SMALL

pytestmark = pytest.mark.timeout(900)
SHORT = [*SMALL, "model.name=drill", "data.seq_len=64", "drill.compared_steps=30"]
LONG = ["kill_node", "grow_shrink", "pair_nodes", "stop_worker", "zombie", "drain", "black_hole", "kill_keeper"]
LONG += ["kill_coordinator", "kill_controller", "kill_driver", "corrupt_snapshot", "slow_worker", "two_at_once"]
LONG += ["one_after_another", "flips"]


def drill(storage: Path, name: str, *arguments: str, timeout_s: float = 600.0) -> tuple[int, str]:
    """Run a drill to its end; its exit status and what it printed."""
    command = [sys.executable, "-m", "jobs.drill", f"run.storage_path={storage}", f"run.name={name}", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stdout + done.stderr


def verdicts(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "verdict.json").read_bytes())
    return {verdict["claim"]: verdict["holds"] for verdict in content["verdicts"]}


@pytest.mark.long
def test_a_killed_worker_breaks_no_promise(storage: Path) -> None:
    plan = "drill.plan=['at step 12: kill_worker rank=1']"
    status, printed = drill(
        storage, "short", *SHORT, "+drill=kill_worker", plan, "train.stop_at_step=60", "drill.nodes=2"
    )
    folder = storage / "short"
    assert status == 0, printed
    assert set(verdicts(folder).values()) == {True}, printed
    assert "every promise held" in printed
    faults = [line for line in Record(folder).read() if line["record"] == "fault"]
    assert [(fault["kind"], fault["victims"][0]["rank"]) for fault in faults] == [("kill_worker", 1)]
    assert json.loads((folder / "plan.json").read_bytes())["plan"] == ["at step 12: kill_worker rank=1"]
    assert "<svg" in (folder / "timeline.svg").read_text()
    assert "kill_worker rank=1" in (folder / "drill.html").read_text()
    again = [*SHORT, "+drill=kill_worker", plan, "train.stop_at_step=60", "drill.nodes=2"]
    status, printed = drill(storage, "short", *again, "optim.lr=0.1")
    assert status == 1
    assert "optim.lr: 0.001 -> 0.1" in printed
    # Said again, without training, from what is there; and a promise broken since then is found.
    status, printed = drill(storage, "short", *again)
    assert status == 0, printed
    assert "this drill is over" in printed
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*rows[:20], *rows[21:]]) + "\n")
    (data, *_) = (folder / "checkpoints/step-00000060").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    status, printed = drill(storage, "short", *again)
    assert status == 1, printed
    broken = [claim for claim, holds in verdicts(folder).items() if not holds]
    assert "every committed checkpoint can be restored" in broken
    assert any("each step is there once" in claim for claim in broken)


@pytest.mark.long
def test_a_plan_without_an_end_stops_the_job_some_steps_after_its_last_fault(storage: Path) -> None:
    plan = "drill.plan=['at step 12: kill_worker rank=1']"
    endless = [*SHORT, "+drill=kill_worker", plan, "train.stop_at_step=null", "train.steps=20000", "drill.nodes=2"]
    status, printed = drill(storage, "endless", *endless)
    assert status == 0, printed
    (fault,) = [line for line in Record(storage / "endless").read() if line["record"] == "fault"]
    (over,) = [line for line in Record(storage / "endless").read() if line["record"] == "plan over"]
    assert over["step"] >= fault["step"] + TAIL_STEPS
    status, printed = drill(storage, "endless", *endless)
    assert status == 0, printed
    assert "this drill is over" in printed


def test_sigterm_stays_the_drills_own_while_nodes_are_added() -> None:
    before, seen, done = signal.getsignal(signal.SIGTERM), set(), threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            seen.add(signal.getsignal(signal.SIGTERM))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        with local_nodes(1, cpus=1):
            pass
    finally:
        done.set()
        watch.join()
    assert seen == {before}


def test_a_mistake_is_one_line_before_anything_starts(storage: Path) -> None:
    for arguments, says in (
        ([], "nothing to do; choose a plan with +drill=NAME: auto_spacing, black_hole"),
        (["+drill=kill_wroker"], "no drill called 'kill_wroker'; available: auto_spacing, black_hole"),
        (["+drill=kill_worker", "drill.plan=['at step 5: kill_noed']"], "did you mean kill_node?"),
        (["+drill=kill_worker", "train.stop_at_step=20"], "would never be due: the run ends with step 20"),
        (["+drill=soak", "train.steps=500"], "set train.steps="),
    ):
        status, printed = drill(storage, "mistaken", *arguments)
        assert status == 1, printed
        assert says in printed.splitlines()[-1]
        assert printed.startswith("error: "), printed
        assert not (storage / "mistaken").exists()


@pytest.mark.long
def test_a_soak_that_is_stopped_goes_on_and_adds_up(storage: Path) -> None:
    soak = [*SHORT, "+drill=soak", "drill.faults=6", "drill.seed=3", "drill.every_steps=[10,15]", "train.steps=400"]
    status, printed = drill(storage, "soak", *soak, "drill.stop_after_s=45", timeout_s=900)
    assert status == 1, printed  # it is not at its end
    status, printed = drill(storage, "soak", *soak, timeout_s=900)
    assert status == 0, printed
    numbers = [line["number"] for line in Record(storage / "soak").read() if line["record"] == "fault"]
    assert numbers == list(range(6))


@pytest.mark.long
@pytest.mark.parametrize("plan", LONG)
def test_a_plan_that_is_shipped_breaks_no_promise(storage: Path, plan: str) -> None:
    status, printed = drill(storage, plan, f"+drill={plan}", timeout_s=880)
    assert status == 0, printed

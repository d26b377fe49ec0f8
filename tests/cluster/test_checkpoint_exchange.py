"""Runs that begin with imported weights, or go on from an imported state, through the real jobs."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import ROOT, SMALL, Job, run_to_end


def checkpoint(*arguments: object, status: int = 0) -> str:
    command = [sys.executable, "-m", "jobs.checkpoint", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)  # four starts of Ray, one after another
def test_exported_runs_are_imported_and_trained_further(tmp_path: Path) -> None:
    trained = run_to_end(tmp_path, "trained", *SMALL, "train.steps=8", "checkpoint.every_steps=4")
    assert "sound, newest" in checkpoint("list", trained.folder)

    # The whole state: what follows is what would have followed.
    checkpoint("export", trained.folder, "--step", "4", "--to", tmp_path / "dcp", "--format", "dcp")
    checkpoint("import", "--from", tmp_path / "dcp", "--to", tmp_path / "moved", "--format", "dcp")
    moved = run_to_end(tmp_path, "moved", *SMALL, "train.steps=8")
    assert [row["step"] for row in moved.metrics()] == [5, 6, 7, 8]
    assert checkpoint("diff", trained.folder, moved.folder) == "the same state\n"

    # The weights: another run begins where this one had come to.
    assert f"with the tokenizer of {tmp_path}/data/" in checkpoint(
        "export", trained.folder, "--to", tmp_path / "hf", "--format", "hf"
    )
    checkpoint("import", "--from", tmp_path / "hf", "--to", tmp_path / "tuned", "--format", "hf")
    with Job(tmp_path, "tuned", *SMALL, "model.rope_theta=10000") as refused:
        assert refused.wait() == 1
    assert "model.rope_theta: 500000.0 -> 10000.0" in refused.printed()
    tuned = run_to_end(tmp_path, "tuned", *SMALL, "train.steps=4", "run.seed=1", "optim.lr=1e-4")
    losses = [run.metrics()[0]["loss"] for run in (trained, tuned)]
    assert losses[1] == pytest.approx(trained.metrics()[-1]["loss"], abs=0.15)  # batches differ
    assert losses[1] < losses[0] - 0.1
    checkpoint("verify", tuned.folder)

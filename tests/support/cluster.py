"""The real job as a real process, for tests and benchmarks that stop, kill and resume it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regrow.drill.processes import of_ray, send, wait_until_gone
from regrow.record.log import read_events, read_metrics
from regrow.storage import Storage

ROOT = Path(__file__).parents[2]
PRETRAIN = ("jobs.pretrain",)
GONE_S = 20.0  # for killed processes to be gone
SMALL = [  # a model whose step takes milliseconds, so that starting and stopping is what takes time
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=160",
    "data.seq_len=64",
    "train.validate_every_steps=0",
    "cluster.dashboard=false",
]


class Job:
    """One `python -m jobs.pretrain`, with a Ray of its own. A context manager: no process outlives it."""

    def __init__(self, storage: Path, name: str, *overrides: str, command: Sequence[str] = PRETRAIN) -> None:
        self.folder = storage / name
        self.output = storage / f"{name}.out"
        self._temporary = tempfile.TemporaryDirectory(prefix="rgt", dir="/tmp", ignore_cleanup_errors=True)
        self.ray_folder = Path(self._temporary.name)  # with Ray's logs
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, f"run.storage_path={storage}", f"run.name={name}", *overrides],
                cwd=ROOT,
                env={**environment, "RAY_TMPDIR": str(self.ray_folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 180.0) -> int:
        """The exit status; raises with what the job printed if it takes longer."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.printed()}") from error

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Wait until a condition on the run folder holds; raises if the job ends before or time runs out."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.printed()}"
            assert time.monotonic() < give_up_at, f"not within {timeout_s} s:\n{self.printed()}"
            time.sleep(0.02)

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(Storage.at(self.folder))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(Storage.at(self.folder)) if event["event"] == name]

    def memory(self) -> list[Path]:
        """The folders of this run's snapshots, one a node."""
        try:
            run_id = json.loads((self.folder / "run.json").read_bytes())["run_id"]
        except FileNotFoundError:
            return []
        return sorted(Path("/dev/shm").glob(f"regrow-{run_id}-*"))

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "report.json").read_bytes()))

    def last_step(self) -> int:
        rows = self.metrics() if (self.folder / "metrics.jsonl").exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def workers(self) -> list[int]:
        """Pids of the current group, in rank order."""
        return [worker["pid"] for worker in self.events("generation")[-1]["workers"]]

    def interrupt(self) -> None:
        """Ctrl-C: the whole foreground group gets it, as from a terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_driver_and_workers(self) -> None:
        """kill -9, the driver first."""
        send(signal.SIGKILL, [self.process.pid, *self.workers()])
        self.process.wait()

    def processes(self) -> list[int]:
        """Every live process that this job started."""
        return of_ray(str(self.ray_folder))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        wait_until_gone(send(signal.SIGKILL, self.processes()), GONE_S)
        self.process.wait()
        self._temporary.cleanup()
        for folder in self.memory():
            shutil.rmtree(folder, ignore_errors=True)


def run_to_end(
    storage: Path, name: str, *overrides: str, timeout_s: float = 180.0, command: Sequence[str] = PRETRAIN
) -> Job:
    """Run a job that should succeed; what it left in its folder can be read from the result."""
    with Job(storage, name, *overrides, command=command) as job:
        status = job.wait(timeout_s)
        assert status == 0, f"exit status {status}:\n{job.printed()}"
    return job


def run_without_ray(storage: Path, name: str, *overrides: str, ranks: int) -> Job:
    """The same steps by `jobs.pretrain_torchrun`: what a run is compared with need not start a cluster."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    return run_to_end(storage, name, *overrides, timeout_s=400, command=[*torchrun, "jobs.pretrain_torchrun"])

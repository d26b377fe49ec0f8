"""The sides of `recovery.py`, each a training run in a process of its own on a cluster that the benchmark breaks.

Ours is `python -m jobs.pretrain`. The stock ones are `recovery_stock.py`: Ray Train's own elasticity around the same
model and step, with its default settings, or tuned.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.recovery_cluster import LOOK_S, WORKER_CPUS, Cluster, set_in_environment
from benchmarks.recovery_samples import DEFAULT, OURS, OURS_DEFAULT, TUNED
from benchmarks.recovery_steps import Step, Trail

from regrow.drill.processes import send
from support.cluster import ROOT, Job

STOCK = str(Path(__file__).parent / "recovery_stock.py")
LEAST_WORKERS, MOST_WORKERS = 2, 3
CHECKPOINT_EVERY_STEPS = 5  # to storage, on the stock sides
SETTINGS = [  # of the job, which the stock sides read too; all else is as it comes
    "train.steps=1000000",  # never reached
    "train.validate_every_steps=0",
    "snapshot.every_steps=1",
    f"cluster.cpus_per_worker={WORKER_CPUS}",
    f"cluster.min_workers={LEAST_WORKERS}",
    f"cluster.max_workers={MOST_WORKERS}",
]
FAST_NOTICE = {  # of the cluster: a killed raylet is known to the GCS in less than a second; in 15 as it comes
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "250",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
TUNED_ENV = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # between polls of the workers; 2 by default
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "2",  # for a worker to answer one; 600
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # for room; 60
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",  # for the old group to close its connections; 30
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process less to start with each group
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
TAIL = 40  # lines of what a side printed


class SideFailed(Exception):
    """A side ended, or did not do in time what it was waited for."""


@dataclass(frozen=True)
class Worker:
    pid: int
    node: str


class Side(Protocol):
    """A training run under way. A context manager: when it ends, so do its driver, and its cluster with all workers."""

    name: str
    cluster: Cluster
    folder: Path  # what it writes
    trail: Trail

    def workers(self) -> list[Worker]:
        """Of the newest group, in rank order."""

    def restore_s(self) -> float | None:
        """What the newest group took to get its state, where that is known."""

    def status(self) -> int | None:
        """The driver's exit status, None while it runs."""

    def printed(self) -> str: ...

    def __enter__(self) -> "Side": ...

    def __exit__(self, *exception: object) -> None: ...


class Ours:
    def __init__(
        self, cluster: Cluster, storage: Path, run: str, overrides: Sequence[str] = (), *, side: str = OURS
    ) -> None:
        self.cluster, self.name = cluster, side
        self.job = Job(storage, run, f"cluster.address={cluster.address}", *SETTINGS, *overrides)
        self.folder = self.job.folder
        self.trail = Trail(self.folder / "metrics.jsonl", step_of_ours)

    def workers(self) -> list[Worker]:
        groups = self.groups()
        return [Worker(worker["pid"], worker["node"]) for worker in groups[-1]["workers"]] if groups else []

    def groups(self) -> list[dict[str, Any]]:
        """The `generation` events."""
        return self.job.events("generation")

    def restore_s(self) -> float | None:
        return float(self.groups()[-1]["startup_s"]["restore"])

    def status(self) -> int | None:
        return self.job.process.poll()

    def printed(self) -> str:
        return self.job.printed()

    def __enter__(self) -> "Ours":
        return self

    def __exit__(self, *exception: object) -> None:
        send(signal.SIGKILL, [self.job.process.pid])
        self.cluster.close()  # before what its keepers hold is removed
        self.job.__exit__(*exception)


class Stock:
    """Ray Train's own elasticity."""

    def __init__(self, cluster: Cluster, storage: Path, run: str, *, corpus: Path, config: Path, tuned: bool) -> None:
        self.cluster, self.name = cluster, TUNED if tuned else DEFAULT
        self.folder = storage / run
        self.folder.mkdir(parents=True)
        self.trail = Trail(self.folder / "steps.jsonl", step_of_stock)
        settings = {
            "address": cluster.address,
            "folder": str(self.folder),
            "corpus": str(corpus),
            "config": str(config),
            "workers": [LEAST_WORKERS, MOST_WORKERS],
            "cpus": WORKER_CPUS,
            "checkpoint_every_steps": CHECKPOINT_EVERY_STEPS,
            "tuned": tuned,
        }
        with set_in_environment(cluster.environment), open(self.folder / "driver.out", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, STOCK, json.dumps(settings)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def workers(self) -> list[Worker]:
        try:
            groups = (self.folder / "groups.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Worker(**worker) for worker in json.loads(groups[-1])["workers"]]

    def restore_s(self) -> float | None:
        return None

    def status(self) -> int | None:
        return self.process.poll()

    def printed(self) -> str:
        return (self.folder / "driver.out").read_text(errors="replace")

    def __enter__(self) -> "Stock":
        return self

    def __exit__(self, *exception: object) -> None:
        send(signal.SIGKILL, [self.process.pid])
        self.process.wait()
        self.cluster.close()


def step_of_ours(row: dict[str, Any]) -> Step:
    """A row of metrics.jsonl."""
    return Step(row["time"], row["step"], row["generation"], row["world_size"])


def step_of_stock(row: dict[str, Any]) -> Step:
    """A line of recovery_stock.py's."""
    return Step(**row)


def environment_of(side: str) -> dict[str, str]:
    """What the cluster's processes and the driver are to have in their environment."""
    found = {"PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": ""}  # new processes start sooner
    if side not in (DEFAULT, OURS_DEFAULT):
        found |= FAST_NOTICE
    return found | TUNED_ENV if side == TUNED else found


def wait_for(condition: Callable[[], Any], side: Side, timeout_s: float, what: str) -> Any:
    """What `condition` gives once that is true; raises SideFailed if the side ends before, or in time it is not."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        problem = f"ended with status {side.status()}" if side.status() is not None else ""
        if time.monotonic() > give_up_at:
            problem = f"not within {timeout_s:.0f} s"
        if problem:
            tail = "\n".join(side.printed().splitlines()[-TAIL:])
            raise SideFailed(f"{side.name}: waiting for {what}: {problem}; see {side.folder}\n{tail}")
        time.sleep(LOOK_S)


def write_config(folder: Path) -> Path:
    """The job's resolved settings as a file, for the sides that are not the job; its folder."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from regrow.config.plain import to_yaml
    from regrow.config.schema import PretrainConfig
    from regrow.config.store import CONF_DIR, to_dataclass

    ConfigStore.instance().store(name="pretrain_schema", node=PretrainConfig)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config: PretrainConfig = to_dataclass(compose("pretrain", overrides=SETTINGS))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def prepare_corpus(config: Path, storage: Path) -> Path:
    """The corpus of the settings, prepared where the jobs find it."""
    from regrow.config.store import load_run_config
    from regrow.data.prepare.prepare import find_or_prepare

    with contextlib.redirect_stdout(None):
        corpus, _ = find_or_prepare(load_run_config(config).data, str(storage), progress=lambda *_: None)
    return corpus.local_path

"""The job that a drill is about, as a process of its own; and an undisturbed one to compare with."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from regrow.config.schema import DrillJobConfig, ParallelConfig, PretrainConfig
from regrow.config.store import chosen, given_overrides, pretrain_overrides, to_dict
from regrow.drill.log import RunFollower
from regrow.drill.nodes import Nodes, Process, start_pretrain
from regrow.drill.processes import of_ray, send, wait_until_gone
from regrow.errors import ConfigError, RegrowError
from regrow.record.lock import is_held
from regrow.record.run_folder import read_record, run_folder
from regrow.show.console import Console

BEYOND_STEPS = 50  # of the undisturbed run, after those whose losses must agree
LAST_BYTES = 4096
POLL_S = 0.1
GONE_S = 20.0


class DrillJob:
    """`python -m jobs.pretrain` on the drill's nodes: started, and started again, with the same arguments."""

    def __init__(self, config: DrillJobConfig, nodes: Nodes) -> None:
        joined = replace(config.cluster, address=nodes.address, local_nodes=0, dashboard=False)
        self.arguments = pretrain_overrides(replace(config, cluster=joined), chosen(given_overrides()))
        self.output = run_folder(config).local_path / "drill.out"
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.nodes = nodes
        self.started_at = 0.0
        self._process: Process | None = None
        self._kill_at = float("inf")

    def start(self) -> int:
        """Its pid."""
        self.started_at = time.time()
        self._process = self.nodes.start_job(self.arguments, self.output)
        return self._process.pid

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status once it has ended; one that was to stop and has not in time is killed."""
        assert self._process is not None
        if time.monotonic() > self._kill_at:
            self._process.kill()
        return self._process.poll()

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(GONE_S)

    def interrupt(self, timeout_s: float) -> None:
        """Ctrl-C, as from a terminal."""
        self._kill_at = time.monotonic() + timeout_s
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The last line that it printed."""
        lines = _tail(self.output)
        return lines[-1].strip() if lines else "without a word"


def undisturbed_run(config: DrillJobConfig) -> PretrainConfig:
    """The first steps of the same run, with one worker, which has all stages, rows and blocks."""
    steps = min(config.train.steps, config.drill.compared_steps + BEYOND_STEPS)
    settings = {
        group: values for group, values in to_dict(config).items() if group in ("model", "data", "optim", "parallel")
    }
    settings["run"] = {"seed": config.run.seed, "steps": config.train.steps}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    alone = replace(
        config.cluster,
        address=None,
        local_nodes=0,
        min_workers=1,
        max_workers=1,
        spare_workers=0,
        verify_every_steps=0,
        dashboard=False,
    )
    without = ParallelConfig()
    whole = replace(
        config.parallel,
        dp_replicate=1,
        tp=1,
        cp=1,
        pp=1,
        least_pp=without.least_pp,
        schedule=without.schedule,
        stages_per_rank=without.stages_per_rank,
    )
    return replace(
        config,
        run=replace(config.run, name=f"drill-reference-{digest}"),
        cluster=alone,
        snapshot=replace(config.snapshot, copies=1),
        parallel=whole,
        train=replace(config.train, stop_at_step=steps),
    )


def reference_rows(config: DrillJobConfig, console: Console) -> list[dict[str, Any]]:
    """Rows of the same run with one worker and nothing happening: read, or made now, which takes as long as it takes,
    by another drill of the same settings where one does that already.

    Raises RegrowError where it fails.
    """
    undisturbed = undisturbed_run(config)
    steps, storage = undisturbed.train.stop_at_step, run_folder(undisturbed)
    assert steps is not None
    watch = RunFollower(storage.local_path)
    watch.poll()
    while watch.step < steps:
        if is_held(storage, None):
            console.message(f"waiting for the first {steps} steps of another job, maybe a drill's: {storage}")
        else:
            said = _train_undisturbed(undisturbed, steps, watch, console)
            if watch.step < steps and not is_held(storage, None):  # else another drill was faster
                raise RegrowError(f"the undisturbed run ended at step {watch.step} of {steps}: {said}")
        while watch.step < steps and is_held(storage, None):
            time.sleep(POLL_S)
            watch.poll()
        watch.poll()
    return watch.rows[:steps]


def _train_undisturbed(config: PretrainConfig, steps: int, watch: RunFollower, console: Console) -> str:
    """Its last words, with the file that has all of them."""
    folder = run_folder(config).local_path
    console.message(f"first {steps} steps with nothing happening, at one worker, to compare with: {folder}")
    with tempfile.TemporaryDirectory(prefix="rgf", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        output = folder.parent / f"{folder.name}.out"
        output.parent.mkdir(parents=True, exist_ok=True)
        arguments = pretrain_overrides(config, chosen(given_overrides()))
        process = start_pretrain(arguments, output, ray_folder)
        console.start([], steps=steps)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                shown = watch.num_rows_read
                watch.poll()
                if watch.num_rows_read > shown:
                    console.row(watch.rows[-1])
        finally:
            process.kill()
            wait_until_gone(send(signal.SIGKILL, of_ray(ray_folder)), GONE_S)
            process.wait()
            if not is_held(run_folder(config), None):  # else they are another drill's
                _delete_snapshots(config)
    watch.poll()
    said = _tail(output)
    return f"{said[-1] if said else ''} ({output})"


@contextmanager
def memory_of_its_own(size_mb: int | None) -> Iterator[str]:
    """A file system of this size in memory for as long as the context lasts; empty where none is wanted.

    Raises ConfigError where this process may not mount one.
    """
    if size_mb is None:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="rgm", dir="/tmp", ignore_cleanup_errors=True) as folder:
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "regrow-drill", folder]
        done = subprocess.run(mounting, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"drill.memory_mb={size_mb} needs the right to mount: {done.stderr.strip() or 'refused'}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def _delete_snapshots(config: PretrainConfig) -> None:
    """What keepers that were killed have left in memory."""
    record = read_record(run_folder(config))
    for left in Path(config.snapshot.folder).glob(f"regrow-{record['run_id']}-*") if record else ():
        shutil.rmtree(left, ignore_errors=True)


def _tail(path: Path) -> list[str]:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]

"""A Ray cluster: its hosts, and the real job on it with a worker and the driver killed. Only these need Ray."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from regrow.accept.checks_one_gpu import LEAST_SHM_GIB
from regrow.accept.claims import NotTested, Report
from regrow.accept.main import CLUSTER
from regrow.accept.runner import last_line
from regrow.config.check import topologies, world_sizes
from regrow.config.schema import PretrainConfig
from regrow.config.store import pretrain_config
from regrow.errors import ConfigError, RegrowError
from regrow.forecast.estimate import rank_bytes, snapshot_bytes, topologies_of_groups
from regrow.forecast.settle import settled
from regrow.record.log import METRICS, Tail, read_events
from regrow.storage import Storage, is_remote

STEPS = {True: 400, False: 60}  # on GPUs, and without
START_S = 170.0  # for a job to come to a step
GO_ON_S = 90.0  # for a group that lost a worker to come to one
FIRST_STEP_S = 25.0
POLL_S = 0.1
SHM_GIB = 4.0  # of a node without GPUs: a head's pod has 8, of which Ray uses some
LEAST_STEPS = 12
LOSS = 1e-2  # relative; batches are compared bit for bit
SMALL = ("model=debug", "data=python_docs", "data.seq_len=128", "parallel.float8=none", "parallel.compile=false",
         "parallel.activation_checkpoint=none", "train.validate_every_steps=0", "cluster.dashboard=false")  # fmt: skip


def arguments() -> list[str]:
    """What was given: +cluster=NAME and settings of jobs.pretrain."""
    given: list[str] = json.loads(os.environ.get("REGROW_ACCEPT_PRETRAIN", "[]"))
    if not given:
        raise NotTested("needs a Ray cluster: +cluster=NAME")
    return given


def config_of(more: list[str]) -> PretrainConfig:
    """Raises NotTested for what cannot be set."""
    try:
        return pretrain_config(more)
    except ConfigError as error:
        raise NotTested(str(error)) from error


def settings(given: list[str]) -> tuple[list[str], PretrainConfig]:
    """Of a job that is small but for what was given, which comes last, so that it wins. Raises NotTested for what
    jobs.pretrain would refuse."""
    small = [*(each for each in given if each.startswith(CLUSTER)), *SMALL]
    rest = [each for each in given if not each.startswith(CLUSTER)]
    steps = STEPS[bool(config_of([*small, *rest]).cluster.gpus_per_worker)]
    small.append(f"train.steps={steps}")
    steps = config_of([*small, *rest]).train.steps
    arguments = [*small, f"checkpoint.every_steps={max(1, steps // 4)}", *rest]
    if steps < LEAST_STEPS:
        raise NotTested(f"train.steps={steps} is too few for a job that is disturbed twice; give {LEAST_STEPS} or more")
    return arguments, would_run(config_of(arguments))


def would_run(config: PretrainConfig) -> PretrainConfig:
    """As jobs.pretrain settles it. Raises NotTested where that refuses it."""
    try:
        return settled(config)[0]
    except RegrowError as error:
        raise NotTested(f"jobs.pretrain refuses it: {error}") from error


class Job:
    """`python -m jobs.pretrain`, and its run folder as any user could read it."""

    def __init__(self, name: str, arguments: list[str], config: PretrainConfig) -> None:
        self.steps = config.train.stop_at_step or config.train.steps
        self.checkpoint_every = config.checkpoint.every_steps or self.steps
        self.arguments = [*arguments, f"run.name={name}"]
        self.folder = (Storage.at(config.run.storage_path) / name).local_path
        self.output = Path(os.environ["REGROW_ACCEPT_FOLDER"], f"{name}.out")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.output, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs.pretrain", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def rows(self) -> dict[int, dict[str, Any]]:
        """The newest row of each step."""
        return {row["step"]: row for row in Tail(self.folder / METRICS).read()[0] if "step" in row}

    def groups(self) -> list[dict[str, Any]]:
        return [event for event in read_events(Storage.at(self.folder)) if event["event"] == "generation"]

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        """Raises RuntimeError where the job does not come to it."""
        assert self.process is not None
        give_up_at = time.monotonic() + timeout_s
        while max(self.rows(), default=0) < step:
            if self.process.poll() is not None and max(self.rows(), default=0) < step:
                raise RuntimeError(f"the job ended with status {self.process.returncode}: {last_line(self.output)}")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"no step {step} within {timeout_s:.0f} s: {last_line(self.output)}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> None:
        assert self.process is not None
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job did not end within {timeout_s:.0f} s") from None
        if status:
            raise RuntimeError(f"the job ended with status {status}: {last_line(self.output)}")


def train(report: Report) -> None:
    """A job undisturbed; the same with a worker killed a third through it, and its driver two thirds."""
    small, config = settings(arguments())
    if is_remote(config.run.storage_path):
        raise NotTested("run.storage_path has to be a folder that this process and all nodes reach")
    token = uuid.uuid4().hex[:6]
    undisturbed, disturbed = (Job(f"accept-{token}-{name}", small, config) for name in ("undisturbed", "disturbed"))
    began = time.monotonic()
    undisturbed.start()
    undisturbed.wait_for_step(1, START_S)
    first_s = time.monotonic() - began
    undisturbed.wait(START_S)
    expected = undisturbed.rows()
    whole = sorted(expected) == list(range(1, undisturbed.steps + 1))
    figure = f"{len(expected)} steps, the first after {first_s:.0f} s, {undisturbed.groups()[-1]['world_size']} workers"
    report.found("cluster_trains", whole, figure, "steps are missing")

    disturbed.start()
    disturbed.wait_for_step(disturbed.steps // 3, START_S)
    with report.about("cluster_worker_killed"):
        kill_a_worker(report, disturbed, config, expected)
    disturbed.wait_for_step(2 * disturbed.steps // 3, START_S)
    assert disturbed.process is not None
    disturbed.process.send_signal(signal.SIGKILL)
    disturbed.process.wait()
    killed_at, num_groups = max(disturbed.rows()), len(disturbed.groups())
    began = time.monotonic()
    disturbed.start()
    disturbed.wait_for_step(killed_at + 1, START_S)
    back_s = time.monotonic() - began
    disturbed.wait(START_S)
    again = disturbed.groups()[num_groups]  # it may have grown since
    lost = killed_at - again["start_step"]
    problem = differences(disturbed.rows(), expected)
    if lost > disturbed.checkpoint_every:
        problem = f"{lost} steps were lost; {problem}"
    figure = f"past step {killed_at} after {back_s:.0f} s, {lost} steps again, from {again.get('source', '?')}"
    report.found("cluster_driver_killed", not problem, figure, problem)


def kill_a_worker(report: Report, job: Job, config: PretrainConfig, expected: dict[int, dict[str, Any]]) -> None:
    group = job.groups()[-1]
    workers = group["workers"]
    if len(workers) < 2:
        raise NotTested("the group has one worker only")
    if not config.cluster.in_place:
        raise NotTested("cluster.in_place=false restarts all workers")
    at, step = time.time(), max(job.rows())
    kill(workers[-1], config)
    give_up_at = time.monotonic() + GO_ON_S
    new: list[dict[str, Any]] = []
    while not new and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
        later = job.groups()[-1]
        if later["generation"] > group["generation"]:
            new = [row for row in job.rows().values() if row["generation"] >= later["generation"]]
    if not new:
        report.found("cluster_worker_killed", False, f"no step within {GO_ON_S:.0f} s", "the group did not go on")
        return
    later = next(each for each in job.groups() if each["generation"] > group["generation"])
    first = min(new, key=lambda row: row["time"])
    pids = {(worker["node"], worker["pid"]) for worker in later["workers"]}
    kept = sum((worker["node"], worker["pid"]) in pids for worker in workers[:-1])
    go_on = num_that_go_on(config, len(workers), len(later["workers"]))
    took_s = first["time"] - at
    problems = [differences(job.rows(), expected)] if differences(job.rows(), expected) else []
    problems += ["survivors were restarted"] if kept < go_on else []
    problems += [f"it took longer than {FIRST_STEP_S:.0f} s"] if took_s > FIRST_STEP_S else []
    figure = (
        f"{kept} of {go_on} survivors that go on kept their processes; first new step after {took_s:.1f} s, "
        f"{max(0, step - later['start_step'])} steps again"
    )
    report.found("cluster_worker_killed", not problems, figure, "; ".join(problems))


def num_that_go_on(config: PretrainConfig, before: int, after: int) -> int:
    """Of the survivors of a worker, those that train on at least: all in whole units, but spares. Some wait where no
    step would be shorter with them, or where spares make a unit whole."""
    width = config.parallel.tp * config.parallel.cp
    left = (before - 1) // width * width
    return min(left, max(after, world_sizes(config).get(left, 0)))


def differences(rows: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> str:
    """What is wrong about rows, against those of an undisturbed run; empty where nothing is."""
    for step, row in sorted(rows.items()):
        other = expected.get(step)
        if other is None or row["batch_digest"] != other["batch_digest"]:
            return f"step {step} trained on another batch"
        if not abs(row["loss"] - other["loss"]) <= LOSS * abs(other["loss"]):
            return f"step {step} has a loss of {row['loss']:.4f}, undisturbed {other['loss']:.4f}"
    return ""


def kill(worker: dict[str, Any], config: PretrainConfig) -> None:
    """SIGKILL a worker, on whatever node it is."""
    if config.cluster.address is None:
        os.kill(worker["pid"], signal.SIGKILL)
        return
    _connect(config)
    where: Any = NodeAffinitySchedulingStrategy(worker["node"], soft=False)
    task = ray.remote(num_cpus=0, scheduling_strategy=where)(_kill)
    ray.get(task.remote(worker["pid"]), timeout=60)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def hosts(report: Report) -> None:
    """Every node looked at by a task of its own."""
    config = would_run(config_of(arguments()))
    if config.cluster.address is None:
        raise NotTested("this cluster is started by the job, on this machine")
    _connect(config)
    nodes = {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]}
    tasks, gpu_gib = [], shm_gib_a_gpu(config)
    for node, num_gpus in nodes.items():
        place: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, scheduling_strategy=place)(look)
        tasks.append(task.remote(max(SHM_GIB, gpu_gib * num_gpus)))
    found: list[dict[str, Any]] = ray.get(tasks, timeout=80)
    versions = sorted({each["versions"] for each in found})
    reason = f"differing versions: {'; '.join(versions)}"
    report.found("cluster_versions", len(versions) == 1, f"{len(found)} nodes: {versions[0]}", reason)
    problems = [f"{each['host']}: {problem}" for each in found for problem in each["problems"]]
    figure = f"{len(found) - len({p.split(':')[0] for p in problems})} of {len(found)} nodes"
    report.found("cluster_hosts", not problems, figure, "; ".join(problems[:4]))


def shm_gib_a_gpu(config: PretrainConfig) -> float:
    """What the snapshots of a run on this cluster take of /dev/shm for each of a node's GPUs, at most 8B's on eight."""
    sizes = rank_bytes(config, topologies_of_groups(config, topologies(config)))
    of_a_rank = {"ranks_on_node": 1, "ranks_copied": config.snapshot.copies}
    ranks = [snapshot_bytes(config, each, sizes, **of_a_rank) for each in sizes]
    return min(LEAST_SHM_GIB, max(ranks) / 2**30 / max(1.0, config.cluster.gpus_per_worker))


def look(wanted_gib: float) -> dict[str, Any]:
    """On a node whose /dev/shm is to have so much free: what is installed there, and what is wrong with it. Needs
    nothing but Ray there."""
    found = []
    for package in ("torch", "ray", "torchao", "regrow"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    host, problems = socket.gethostname(), []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit not in (resource.RLIM_INFINITY,) and limit < 65_536:
        problems.append(f"{limit:,} open files at most")
    try:
        if socket.gethostbyname(host).startswith("127."):
            problems.append("its name is an address of its own loopback")
    except OSError:
        problems.append("its name has no address")
    stat = os.statvfs("/dev/shm")
    free_gib = stat.f_bavail * stat.f_frsize / 2**30
    if free_gib < wanted_gib:
        problems.append(f"{free_gib:.1f} GiB free in /dev/shm, {wanted_gib:.1f} are wanted")
    return {"host": host, "versions": ", ".join(found), "problems": problems}


def _connect(config: PretrainConfig) -> None:
    if not ray.is_initialized():
        ray.init(address=config.cluster.address, log_to_driver=False, include_dashboard=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes need no regrow for what is asked here

"""One attempt at a drill: nodes and the job are started, faults carried out when they are due, leftovers looked for."""

import contextlib
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regrow.config.ray_health import health_checks
from regrow.config.schema import DrillHosts, DrillJobConfig
from regrow.drill.faults import FLIPS, Fault, parse_faults
from regrow.drill.inject import Injector, NotNow
from regrow.drill.inject_apart import InjectorApart
from regrow.drill.job import DrillJob
from regrow.drill.log import Record, RunFollower
from regrow.drill.nodes import Nodes, local_nodes
from regrow.drill.nodes_apart import NodesApart, nodes_apart
from regrow.drill.seek import Seeker
from regrow.drill.verdict import outcomes
from regrow.record.events import from_row
from regrow.record.run_folder import read_record, run_folder
from regrow.show.console import Console

POLL_S = 0.05
NOT_NOW_S = 180.0  # for a fault to find its victim
TAIL_STEPS = 40  # after the last fault, of a plan that has no step at which it ends
INTERRUPTED = 130  # status of a job that was asked to stop, and has its newest step in storage
LEAVE_S = 120.0  # for a job that is asked to stop to have its checkpoint
MEMORY_MB = 1024  # /dev/shm of a host apart, where drill.memory_mb does not say
LEFT_S = 30.0  # for what a job leaves behind to go away
RAYS_OWN = {  # one each a cluster, whatever runs on it; IDLE are processes without an actor or a task
    "_AutoscalingCoordinatorActor", "_StatsActor", "_UsageCollectionActor", "TrainStateActor",
    "DashboardAgent", "RuntimeEnvAgent", "IDLE",
}  # fmt: skip


class DrillSession:
    """One attempt at a drill, from the start of its nodes to their end."""

    def __init__(
        self, config: DrillJobConfig, plan: list[Fault], seed: int, folder: Path, record: Record, console: Console
    ) -> None:
        self.config, self.plan, self.seed, self.folder = config, plan, seed, folder
        self.record, self.console, self.watch = record, console, RunFollower(folder)
        self.next, self.due_from = record.next_fault(), 0.0
        faults = [each for each in record.read() if each["record"] == "fault"]
        self.fault_at, self.fault_step = (max((each[key] for each in faults), default=0) for key in ("time", "step"))
        self.not_now_since = 0.0
        self.restart_at: float | None = None
        self.restarts = config.drill.restarts
        self.seeker = Seeker(record, self.watch, config.cluster.verify_every_steps)
        self.interrupted: Fault | None = None  # the job was asked to stop by a fault, and has not yet
        self.stopping = ""  # why the job was asked to stop
        self.began = self.heard_at = time.monotonic()
        self.watch.poll()
        self.shown = (self.watch.num_rows_read, len(self.watch.events))  # what an earlier attempt left is no news

    def run(self) -> None:
        """Train until the run's end, until asked to stop, or until nothing happens any more."""
        drill, train = self.config.drill, self.config.train
        self.console.start([], steps=train.steps, stop_at_step=train.stop_at_step)
        num_nodes = nodes_by_now(drill.nodes, self.record.read(), host_silence_s=drill.host_silence_s)
        self.console.message(f"starting {num_nodes} nodes with room for {drill.workers_on_node} each")
        with _start_nodes(self.config, self.folder, num_nodes) as nodes:
            self.nodes, self.job = nodes, DrillJob(self.config, nodes)
            if isinstance(nodes, NodesApart):
                self.injector: Injector = InjectorApart(nodes, seed=self.seed, note=self._note)
            else:
                self.injector = Injector(nodes, seed=self.seed, note=self._note)
            try:
                self._start_job("start")
                self._go_on()
            finally:
                self.watch.poll()
                self._write_outcomes()
                self.injector.close()
                self.job.kill()
                self._keep_logs()
            self._look_for_leftovers()
        self.record.write("left", where="after the nodes' end", found=nodes.left())

    def _go_on(self) -> None:
        self.began = self.heard_at = time.monotonic()
        while True:
            try:
                if self._look():
                    return
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if self.stopping:
                    raise
                self._stop("interrupted")

    def _look(self) -> bool:
        """See what has happened, do what is due; whether this attempt is over."""
        seen = self.shown
        self.watch.poll()
        self.injector.tick()
        self._show()
        now, drill = time.monotonic(), self.config.drill
        if self.shown != seen:
            self.heard_at = now
        if self._job_is_over(now):
            return True
        self._inject_if_due(now)
        if self._is_through() and not self.stopping:
            self.record.write("plan over", step=self.watch.step)
            self._stop(f"every fault is {TAIL_STEPS} steps past")
        if drill.stop_after_s is not None and now - self.began > drill.stop_after_s:
            self._stop("drill.stop_after_s is over")
        silent_s = now - self.heard_at
        if silent_s > drill.patience_s:
            detail = f"nothing was heard of it for {silent_s:.0f} s, at step {self.watch.step}"
            self.record.write("job ended", status=None, unexpected=True, detail=detail)
            self.console.message(f"nothing has happened for {silent_s:.0f} s: the drill gives up")
            return True
        return False

    def _is_through(self) -> bool:
        """Whether a plan without a step at which it ends is: what has to be found delays all faults after it."""
        if self.config.train.stop_at_step is not None or self.next < len(self.plan):
            return False
        is_seeking = self.seeker.is_seeking(self.injector.end_node)
        return not is_seeking and self.watch.step >= self.fault_step + TAIL_STEPS

    def _start_job(self, why: str) -> None:
        pid = self.job.start()
        self.record.write("job started", why=why, pid=pid)
        self.console.message(f"job started ({why}), pid {pid}: {self.job.output}")
        self.restart_at = None

    def _job_is_over(self, now: float) -> bool:
        if self.restart_at is not None:
            if self.stopping:
                return True
            if now >= self.restart_at:
                self._start_job("the same command again")
            return False
        status = self.job.poll()
        if status is None:
            return False
        if self.interrupted is not None:
            expected = is_in_order(status, asked=True)
            detail = self.interrupted.what if expected else self.job.last_words()
            self.record.write("job ended", status=status, unexpected=not expected, detail=detail)
            self.restart_at = now + (self.interrupted.option("restart_after_s") or 0.0)
            self.interrupted = None
            return False
        expected = is_in_order(status, asked=bool(self.stopping))
        detail = (self.stopping if expected else "") or self.job.last_words()
        self.record.write("job ended", status=status, unexpected=not expected, detail=detail)
        if expected:
            return True
        if self.stopping:
            self.console.message(f"the job was asked to stop, and ended with status {status}: {detail}")
            return True
        self.console.message(f"the job ended by itself, status {status}: {detail}")
        if self.restarts > 0:
            self.restarts -= 1
            self._start_job("it had ended by itself")
            return False
        return True

    def _stop(self, why: str) -> None:
        if self.stopping:
            return
        self.stopping, self.next = why, len(self.plan)  # nothing more is to befall it
        self.console.message(f"{why}: stopping the job in good order")
        self.job.interrupt(LEAVE_S)

    def _inject_if_due(self, now: float) -> None:
        """Carry out the next fault, and those that come with it, once its moment has come."""
        if self.next >= len(self.plan) or self.restart_at is not None or not self.watch.generations:
            return
        fault = self.plan[self.next]
        is_held = self.seeker.is_seeking(self.injector.end_node) and not fault.is_at_once
        is_held |= fault.kind in FLIPS and not self.watch.trains  # a smaller group has no replica to compare with
        if not self.due_from and self.watch.stepped_since_start(self.job.started_at):
            self.due_from = now
        late_enough = now - self.due_from >= (fault.after_s or 0.0)
        if not self.due_from or not late_enough or self.watch.step < (fault.at_step or 0) or is_held:
            return
        group = self.watch.generations[-1]
        if fault.with_ranks is not None:
            is_new, has_stepped = group["time"] > self.fault_at, self.watch.step > group["start_step"]
            if group["world_size"] < fault.with_ranks or not is_new or not has_stepped:
                return
        number = self.next
        begun, step = time.time(), self.watch.step
        try:
            victims = self.injector.inject(number, fault, group["workers"], self.job.pid)
        except NotNow as error:
            self.not_now_since = self.not_now_since or now
            if now - self.not_now_since > NOT_NOW_S:
                self.record.write("not injected", number=number, kind=fault.kind, what=fault.what, why=str(error))
                self.console.message(f"{fault.what} could not be: {error}")
                self.next, self.not_now_since, self.due_from = number + 1, 0.0, now
            return
        if not fault.is_at_once:
            self._write_outcomes()
        written = self.record.write(
            "fault",
            at=begun,
            number=number,
            kind=fault.kind,
            what=fault.what,
            when=fault.when,
            step=step,
            **{key: group.get(key) for key in ("generation", "world_size", "axes")},
            victims=victims,
            memory=self._names_in_memory() if number == 0 else None,
        )
        self.seeker.began(written)
        self.fault_at, self.fault_step = begun, step
        self.console.message(f"step {step}: {fault.what} {_whom(victims)}")
        self.next, self.not_now_since, self.due_from = number + 1, 0.0, time.monotonic()
        if fault.kind == "interrupt_driver":
            self.interrupted = fault
        if fault.kind == "kill_driver":
            self.job.wait()
            self.record.write("job ended", status=None, unexpected=False, detail=fault.what)
            self.restart_at = time.monotonic() + (fault.option("restart_after_s") or 0.0)
        if self.next < len(self.plan):
            following = self.plan[self.next]
            self.console.message(f"next of {len(self.plan) - self.next}: {following.what} {following.when}")

    def _write_outcomes(self) -> None:
        """What came of the faults whose outcome is not recorded yet."""
        records = self.record.read()
        known = {line["number"] for line in records if line["record"] == "outcome"}
        for outcome in outcomes(records, self.watch.rows, self.watch.events):
            if outcome.number not in known:
                came = {key: value for key, value in asdict(outcome).items() if key not in ("time", "what", "step")}
                self.record.write("outcome", **came)

    def _names_in_memory(self) -> list[str]:
        folders = itertools.chain.from_iterable(self.nodes.memory_of(node.node_id) for node in self.nodes.nodes)
        return sorted(path.name for folder in folders for path in folder.iterdir())

    def _note(self, number: int, what: str, **fields: object) -> None:
        self.record.write("note", number=number, what=what, **fields)
        told = ", ".join(f"{key} {value}" for key, value in fields.items())
        self.console.message(f"{self.plan[number].what}: {what}{' (' if told else ''}{told}{')' if told else ''}")

    def _show(self) -> None:
        rows, events = self.shown
        for event in self.watch.events[events:]:
            line = from_row(event).sentence()
            if line:
                self.console.message(line.partition("; MFU")[0])
        if self.watch.num_rows_read > rows and self.watch.rows:
            self.console.row(self.watch.rows[-1])
        self.shown = (self.watch.num_rows_read, len(self.watch.events))

    def _look_for_leftovers(self) -> None:
        """What a job leaves behind once it is over, after a while of waiting for it to go."""
        record = read_record(run_folder(self.config))
        pattern = f"regrow-{record['run_id'] if record else ''}-*"
        give_up_at, left = time.monotonic() + LEFT_S, ["?"]
        while left and time.monotonic() < give_up_at:
            time.sleep(0.5)
            actors = [(actor["ActorClassName"], actor["Name"]) for actor in self.nodes.actors()]
            left = [f"actor {kind} {name}".strip() for kind, name in actors if kind not in RAYS_OWN]
            left += [f"placement group {name}" for name in self.nodes.placement_groups()]
            left += [f"process {pid}: {title}" for pid, title in self.nodes.titles() if _is_the_jobs(title)]
            memory = [path for folder in self.nodes.memory_folders() for path in folder.glob(pattern)]
            left += [f"memory {path.name}" for path in memory]
        self.record.write("left", where="after the job's end", found=left)
        for path in memory:
            shutil.rmtree(path, ignore_errors=True)

    def _keep_logs(self) -> None:
        """Ray's logs of this attempt, beside the run's."""
        target = self.folder / "drill_logs" / f"{self.record.session:03d}"
        for name, logs in self.nodes.logs().items():
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(logs, target / name, symlinks=True)


def _is_the_jobs(title: str) -> bool:
    kind = title.partition("::")[2].partition(".")[0].partition(" ")[0]
    return "jobs.pretrain" in title or (title.startswith("ray::") and kind not in RAYS_OWN)


def _whom(victims: Sequence[Mapping[str, Any]]) -> str:
    """As `(rank 1, pid 123; node 0a1b2c)`."""
    parts = []
    for victim in victims:
        pid = f", pid {victim['pid']}" if "pid" in victim else ""
        name = f"rank {victim['rank']}" if "rank" in victim else str(victim["what"])
        node = f" {str(victim['node'])[:12]}" if "node" in victim and "pid" not in victim else ""
        parts.append(f"{name}{node}{pid}")
    return f"({'; '.join(parts)})"


def nodes_by_now(at_first: int, records: Sequence[Mapping[str, Any]], *, host_silence_s: float) -> int:
    """As many as the faults so far have left, of a drill's record; those that could not be have taken none."""
    whats = [line["what"] for line in records if line["record"] == "fault"]
    return at_first + sum(fault.nodes(host_silence_s) for what in whats for fault in parse_faults(what))


def is_in_order(status: int, *, asked: bool) -> bool:
    """Whether a job has ended as it should: at its last step, or where it was asked to stop with all of it stored."""
    return status == 0 or (asked and status == INTERRUPTED)


def _start_nodes(config: DrillJobConfig, folder: Path, num_nodes: int) -> AbstractContextManager[Nodes]:
    drill, snapshot = config.drill, config.snapshot
    cpus = int(-(-drill.workers_on_node * config.cluster.cpus_per_worker // 1))
    health = health_checks(drill.host_silence_s) | {"health_check_initial_delay_ms": 5000}
    if drill.hosts is DrillHosts.together:
        return local_nodes(num_nodes, cpus=cpus, memory_folder=snapshot.folder, system_config=health)
    return nodes_apart(
        num_nodes,
        cpus=cpus,
        storage=folder.parent,
        memory_mb=drill.memory_mb or MEMORY_MB,
        host_memory_mb=drill.host_memory_mb,
        snapshot_folder=snapshot.folder,
        system_config=health,
    )

"""The coordinator: the one actor, on the driver's node, that numbers generations, commits, and writes the run's logs.

Every write of a run passes through it with the writer's generation, and one of an older generation is refused: a paused
worker that wakes up later changes nothing. It holds a lock on the run folder, so that a run has one writer.
"""

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.util import metrics as ray_metrics

from regrow.config.schema import Backend, PretrainConfig
from regrow.control.cadence import Cadence
from regrow.control.health import Pulse, Stalls
from regrow.control.membership import Formation, Member, Membership
from regrow.control.notices import Notices
from regrow.errors import ResumeError
from regrow.record.events import from_row
from regrow.record.log import RunLog, next_generation, read_events, read_metrics
from regrow.record.run_folder import LOCK_FILE
from regrow.runtime.fleet import Fleet
from regrow.runtime.hardware.gpus import HARDWARE_XIDS
from regrow.runtime.keeper import COORDINATOR, NAMESPACE, KeeperInfo
from regrow.runtime.liveness.probe import RollCall
from regrow.runtime.watch import Suspect, Watch
from regrow.show.prometheus import RunMetrics
from regrow.show.tensorboard import TensorBoard
from regrow.state.disk.format import COMMIT
from regrow.state.memory.held import Holder
from regrow.state.memory.node import Peer, Sealed
from regrow.storage import Storage

STACKS = "stacks"  # folder, of what everyone did while a group stood still
LOCK_WAIT_S = 30.0
UNSAFE_S = 120.0  # without a commit in memory: worth a word
ADOPT_S = 30.0  # for the keepers of an earlier coordinator
HUNG, DARK, DEAD = "worker_hung", "node_silent", "worker_died"
NOT_FINITE = "nonfinite"
UNKNOWN = "worker_failed"  # until something else is known of the generation that is running
# why a group leaves in good order: for a larger one, without some nodes, or to go on in bfloat16
GROW, DRAIN, END_OF_FLOAT8 = "grow", "drain", "end_of_float8"
YIELD_S = 10.0  # that too few wait for workers elsewhere before nodes are used that failed again and again
FORM_POLL_S = 0.02  # at which a worker asks for its generation
FORM_POLLS_PER_S = 2000.0  # of all workers together
LOOK_AT_S = 1e-6  # a worker that waits, to see whether a group can be formed: not at every poll of thousands
LEAST_PATIENCE_S, PATIENCE_STEPS = 10.0, 5  # for a survivor to find out that its group is broken
DEVICE_PATIENCE_S = 50.0  # where a device has to come to rest first: a process that does not ends itself before
LEAVING_S = 5.0  # for the last snapshot of a group that leaves in good order
QUARANTINE_WITHIN_S = 3600.0  # failures of a node that count together
WAITING_POLL_S = 0.1  # while a group trains, at which those who wait for a place in one ask
MAX_FRUITLESS_GENERATIONS = 3  # in a row, without finishing a step, before the run is given up


@dataclass(frozen=True)
class Answer:
    """To a worker that asks for its generation: that, or the reason to end, or to ask again after `wait_s`."""

    formation: Formation | None = None
    over: bool = False
    given_up: str = ""
    join_again: bool = False  # the coordinator does not know it: it was restarted
    wait_s: float = 0.0


class Fenced(Exception):
    """A write came from a generation that is over."""


@dataclass(frozen=True)
class Update:
    """One thing for the driver to show, in order."""

    kind: str  # "row" (of metrics) or "event"
    content: dict[str, Any]


class Coordinator:
    """State of a run while it is up. An actor; every method is quick but `__init__`, which may wait for the lock."""

    def __init__(
        self,
        folder: str,
        run_id: str,
        *,
        secret: bytes,
        checkpoints: str,
        config: PretrainConfig,
        submitted: dict[str, Any],
    ) -> None:
        """`checkpoints` is a folder in `folder`; `submitted` is what the log is to say of this submission."""
        cluster, checkpoint = config.cluster, config.checkpoint
        self.folder = Storage.at(folder)
        self.checkpoints = self.folder / checkpoints
        self.lock = _lock(self.folder)
        self.log = RunLog(self.folder)
        self.wants_tensorboard = config.observe.tensorboard
        self.tensorboard: TensorBoard | None = None
        events = read_events(self.folder)
        self.generation = next_generation(events) - 1
        sizes = range(cluster.min_workers, cluster.max_workers + 1)
        self.membership = Membership(sizes, config.parallel.tp, generation=self.generation)
        self.notices = Notices(cluster.quarantine_failures, QUARANTINE_WITHIN_S, cluster.quarantine_s)
        self.formed: Formation | None = None
        self.try_at = 0.0  # to form a group again
        self.most_rollbacks, self.rollbacks, self.not_finite_at = config.train.nonfinite_rollbacks, 0, 0
        self.reform = ""  # GROW or DRAIN, once the group was told to leave
        self.wait_for_workers_s, self.too_few_since = cluster.wait_for_workers_s, 0.0
        self.leaving_step, self.form_at = 0, 0.0  # a group that leaves in good order waits for its last snapshot
        on_device = cluster.gpus_per_worker > 0 or cluster.backend is Backend.asynchronous
        self.least_patience_s = DEVICE_PATIENCE_S if on_device else LEAST_PATIENCE_S
        self.in_place = cluster.in_place
        self.told_over = 0  # the newest generation whose ranks were told that it is over for one of them
        self.fruitless, self.stop_reason, self.fatal, self.last_failure = 0, "", "", ""
        self.cause = "resume" if self.generation else "start"
        self.updates: deque[Update] = deque(maxlen=10_000)
        cadence = Cadence(
            every_steps=checkpoint.every_steps,
            every_minutes=checkpoint.every_minutes,
            automatic=checkpoint.automatic,
            mtbf_hours=checkpoint.mtbf_hours,
            now=time.time(),
        )
        self.fleet = Fleet(
            run_id,
            secret,
            self.checkpoints,
            cadence,
            keep=checkpoint.keep,
            upload_timeout_s=checkpoint.timeout_s,
            commit=self._commit,
            event=self._event,
        )
        self.metrics = RunMetrics(
            config,
            cadence,
            events,
            instruments=ray_metrics if config.observe.metrics else None,
            note=lambda text: self._event("note", text=text),
        )
        self.stalls = Stalls(cluster.silence_s, config.train.collective_timeout_s, cluster.stuck_s)
        self.watch = Watch(self.stalls, save=self._save_stacks, slow=self._name_stragglers)
        self.probe_every_steps, self.on_gpus = cluster.probe_every_steps, cluster.gpus_per_worker > 0
        self.gpus_read_in = 0  # the newest generation
        self.roll_call = RollCall()
        self.failed_in: dict[str, int] = {}  # the newest generation in which a node's failure was counted
        self.missed_rows = _is_restarted()  # those that the coordinator before had and did not write
        self.complaints: set[str] = set()  # about snapshots, in this generation
        self.safe_at = time.monotonic()  # when a snapshot last committed
        if self.missed_rows:
            self._take_up_again(events)
        else:
            self._event("submitted", run_id=run_id, **submitted)

    def ready(self) -> int:
        """Answers once the lock is held: the newest generation so far."""
        return self.generation

    def join(self, member: Member, expected: int) -> None:
        """A worker is ready for the next generation; see `Membership.join`."""
        self.membership.join(member, expected=expected, now=time.monotonic())
        if self.stalls.forming and self.membership.is_breaking:  # it could not be formed: nobody need wait for more
            self.stalls.end()
            self.fleet.over(self.generation)

    def formation(self, member_id: str, after: int) -> Answer:
        """The generation that a worker is in, the first one after `after`; asked until it is there."""
        now, formation = time.monotonic(), self.formed
        if self.fatal:
            return Answer(given_up=self.fatal)
        if self.stop_reason:
            return Answer(over=True)
        again = member_id in self.membership.waiting  # it is back from what it was given
        if formation is None or formation.generation <= after or formation.rank_of(member_id) is None or again:
            if now < self.form_at and not self.fleet.holds(self.leaving_step):
                return Answer(wait_s=FORM_POLL_S)
            formation = self._form(now) if now >= self.try_at else None
        if formation is None or formation.rank_of(member_id) is None:
            if member_id not in self.membership.waiting:
                return Answer(join_again=True)
            poll_s = WAITING_POLL_S if self.stalls.training else FORM_POLL_S
            return Answer(wait_s=max(poll_s, len(self.membership.waiting) / FORM_POLLS_PER_S))
        return Answer(given_up=self.fatal) if self.fatal else Answer(formation)

    def next_step(self) -> int:
        """The step, counted from 1, that has no row yet."""
        return self.log.next_step

    def leaving(self, generation: int, step: int, cause: str) -> None:
        """The whole group leaves after this step, to form anew: its snapshot is worth a moment's wait.

        `cause` is the group's own, or empty where it was told to.
        """
        self._fence(generation)
        self.leaving_step, self.form_at, self.cause = step, time.monotonic() + LEAVING_S, cause or self.reform
        self.stalls.end()

    def done(self) -> None:
        """The last step is trained: whoever waits to join may go."""
        self.stalls.end()
        self.stop_reason = self.stop_reason or "finished"

    def members_died(self, processes: list[tuple[str, int]], left: int, cause: str, detail: str) -> None:
        """Processes, by node and pid, are gone, and so many are left, those included that are still starting."""
        gone = set(processes)
        if cause == HUNG:  # or are to go
            for node, pid in processes:
                self.fleet.end_process(node, pid)
        known = {member.id: member for member in [*self.membership.current, *self.membership.waiting.values()]}
        lost = self.membership.died(
            [member_id for member_id, member in known.items() if (member.node, member.pid) in gone], left=left
        )
        if len(self.membership.survivors) < min(self.membership.sizes):
            self.too_few_since = self.too_few_since or time.monotonic()
        self._lost(lost, cause, detail)

    def gone(self, node: str, pid: int) -> None:
        """A node's keeper has seen one of its workers end. Ray tells later, and of peers on NCCL nobody does."""
        dead = [member for member in self.membership.survivors if (member.node, member.pid) == (node, pid)]
        if dead and self.in_place and not self.stop_reason:  # where all restart, Ray Train says why
            lost = self.membership.died(member.id for member in dead)
            self._lost(lost, DEAD, f"process {pid} on node {node[:12]}: gone, says its node")

    def broke(self, generation: int, detail: str) -> None:
        """A rank could not go on, because of a peer's death or by itself: its peers may wait for it, and hear nothing.

        What it says is kept for the case that all of them cannot go on.
        """
        if generation == self.generation:
            self.last_failure = detail
            if self.told_over < generation:  # all of them say so in the end
                self.told_over = generation
                self.fleet.over(generation)

    def unfit(self, node: str, pid: int, detail: str) -> None:
        """A process' device computes wrong numbers; it ends itself."""
        self._event("unfit", node=node, pid=pid, detail=detail)
        self._count_failure(node)

    def gpu_error(self, node: str, gpu: str, xid: int) -> None:
        """The driver of a node's GPU reports an error. The process that meets it fails by itself, if it does."""
        meaning = HARDWARE_XIDS.get(xid, "")
        self._event("gpu_error", node=node, gpu=gpu, xid=xid, meaning=meaning)
        if meaning and self.failed_in.get(node) != self.generation:
            self._count_failure(node)

    def neighbours(self, info: KeeperInfo) -> list[Peer]:
        """For a keeper that is new to measure its links to; see `Fleet.neighbours`."""
        return self.fleet.neighbours(info)

    def not_finite(self, generation: int, step: int, detail: str) -> None:
        """The whole group leaves, for gradients are not finite: back to storage, or to the end."""
        self._fence(generation)
        self.rollbacks = self.rollbacks + 1 if step <= self.not_finite_at else 1
        self.not_finite_at = max(step, self.not_finite_at)
        if self.rollbacks > self.most_rollbacks:
            self.fail(
                f"{detail}, after {self.rollbacks - 1} rollbacks too; look at the loss before it in report.html, then "
                "lower optim.lr under another run.name, or allow more with train.nonfinite_skips"
            )
            return
        self.fleet.discard()
        self.failure(NOT_FINITE, detail, [])
        self.stalls.end()

    def start_training(self, generation: int, start_step: int, details: dict[str, Any]) -> None:
        """The group is ready to train from `start_step`: later rows of earlier generations are taken back."""
        self._fence(generation)
        self.complaints.clear()
        self.safe_at = time.monotonic()
        self.fleet.begin(generation, start_step, list(dict.fromkeys(worker["node"] for worker in details["workers"])))
        rollback = self.log.begin(generation, start_step)
        if self.tensorboard:
            self.tensorboard.begin(start_step)
        elif self.wants_tensorboard:
            self.tensorboard = TensorBoard.open(
                self.folder, start_step=start_step, note=lambda text: self._event("note", text=text)
            )
        self._event(
            "generation",
            generation=generation,
            start_step=start_step,
            cause=self.cause,
            recomputed_steps=rollback.steps,
            **details,
        )
        self.cause = UNKNOWN
        self.stalls.begin(time.monotonic())
        self.roll_call.meet(self.membership.current)

    def adopt_keepers(self) -> None:
        """Keepers that outlived an earlier coordinator of this run hold what it had committed."""
        self.fleet.adopt(ray.get_runtime_context().current_actor)

    def register_keeper(self, handle: Any, info: KeeperInfo) -> None:
        """A node's keeper is up, or is up again."""
        self.fleet.register(handle, info)

    def greet(self, node: str, handle: Any) -> None:
        """A keeper was restarted and asks for work."""
        self.fleet.greet(node, handle, ray.get_runtime_context().current_actor)

    def complaint(self, node: str, text: str) -> None:
        """A keeper cannot do what it is for. Said once a generation: it tries again and again."""
        self.fleet.check_peers()
        if node not in self.complaints:
            self.complaints.add(node)
            self._event("snapshot_failed", detail=text)

    def newest_snapshot(self) -> tuple[int, list[Holder]] | None:
        """What the group that forms should begin from: a step, and where its files are; see `Fleet.newest`."""
        group = {member.node for member in self.membership.current}
        return self.fleet.newest(group=group, logged=self.log.next_step - 1)

    def committed_snapshot(self) -> tuple[int, list[Holder]] | None:
        """What it should begin from where that could not be read; see `Fleet.committed`."""
        return self.fleet.committed()

    def snapshots_sealed(self, reports: list[Sealed]) -> None:
        """All of some nodes' snapshots of a step are sealed and copied."""
        current = [report for report in reports if report.moment.generation == self.generation]
        if self.fleet.sealed(current) and self.fleet.board.newest is not None:
            self.safe_at = time.monotonic()
            self.metrics.snapshot(self.fleet.board.newest.moment.step)

    def want_checkpoint(self, generation: int, step: int) -> None:
        """The snapshot of this step is to become a checkpoint."""
        self._fence(generation)
        self.fleet.want(step)

    def unsettled(self) -> tuple[bool, str]:
        """Whether a checkpoint is still on its way; why the newest one failed, if it did."""
        self.fleet.tick()
        return self.fleet.busy, self.fleet.failure

    def row(self, generation: int, row: dict[str, Any]) -> str:
        """Log one step's metrics; the answer is why the group should leave, or empty."""
        now = time.monotonic()
        self._fence(generation)
        if row["step"] < self.log.next_step:
            return self.stop_reason  # sent again, after a restart
        if row["step"] > self.log.next_step and self.missed_rows:
            self._event("note", text=f"rows before step {row['step']} went with the coordinator that died")
            self.log.begin(generation, row["step"] - 1)
        self.missed_rows, self.fruitless = False, 0
        busy_s = max(row["step_s"] - row["data_wait_s"] - row["snapshot_s"], 1e-6)
        self.fleet.cadence.stepped(busy_s, writing=self.fleet.upload is not None)
        self.stalls.stepped(row["step_s"], now)
        self.membership.patience_s = max(self.least_patience_s, PATIENCE_STEPS * row["step_s"])
        if self.fleet.peers and time.monotonic() - self.safe_at > UNSAFE_S:
            self.complaint("", f"no snapshot has been committed for {UNSAFE_S:.0f} s; a lost node would cost as much")
        self.log.row(row)
        if self.tensorboard:
            self.tensorboard.row(row)
        self.metrics.row(row)
        self.updates.append(Update("row", row))
        probed = self.probe_every_steps and (row["step"] - 1) % self.probe_every_steps == 0  # all have, a step before
        if probed:
            self.watch.check_up(now, self.fleet.keepers())
        if self.on_gpus and (probed or self.gpus_read_in != generation):  # not where a group waits to begin
            self.gpus_read_in = generation
            self.watch.read_gpus(now, self.fleet.keepers())
        return self.stop_reason or self._why_reform(now)

    def draining(self, deadlines: dict[str, float]) -> None:
        """All nodes that are about to be taken away, and when (unix time)."""
        for node in self.notices.drained(deadlines):
            self._event("drain", node=node, deadline=deadlines[node])

    def avoided_nodes(self) -> set[str]:
        """Where no worker is to be started: not on nodes that fail again and again, unless too few are left."""
        if self.too_few_since and time.monotonic() - self.too_few_since > YIELD_S:
            return self.notices.leaving(time.time())
        return self.notices.avoided(time.time())

    def event(self, generation: int, event: str, fields: dict[str, Any]) -> None:
        self._fence(generation)
        self._event(event, generation=generation, **fields)

    def note(self, event: str, fields: dict[str, Any]) -> None:
        """Record something that is true whatever generation it comes from."""
        self._event(event, **fields)

    def commit(self, generation: int, step_folder: str, pointer: bytes) -> None:
        """Make a checkpoint visible: the fence and the commit are this one act."""
        self._fence(generation)
        self._commit(step_folder, pointer)

    def failure(self, cause: str, detail: str, ranks: list[int], nodes: Iterable[str] = ()) -> None:
        """Record why a group broke, and how the GPUs of these nodes were; the next generation carries the cause."""
        self.cause, self.last_failure = cause, detail
        self.fleet.cadence.failed()
        gpus = {node: self.watch.gpus[node] for node in nodes if node in self.watch.gpus}
        self._event(
            "failure",
            cause=cause,
            detail=detail,
            ranks=ranks,
            generation=self.generation,
            **({"gpus": gpus} if gpus else {}),
        )

    def group_failed(self, cause: str, detail: str, ranks: list[int]) -> None:
        """Ray Train ends the whole group and starts another one. Called by its controller."""
        nodes = {self.membership.current[rank].node for rank in ranks if rank < len(self.membership.current)}
        self.membership.dissolve()
        self.stalls.end()
        self.failure(cause, detail, ranks, nodes)

    def fail(self, message: str) -> None:
        """End the run for a reason that another attempt would meet again."""
        self.fatal = self.fatal or message
        self.stop_reason = self.stop_reason or "failed"

    def reported(self, report: dict[str, Any]) -> None:
        """The driver has written a report."""
        self.metrics.reported(report)

    def request_stop(self, reason: str) -> None:
        """Ask the group to commit a checkpoint and leave at the next step."""
        self.stop_reason = self.stop_reason or reason

    def drain_updates(self) -> tuple[list[Update], str]:
        """What happened since the last call, and the fatal message if there is one."""
        self.fleet.tick()
        self.metrics.tick()
        suspects = self.watch.tick(time.monotonic(), self.membership.survivors, self.fleet.keepers())
        if suspects:
            self._give_up(suspects)
        if self.too_few_since and time.monotonic() - self.too_few_since > self.wait_for_workers_s:
            self.fail(
                f"fewer than cluster.min_workers={min(self.membership.sizes)} for {self.wait_for_workers_s:.0f} s; "
                "start nodes and run the same command again, or let it wait longer with cluster.wait_for_workers_s"
            )
        updates = list(self.updates)
        self.updates.clear()
        return updates, self.fatal

    def close(self, step: int, reason: str, detail: str) -> None:
        """Write the last event and flush everything."""
        self.generation += 1  # whoever still writes is fenced off
        self.fleet.close()
        self.roll_call.close()
        self._event("stopped", step=step, reason=reason, detail=detail)
        self.log.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _give_up(self, suspects: list[Suspect]) -> None:
        """End processes that keep the others waiting; of a node that has gone dark nothing more is expected."""
        for suspect in suspects:
            self.fleet.end_process(suspect.member.node, suspect.member.pid)
        dark = [suspect for suspect in suspects if suspect.dark]
        self.fleet.gone_dark({suspect.member.node for suspect in dark})
        lost = self.membership.died(suspect.member.id for suspect in suspects)
        details = dict.fromkeys(f"node {each.member.node[:12]}: {each.detail}" for each in suspects)
        self._lost(lost, DARK if dark else HUNG, "; ".join(details))

    def _miss(self, dead: list[Member]) -> None:
        """These do not come, for they are dead; Ray Train finds it later."""
        lost = self.membership.died(member.id for member in dead)
        gone = ", ".join(f"process {member.pid} on node {member.node[:12]}" for member in lost)
        self._lost(lost, DEAD, f"{gone}: gone, its port refuses connections")

    def _lost(self, members: list[Member], cause: str, detail: str) -> None:
        """Members of the current group are gone: the others, who may wait for them in a collective, are told."""
        if members:
            ranks = [rank for rank, member in enumerate(self.membership.current) if member in members]
            nodes = list(dict.fromkeys(member.node for member in members))
            self.failure(cause, detail, ranks, nodes)
            for node in nodes:
                if self.failed_in.get(node) != self.generation:  # its workers die one by one, which is one failure
                    self._count_failure(node)
            self.stalls.end()
            self.fleet.over(self.generation)

    def _count_failure(self, node: str) -> None:
        """Let a node be that fails again and again, where the others do without it."""
        self.failed_in[node] = self.generation
        others = [member for member in self.membership.survivors if member.node != node]
        if len(others) < min(self.membership.sizes) or not self.notices.failed(node, time.time()):
            return
        self._event("quarantine", node=node, seconds=self.notices.barred_s)
        for member in [*self.membership.survivors, *self.membership.waiting.values()]:
            if member.node == node:
                self.fleet.end_process(node, member.pid)  # it is started elsewhere, where there is room

    def _why_reform(self, now: float) -> str:
        """Why the group should leave in good order and form anew, or empty."""
        self.membership.avoided = self.notices.avoided(time.time())
        if self.membership.wants_to_leave_nodes():
            reason = DRAIN
        else:
            reason = GROW if self.membership.wants_to_grow(now) else ""
        self.reform = reason or self.reform  # the group may be on its way already
        return reason

    def _name_stragglers(self, found: list[tuple[str, Pulse, float]]) -> None:
        for node, pulse, factor in found:
            self._event("straggler", node=node, pid=pulse.pid, factor=factor, probe_s=pulse.probe_s, step=pulse.step)

    def _save_stacks(self, found: dict[str, str]) -> None:
        """What everyone was doing while the group stood still."""
        name = f"{STACKS}/generation-{self.generation:06d}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        text = "\n".join(f"== node {node}\n{where or 'no answer'}" for node, where in found.items())
        with contextlib.suppress(OSError):  # the group matters more
            self.folder.write_bytes(name, text.encode())
        stalled_s = self.stalls.stalled_s(time.monotonic())
        self._event("stalled", generation=self.generation, seconds=stalled_s, stacks=name)

    def _form(self, now: float) -> Formation | None:
        """Number a new group if one can be formed; from here on older ones are fenced off."""
        ranks = {member.id: rank for rank, member in enumerate(self.membership.current)}
        self.membership.avoided = self.notices.avoided(time.time())
        self.try_at = now + len(self.membership.waiting) * LOOK_AT_S
        if self.membership.is_breaking:
            self._miss(self.roll_call.gone(self.membership.missing, now))
        formation = self.membership.form(now)
        for member in self.membership.left_out:
            self.fleet.end_process(member.node, member.pid)  # Ray Train finds it dead, and fills its place
            detail = f"{self.membership.patience_s:.0f} s without a word, ended"
            self.failure(HUNG, detail, [ranks[member.id]], [member.node])
        self.membership.left_out.clear()
        if formation is None:
            return None
        self.fruitless += 1
        if self.fruitless > MAX_FRUITLESS_GENERATIONS:
            self.fail(
                f"{MAX_FRUITLESS_GENERATIONS} groups in a row failed before finishing a step; last failure: "
                f"{self.last_failure or 'unknown'}"
            )
        self.generation, self.formed, self.too_few_since = formation.generation, formation, 0.0
        self.leaving_step, self.form_at = 0, 0.0
        self.stalls.begin(now, forming=True)
        self._event("forming", generation=self.generation, members=[asdict(each) for each in formation.members])
        if apart := self.membership.without_unit:
            nodes = ", ".join(dict.fromkeys(member.node[:12] for member in apart))
            self._event(
                "note",
                text=f"{len(apart)} of the workers of node {nodes} wait: parallel.tp={self.membership.unit} takes as "
                "many of a node at a time",
            )
        return formation

    def _take_up_again(self, events: list[dict[str, Any]]) -> None:
        """This actor was restarted: go on with the group that trains, which may not even have noticed."""
        self._event("coordinator_restarted", generation=self.generation)
        self.fleet.retain()  # the one before it may have died doing so
        forming = [event for event in events if event["event"] == "forming"][-1:]
        begun = [event for event in events if event["event"] == "generation"][-1:]
        if not forming or forming[0]["generation"] != self.generation:
            return  # nobody has formed a group since the driver started
        members = tuple(Member(**member) for member in forming[0]["members"])
        self.formed, self.membership.current = Formation(self.generation, members), members
        self.adopt_keepers()
        if not begun or begun[0]["generation"] != self.generation:
            self.stalls.begin(time.monotonic(), forming=True)
            return
        rows = read_metrics(self.folder)
        last = max(begun[0]["start_step"], rows[-1]["step"] if rows else 0)
        self.log.begin(self.generation, last)
        newest = self.fleet.board.newest
        self.fleet.begin(
            self.generation,
            max(last, newest.moment.step if newest else 0),
            list(dict.fromkeys(worker["node"] for worker in begun[0]["workers"])),
        )
        self.cause = UNKNOWN
        self.stalls.begin(time.monotonic())
        self.roll_call.meet(self.membership.current)

    def _commit(self, step_folder: str, pointer: bytes) -> None:
        self.log.flush()  # a committed step's row is never missing
        self.checkpoints.write_bytes(f"{step_folder}/{COMMIT}", pointer)

    def _fence(self, generation: int) -> None:
        if generation != self.generation:
            raise Fenced(f"generation {generation} is over; {self.generation} is current")

    def _event(self, event: str, **fields: Any) -> None:
        written = self.log.event(from_row({"event": event} | fields))
        self.metrics.event(written)
        self.updates.append(Update("event", written.to_row()))


def start_coordinator(folder: Storage, run_id: str, **options: Any) -> Any:
    """Start the actor on this node and wait until it holds the run's lock and has found the keepers that are up.

    Raises ResumeError if another process keeps it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"{run_id}:{COORDINATOR}"
    # calls that were on their way when it died are made again, in their order
    remote: Any = ray.remote(  # type: ignore[call-overload]
        num_cpus=0, scheduling_strategy=here, name=name, namespace=NAMESPACE, max_restarts=-1, max_task_retries=-1
    )
    actor = remote(Coordinator).remote(str(folder), run_id, **options)
    try:
        ray.get(actor.ready.remote(), timeout=LOCK_WAIT_S + 30)
    except ray.exceptions.ActorDiedError as error:
        if "ResumeError" in str(error):
            raise ResumeError(
                f"run folder {folder} is in use by another process; wait for it, stop it, or choose another run.name"
            ) from error
        raise
    ray.get(actor.adopt_keepers.remote(), timeout=ADOPT_S)
    return actor


def _is_restarted() -> bool:
    """Whether this actor's process died, and this is another one in its place."""
    return ray.is_initialized() and bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _lock(folder: Storage) -> Any:
    """An exclusive lock that ends with this process; None where storage has none (generations fence there)."""
    if not folder.is_local:
        return None
    folder.local_path.mkdir(parents=True, exist_ok=True)
    file = open(folder.local_path / LOCK_FILE, "w")  # noqa: SIM115 (held open for as long as the lock is)
    give_up_at = time.monotonic() + LOCK_WAIT_S  # a killed predecessor takes a moment to be gone
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(str(os.getpid()))
            file.flush()
            return file
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                raise ResumeError(f"{folder} is in use") from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return None

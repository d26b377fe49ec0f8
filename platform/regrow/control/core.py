"""Control: what happens to a run goes in, with the time; what is to be done comes out. The one place that decides.

    for command in control.on(event, now):
        carry_out(command)

No clock, thread, file, network or random number is in here: the coordinator's actor, the tests' worlds in virtual time
and a simulator run the same class. `now` is in seconds that never go back, on the clock of nodes' deadlines.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from regrow.config.check import topologies, world_sizes
from regrow.config.schema import Backend, PretrainConfig
from regrow.config.snapshots import most_steps_lost
from regrow.control import events as e
from regrow.control.arrivals import Arrivals
from regrow.control.at_risk import AtRisk
from regrow.control.cadence import Cadence
from regrow.control.commands import Command, NoteDamaged, Outbox, Reply
from regrow.control.commits import IsWhole
from regrow.control.corruption import Corruptions
from regrow.control.drains import Drains
from regrow.control.group import QUARANTINE_WITHIN_S, Group
from regrow.control.health import Health, Stalls, Suspect
from regrow.control.losses import gpu_error, unfit
from regrow.control.membership import Membership
from regrow.control.nodes import Exclusions, NodeFailures
from regrow.control.past import Past
from regrow.control.peers import FAN_OUT
from regrow.control.phases import BEYOND_S, FACTOR, PATIENCE, ROOM_S, Phase, Usual
from regrow.control.read_back import StoredSteps
from regrow.control.restarts import Restarts
from regrow.control.rows import Rows
from regrow.control.snapshots import Snapshots
from regrow.control.sources import why_storage
from regrow.control.spacing import SpacingPolicy
from regrow.control.states import (
    Ending,
    Finished,
    Forming,
    GroupState,
    LeavingGroup,
    RowAnswer,
    Settling,
    Stopping,
    Training,
    Waiting,
)
from regrow.control.takeover import Takeover
from regrow.control.too_few import TooFew
from regrow.control.troubles import FirstSteps
from regrow.control.unheard import Unheard
from regrow.control.values import Version
from regrow.plan.topology import Table
from regrow.record.events import Cause

LEAST_PATIENCE_S, PATIENCE_STEPS = 10.0, 5  # for a survivor to find out that its group is broken
FENCED = e.Began | e.Row | e.RowsAgain | e.Verified | e.CheckpointWanted | e.Leaving | e.NotFinite | e.Logged
DEVICE_PATIENCE_S = 50.0  # where a device has to come to rest first: a process that does not ends itself before


class Fenced(Exception):
    """A write came from a generation that is over."""


class Control:
    """The decisions of one run. `on` and `tick` alone change anything."""

    def __init__(
        self,
        config: PretrainConfig,
        *,
        is_whole: IsWhole,
        now: float,
        past: Past | None = None,
        first_message: int = 0,
        fan_out: int = FAN_OUT,
    ) -> None:
        """`first_message` is above the number of every announcement that an earlier coordinator sent."""
        past = past or Past()
        self._config, self._out = config, Outbox()
        self.cadence = _cadence(config, now)
        self.snapshots = Snapshots(
            self._out,
            self.cadence,
            is_whole,
            copies=config.snapshot.copies,
            upload_timeout_s=config.checkpoint.timeout_s,
            steps=StoredSteps(past.stored, past.verified),
            first_message=first_message,
            fan_out=fan_out,
            now=now,
        )
        self.group = _group(config, self.snapshots, self._out, past, now)
        self.health, self._restarts = self.group.health, Restarts(self.group, now)
        self.drains = Drains(self.group, self.snapshots, config, past)
        self.corruptions = Corruptions(config, self.group, self.snapshots, self._out, past)
        self._spacing = SpacingPolicy(config.snapshot, self.cadence, self.snapshots.checkpoints, self._out)
        self._rows = Rows(self._out, logged=past.logged)
        self._rollbacks = past.rollbacks
        self._takeover = Takeover(past, self.group, self.snapshots, self.corruptions, self._rows, self._out)
        self._num_failures, self._restore_s = 0, 0.0
        self._at_risk, self._handlers = AtRisk(self.group, self.snapshots), _handlers(self)
        if past.generation:  # what was being written is not there, and what has been trained since is in memory alone
            self.cadence.resumed(max(past.stored, default=0), min(past.stored_at or now, now))
        if past.trained is not None:
            self.group.ending = Finished()
            self.snapshots.checkpoints.ask(past.trained, "the run ends", now)

    def on(self, event: e.Event, now: float) -> list[Command]:
        """Take an event. Raises Fenced, having changed nothing, for a call of a generation that is over."""
        if isinstance(event, FENCED):
            self.fence(event.generation)
        self._handlers[type(event)](event, now)
        return self._finish(now, event)

    def tick(self, now: float) -> list[Command]:
        """Decide what time alone decides. Call it several times a second."""
        self.snapshots.tick(now)
        stands_still = self.health.stalls.stalled_s(now) > 0  # thousands of members are not looked at for nothing
        members = self.group.membership.survivors if stands_still else []
        keepers, dead = self.snapshots.keepers, "Ray has found the node dead"
        suspects = self.health.tick(now, members, keepers.known_of(member.node for member in members))
        suspects += [Suspect(member, True, dead) for member in members if keepers.is_dead(member.node)]
        if suspects:
            self.snapshots.gone_dark({each.member.node for each in suspects if each.dark}, now)
            self.group.suspected(suspects, now)
        self.group.tick(now)
        if isinstance(self.state, Forming | Training):
            self.health.knock(now, self.group.membership)
        return self._finish(now)

    # what can be asked, which changes nothing

    @property
    def generation(self) -> int:
        return self.group.generation

    @property
    def next_step(self) -> int:
        """The step, counted from 1, that has no row yet."""
        return self._rows.trained + 1

    @property
    def state(self) -> GroupState:
        """What the group does."""
        return self.group.state

    @property
    def ending(self) -> Ending | None:
        """How the run ends, once that is known."""
        return self.group.ending

    @property
    def settling(self) -> Settling:
        """What of the run is still to be written."""
        return self.snapshots.settling

    @property
    def is_superseded(self) -> bool:
        """Whether another process writes the run: what keepers hold is its."""
        return self.snapshots.checkpoints.is_left

    @property
    def is_over(self) -> bool:
        """Whether the run ends, and no group is on that could end by itself."""
        return self.group.is_over

    @property
    def newest_snapshot(self) -> Version | None:
        """The newest step that is committed in memory."""
        newest = self.snapshots.commits.newest
        return newest.version if newest is not None else None

    @property
    def group_nodes(self) -> set[str]:
        """Where the newest group's members are."""
        return {member.node for member in self.group.membership.current}

    @property
    def copies_are_outside(self) -> bool:
        """Whether a node that is not in the group holds its copies: then it matters whether that is alive."""
        return bool(self.snapshots.keepers.outside)

    def fence(self, generation: int) -> None:
        """Raises Fenced unless this generation is the current one."""
        if not self.group.is_current(generation):
            current = self.generation if generation != self.generation else "none"
            raise Fenced(f"generation {generation} is over; {current} is current")

    def newest_of(self, whole: Iterable[Version]) -> Version:
        """What a group that forms should begin from, of what keepers hold whole; see `CommitTracker.newest_of`."""
        return self.snapshots.commits.newest_of(whole, self.next_step - 1)

    def excluded_nodes(self, now: float) -> set[str]:
        """Where no worker is to be started."""
        return self.group.excluded_nodes(now)

    def can_ask(self, node: str) -> bool:
        """Whether this node has a keeper, and is alive as far as is known."""
        return self.snapshots.keepers.is_there(node)

    # what events do

    def _asked(self, event: e.Asked, now: float) -> None:
        state = self.group.state
        safe = isinstance(state, LeavingGroup) and self.snapshots.commits.holds(state.step)
        has_replicas = self.corruptions.verification.mesh.dp_replicate > 1  # of the newest group that trained
        awaits = isinstance(state, Waiting) and not has_replicas
        must_wait = partial(self.snapshots.awaited.wait, now, self.health.stalls.step_s) if awaits else lambda: False
        self.group.ask(event, now, last_snapshot_is_safe=safe, must_wait=must_wait)

    def _began(self, event: e.Began, now: float) -> None:
        """Later rows of earlier generations are taken back, and so are later snapshots and checkpoints."""
        if isinstance(self.ending, Stopping) and self.is_over:
            raise Fenced(f"generation {event.generation} is over: the run was asked to stop before it began")
        if self._takeover.knows(event):
            return
        details = {**event.details, **why_storage(event, self._config, self.group, self.snapshots)}
        self.snapshots.begin(event.generation, event.start_step, event.nodes, now)
        self.corruptions.begin(event.start_step)
        recomputed = self._rows.begin(event.generation, event.start_step)
        self._restore_s = float(event.details.get("restore_s", self._restore_s))
        fields = {"generation": event.generation, "start_step": event.start_step, "cause": self.group.cause}
        fields |= self.snapshots.checkpoints.steps.told
        self._out.record("generation", **fields, recomputed_steps=recomputed, **details)
        self.health.begin()
        self.group.train(event.start_step, now)

    def _verified(self, event: e.Verified, now: float) -> None:
        if (unseen := self._takeover.unseen(event)) is not None:
            self._began(unseen, now)
        self.corruptions.take(event, now)

    def _row(self, event: e.Row | e.RowsAgain, now: float) -> None:
        if (unseen := self._takeover.unseen(event)) is not None:
            self._began(unseen, now)
        row, wanted = self._rows.take(event)
        if row is None:
            self._out.append(Reply(RowAnswer(self.group.stop_reason, wanted)))
            return
        self.group.stepped(row["step"], now)
        every_steps = self._spacing.stepped(row, self.generation, now)
        self.health.stalls.stepped(row["step_s"], now)
        least_s = DEVICE_PATIENCE_S if _is_on_device(self._config) else LEAST_PATIENCE_S
        self.group.membership.patience_s = max(least_s, PATIENCE_STEPS * row["step_s"])
        self.group.nodes.exclusions.measured(self.health.stalls.step_s, self._restore_s)
        self.snapshots.complain_if_unsafe(now, most_steps_lost(self._config.snapshot) * self.health.stalls.step_s)
        self.health.look_at_devices(row["step"], now, self.snapshots.keepers.current, self.group.membership.current)
        self._out.append(Reply(RowAnswer(self.group.stop_reason or self.group.why_leave(now), every_steps=every_steps)))

    def _sealed(self, event: e.Sealed, now: float) -> None:
        """Late reports of a generation that is over count no more, though the next one has not begun."""
        is_current = self.group.is_current
        self.corruptions.sealed([ack for ack in event.acks if is_current(ack.version.generation)], now)
        self._spacing.committed(self.newest_snapshot, now)

    def _complained(self, event: e.Complaint, now: float) -> None:
        """Of a group that is over only what it trained last, in good order, is still to be copied."""
        group = self.group
        wanted = group.ending is not None or isinstance(group.state, Training | LeavingGroup)
        self.snapshots.complain(event, now, wanted=wanted)

    def _not_finite(self, event: e.NotFinite, now: float) -> None:
        """Back to storage, or to the end. What is in memory went wrong with it."""
        if not (knows := self._takeover.knows(event)):
            self.snapshots.discard(now)
            self.group.failed(Cause.nonfinite, event.detail, [], step=event.step)
            self._rollbacks.again(event.step)
        if self._rollbacks.count > self._config.train.nonfinite_rollbacks:
            self.group.give_up(
                f"{event.detail}, after {self._rollbacks.count - 1} rollbacks too; look at the loss before it in "
                "report.html, then lower optim.lr under another run.name, or allow more with train.nonfinite_skips"
            )
        elif not knows:
            self.group.enter(Waiting(), now)

    def _done(self, event: e.Done, now: float) -> None:
        self._out.record("trained", step=self.next_step - 1)
        self.corruptions.trained()
        self.group.finish(event, now)

    def _leaving(self, event: e.Leaving, now: float) -> None:
        self.group.leave(event, now)
        if isinstance(self.group.ending, Stopping):
            self.corruptions.trained()

    def _superseded(self, event: e.Superseded, now: float) -> None:
        self.snapshots.checkpoints.leave_it(now)
        self.group.give_up(event.message)

    def _logged(self, event: e.Logged, now: float) -> None:
        checkpoints, is_written = self.snapshots.checkpoints, event.event == "checkpoint"
        told = checkpoints.steps.told if is_written else {}
        self._out.record(event.event, **{"generation": event.generation, **event.fields, **told})
        if is_written:
            checkpoints.has_stored(event.fields["step"])
        elif event.event == "checkpoint_failed":
            checkpoints.failures.add(event.fields["step"], event.fields["detail"])
        elif event.event == "checkpoint_damaged":
            checkpoints.steps.drop(event.fields["step"])
            self._out.append(NoteDamaged(event.fields["step"], event.fields["detail"]))

    def _answered(self, event: e.Answered, now: float) -> None:
        self._sealed(e.Sealed(self.snapshots.answered(event, now)), now)
        self.health.answered(event.question, event.node, event.answer, now)
        self.group.leave_slow_nodes(self._config.cluster.drain_slow_s, now)

    def _finish(self, now: float, event: e.Event | None = None) -> list[Command]:
        while self._num_failures < self.group.num_failures:
            self._num_failures += 1
            self.cadence.failed()
        self._at_risk.look(now, event)
        self.snapshots.announce_changes()
        return self._out.take()


def _handlers(control: Control) -> dict[type, Callable[[Any, float], None]]:
    """What is called for an event, by its class."""
    group, snapshots, checkpoints = control.group, control.snapshots, control.snapshots.checkpoints

    def joined(event: e.Joined, now: float) -> None:
        snapshots.keepers.came(event.member.node)
        group.join(event, now)

    return {
        e.Joined: joined,
        e.Asked: control._asked,
        e.Began: control._began,
        e.Row: control._row,
        e.RowsAgain: control._row,
        e.Verified: control._verified,
        e.CheckpointWanted: checkpoints.want,
        e.Leaving: control._leaving,
        e.NotFinite: control._not_finite,
        e.Logged: control._logged,
        e.Noted: lambda event, now: control._out.record(event.event, **event.fields),
        e.Done: control._done,
        e.Broke: group.broke,
        e.Unfit: partial(unfit, group),
        e.Failed: group.fail,
        e.Superseded: control._superseded,
        e.Trouble: group.trouble,
        e.Died: group.died,
        e.Gone: group.gone,
        e.ConnectionLost: control.health.connection_lost,
        e.PortRefused: group.refused,
        e.Running: lambda event, now: snapshots.silent.runs(event.nodes, now),
        e.GroupFailed: control._restarts.failed,
        e.GroupShutDown: control._restarts.shut_down,
        e.GroupStarted: control._restarts.started,
        e.Placed: group.placed,
        e.Started: Unheard(group, control._out, control._config.train.collective_timeout_s).look,
        e.Notice: group.nodes.notice,
        e.NodesAlive: _in_turn(group.arrivals.alive, snapshots.nodes_alive, control.drains.alive),
        e.KeeperUp: _in_turn(group.keeper_up, snapshots.keeper_up),
        e.NeighboursAsked: snapshots.neighbours,
        e.KeepersFound: control._takeover.keepers_found,
        e.Sealed: control._sealed,
        e.Complaint: control._complained,
        e.GpuError: partial(gpu_error, group),
        e.Answered: control._answered,
        e.Written: checkpoints.written,
        e.WriteFailed: checkpoints.write_failed,
        e.HasReadBack: checkpoints.has_read_back,
        e.Spoken: checkpoints.spoken,
        e.IndexWritten: checkpoints.index_written,
        e.IndexNotWritten: checkpoints.index_not_written,
        e.CheckpointCommitted: checkpoints.committed,
        e.PublishFailed: checkpoints.publish_failed,
        e.Deleted: checkpoints.deletions.deleted,
        e.DrainAsked: control.drains.ask,
        e.UndrainAsked: control.drains.undo,
        e.StopAsked: group.stop,
        e.Settle: lambda event, now: checkpoints.settle(
            control.next_step - 1, now, is_done=isinstance(control.ending, Finished)
        ),
        e.Restarted: control._takeover.restarted,
        e.Closed: group.close,
    }


def _in_turn(*handlers: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
    def all_of_them(event: Any, now: float) -> None:
        for handler in handlers:
            handler(event, now)

    return all_of_them


def _is_on_device(config: PretrainConfig) -> bool:
    return config.cluster.gpus_per_worker > 0 or config.cluster.backend is Backend.asynchronous


def _usual(config: PretrainConfig) -> Usual:
    waits_s = {
        Phase.data: config.data.stall_timeout_s,
        Phase.storage: config.data.storage_timeout_s,
        Phase.checkpoint: config.checkpoint.timeout_s,
    }
    then_works = {phase: FACTOR * seconds for phase, seconds in waits_s.items()}  # reads or writes otherwise
    as_collectives_s = config.train.collective_timeout_s - BEYOND_S  # with BEYOND_S, as long as the others wait for it
    least_s = then_works | {Phase.snapshot: ROOM_S, Phase.callback: as_collectives_s}
    alone_s = PATIENCE * config.train.collective_timeout_s - BEYOND_S  # before the others' collective fails
    return Usual(config.cluster.stuck_s, least_s=least_s, most_s={Phase.storage: alone_s})


def _cadence(config: PretrainConfig, now: float) -> Cadence:
    checkpoint = config.checkpoint
    return Cadence(
        every_steps=checkpoint.every_steps,
        every_minutes=checkpoint.every_minutes,
        automatic=checkpoint.automatic,
        mtbf_hours=checkpoint.mtbf_hours,
        now=now,
        keep_every_steps=checkpoint.keep_every_steps,
    )


def _exclusions(config: PretrainConfig, past: Past) -> Exclusions:
    """Where Ray Train starts all workers at once, it does so wherever there is room, and heeds none."""
    cluster = config.cluster
    failures = cluster.quarantine_failures if cluster.in_place else 0
    exclusions = Exclusions(failures, QUARANTINE_WITHIN_S, cluster.quarantine_s)
    exclusions.quarantined_until.update(past.quarantined_until)
    exclusions.corrupt.update(past.corrupt)
    exclusions.asked.update(past.drained if cluster.in_place else ())
    return exclusions


def _first_steps(config: PretrainConfig, table: Table, past: Past) -> FirstSteps:
    parallel, verifies = config.parallel, config.cluster.verify_every_steps > 0
    deterministic = verifies and config.cluster.gpus_per_worker > 0  # for which blocks are compiled once more
    return FirstSteps(
        config.train.collective_timeout_s,
        past.failed_groups,
        compiles=parallel.compile and (parallel.tp > 1 or parallel.cp > 1 or deterministic),
        topologies=table if parallel.compile else {},
        verifies=verifies,
    )


def _group(config: PretrainConfig, snapshots: Snapshots, out: Outbox, past: Past, now: float) -> Group:
    cluster, table = config.cluster, topologies(config)
    sizes = world_sizes(config, table)
    membership = Membership(
        list(sizes),
        config.parallel.tp,
        {size: topology.step_cost for size, topology in table.items()},
        sizes,
        {size for size, topology in table.items() if 1 < config.parallel.pp == topology.mesh.pp},
        generation=past.generation,
    )
    exclusions = _exclusions(config, past)
    nodes = NodeFailures(exclusions, membership, out)
    timeout_s = config.train.collective_timeout_s
    first_steps = _first_steps(config, table, past)
    return Group(
        membership,
        nodes,
        Health(
            Stalls(cluster.silence_s, timeout_s, cluster.stuck_s),
            out,
            snapshots.silent,
            usual=_usual(config),
            probe_every_steps=cluster.probe_every_steps,
            on_gpus=cluster.gpus_per_worker > 0,
            topologies=table,
            first_steps=first_steps,
        ),
        snapshots.keepers,
        out,
        in_place=cluster.in_place,
        too_few=TooFew(min(sizes), cluster.min_workers, cluster.wait_for_workers_s, out),
        cause=Cause.resume if past.generation else Cause.start,
        first_steps=first_steps,
        last_failure=past.last_failure,
        arrivals=Arrivals(membership, nodes, out, began=now),
        told_spares=past.spares,
    )

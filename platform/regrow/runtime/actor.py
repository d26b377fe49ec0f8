"""The coordinator: the one actor, on the driver's node, that numbers generations, commits, and writes the run's logs.

A call becomes an event for `control.core.Control`, which decides; `shell.Shell` carries that out. Every write of a run
passes through it with the writer's generation, and one of an older generation is refused: a paused worker that wakes up
later changes nothing. It has the run folder's newest claim, so that a run has one writer, and where there are locks the
folder's, so that a second job is refused at once.
"""

import builtins
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.util import metrics as ray_metrics

from regrow.config.schema import PretrainConfig
from regrow.control import events as e
from regrow.control.drains import Maintenance
from regrow.control.membership import Member
from regrow.control.past import Past, group_of, is_submitted
from regrow.control.states import GivenUp, RowAnswer, Settling
from regrow.control.values import Peer, SnapshotAck
from regrow.control.verification import Outcome
from regrow.errors import RegrowError, ResumeError, first_line
from regrow.process_log import say
from regrow.record.claim import OWNER, Claim
from regrow.record.lock import LEASE_WAIT_S, LOCK_WAIT_S, is_held, lock_elsewhere, lock_run
from regrow.record.log import newest_row, next_generation, positive, read_events
from regrow.runtime.calls import CoordinatorCalls, Death
from regrow.runtime.clock import Deadlines
from regrow.runtime.fleet import secret_of_keepers
from regrow.runtime.hardware.gpus import HARDWARE_XIDS
from regrow.runtime.hardware.settings import allow_descriptors
from regrow.runtime.keeper import COORDINATOR, NAMESPACE, KeeperInfo, KeeperSettings
from regrow.runtime.seats import Seats
from regrow.runtime.shell import Shell, Update
from regrow.state.disk.catalog import committed_steps
from regrow.state.memory.holders import Holders
from regrow.storage import Storage

ADOPT_S = 60.0  # for the keepers of an earlier coordinator: longer than all of them have to answer
READ_AGAIN_S = 2.0  # where storage is away
NODES_S = 1.0  # between two looks for nodes, where all ranks of a run ask at once: one lists thousands
SECRET_BYTES = 32
OLD_SETTINGS = (
    "keepers of an earlier job have snapshots of this run, and go on by that job's {}; to have this one's, stop it by "
    "Ctrl-C and start it again"
)

Found = TypeVar("Found")


class Drained:
    """The part of the coordinator that `jobs.drain` calls; the log has what was asked for."""

    shell: Shell

    def drain(self, node: str) -> str:
        """Have the group leave a node, and start no worker there; why it cannot, or empty."""
        problem = str(self.shell.tell(e.DrainAsked(node, self.shell.now - time.time())))
        self.shell.await_log()
        return problem

    def undrain(self, node: str) -> str:
        """The node is in service again; why it is not, or empty."""
        problem = str(self.shell.tell(e.UndrainAsked(node)))
        self.shell.await_log()
        return problem

    def maintenance(self) -> Maintenance:
        """How drains stand."""
        with self.shell.lock:
            control = self.shell.control
            return control.drains.look(control.next_step - 1, self.shell.now)


class Verified:
    """The part of the coordinator that is told what may show that a rank computed wrong.

    A coordinator after this one has to know of a corruption.
    """

    shell: Shell

    def verified(self, generation: int, step: int, outcome: Outcome) -> None:
        """What all units came to in the verification of a step."""
        self._take(e.Verified(generation, step, outcome))

    def snapshots_sealed(self, reports: Sequence[SnapshotAck]) -> None:
        """All of some nodes' snapshots of a step are sealed and copied; their replicas are compared."""
        self._take(e.Sealed(reports))

    def trusted_step(self) -> int | None:
        """The newest step that a group may begin from, after a corruption was found; None: any."""
        return self.shell.control.corruptions.limit

    def spared_step(self) -> int | None:
        """For a rank that deletes old checkpoints; see `control.read_back.StoredSteps.spared`."""
        return self.shell.control.snapshots.checkpoints.steps.spared

    def _take(self, event: e.Verified | e.Sealed) -> None:
        corruptions = self.shell.control.corruptions
        before = corruptions.found
        self.shell.tell(event)
        if corruptions.found > before:
            self.shell.await_log()


class Restarted:
    """The part of the coordinator that Ray Train's controller tells of a group that it ends and starts as a whole."""

    shell: Shell

    def group_failed(self, cause: str, detail: str, ranks: Sequence[int]) -> None:
        """Ray Train ends the whole group and starts another one."""
        self.shell.tell(e.GroupFailed(cause, detail, tuple(ranks)))
        self.shell.await_log()

    def group_shut_down(self) -> None:
        """The same, it may be for no failure."""
        self.shell.tell(e.GroupShutDown())

    def group_started(self, processes: Sequence[tuple[str, int]]) -> None:
        """These, by node and pid, are all that there are."""
        self.shell.tell(e.GroupStarted(tuple(processes)))


class Coordinator(Seats, Drained, Verified, Restarted):
    """An actor; every method is quick but `__init__`, which may wait for the lock, and those that ask keepers."""

    def __init__(
        self,
        folder: str,
        run_id: str,
        *,
        checkpoints: str,
        config: PretrainConfig,
        submitted: Mapping[str, Any],
        job: str = "",
        owner: str = "",
    ) -> None:
        """`checkpoints` is a folder in `folder`; `submitted` is what the log is to say of this submission.

        `job`: the driver's; an actor that is started again goes on with what the log has of this job, and writes on
        only if no other job has begun to after it. `owner`: as `Claim.take` has it.
        """
        allow_descriptors()
        storage, restarted = Storage.at(folder), is_restarted()
        notes: list[str] = []
        self.lock = _once_there(lambda: lock_run(storage, notes.append), storage, patient=restarted)
        claim = _once_there(
            lambda: Claim.take(storage, job=job, owner=owner, restarted=restarted), storage, patient=restarted
        )
        events, past = _read(storage, checkpoints, restarted=restarted, job=job)
        self._secret = (secret_of_keepers(run_id) if restarted else None) or secrets.token_bytes(SECRET_BYTES)
        self.copies, self.settings = config.snapshot.copies, KeeperSettings.of(config.snapshot)
        self._deadlines, self._nodes_at = Deadlines(), 0.0  # when `neighbours` looks for nodes again, monotonic clock
        instruments = ray_metrics if config.observe.metrics else None
        self.shell = Shell(
            config,
            storage,
            storage / checkpoints,
            run_id,
            claim=claim,
            secret=self._secret,
            past=past,
            events=events,
            instruments=instruments,
        )
        if not (restarted and is_submitted(events, job)):
            self.shell.record("submitted", {"run_id": run_id, "job": job, **submitted})
        if restarted:
            self._take_up_again(events, job)
        for text in notes:
            self.shell.record("note", {"text": text})
        self.shell.start()

    # the driver

    def ready(self) -> int:
        """Answers once the lock is held: the newest generation so far."""
        return self.shell.control.generation

    def updates(self, after: int) -> tuple[list[Update], str, bool]:
        """What there is to show after the update of this number, the message if the run is given up, and whether it
        ends and no group is on."""
        control, ending = self.shell.control, self.shell.control.ending
        return self.shell.updates(after), ending.message if isinstance(ending, GivenUp) else "", control.is_over

    def settling(self) -> Settling:
        """What of the run is still to be written."""
        return self.shell.control.settling

    def settle(self) -> Settling:
        """The same, where no worker is left: what is committed in memory is to be in storage. Asked until it is."""
        with self.shell.lock:
            self.shell.tell(e.Settle())
            return self.shell.control.settling

    def reported(self, report: Mapping[str, Any]) -> None:
        """The driver has written a report."""
        self.shell.reported(report)

    def fail(self, message: str) -> None:
        """The run is given up, as an earlier coordinator has told the driver."""
        self.shell.tell(e.Failed(message))

    def request_stop(self, reason: str) -> None:
        """Ask the group to commit a checkpoint and leave at the next step."""
        self.shell.tell(e.StopAsked(reason))

    def adopt_keepers(self) -> None:
        """Keepers that outlived an earlier coordinator of this run hold what it had committed."""
        for event in self.shell.fleet.adopt(this_actor()):
            self.shell.tell(event)
        if found := self.shell.fleet.other_settings(self.settings):
            self.shell.record("note", {"text": OLD_SETTINGS.format(found)})

    def close(self, step: int, reason: str, detail: str, keep: bool) -> str:
        """Write the last event and flush everything; what could not be written, or is left in memory, or empty.

        Nothing stays in memory, but for the newest step where storage does not have it, or it is not known whether it
        has, and it is to be kept.
        """
        self.shell.tell(e.Closed())  # what still writes is fenced off
        self.shell.record("stopped", {"step": step, "reason": reason, "detail": detail})
        control, fleet = self.shell.control, self.shell.fleet
        lost, left = self.shell.close(), ""  # keepers may take minutes, and the log does not wait for them
        is_known = fleet.has_adopted or reason == "finished"  # then no keeper holds a later step
        if not control.is_superseded and (not keep or (is_known and control.settling.unstored is None)):
            left = fleet.close()
        return "; ".join(filter(None, (lost, left)))

    # workers

    def next_step(self) -> int:
        """The step, counted from 1, that has no row yet."""
        return self.shell.control.next_step

    def stored_step(self) -> int:
        """The newest step that is in storage, for a group that forms; NOTHING: none."""
        return self.shell.control.snapshots.checkpoints.stored

    def secret(self) -> bytes:
        """The keepers'. Asked for: Ray's dashboard shows what workers are given at their start, and the GCS keeps what
        actors are made with. So it is made here, and a coordinator after this one has it from a keeper."""
        return self._secret

    def start_training(self, generation: int, start_step: int, details: Mapping[str, Any]) -> None:
        """The group is ready to train from `start_step`: later rows of earlier generations are taken back."""
        nodes = tuple(dict.fromkeys(worker["node"] for worker in details["workers"]))
        if len(nodes) <= self.copies:  # other nodes may hold its copies
            _look_for_nodes(self.shell)
        self.shell.tell(e.Began(generation, start_step, nodes, details))

    def now(self) -> float:
        """Unix time by the clock that stamps events."""
        return time.time()

    def row(self, generation: int, row: Mapping[str, Any]) -> RowAnswer:
        """Log one step's metrics, unless earlier ones come first."""
        return cast(RowAnswer, self.shell.tell(e.Row(generation, row)))

    def rows_again(self, generation: int, since: int, rows: Sequence[Mapping[str, Any]]) -> RowAnswer:
        """Log the rows that were wanted, from a step on, as far as rank 0 still has them."""
        return cast(RowAnswer, self.shell.tell(e.RowsAgain(generation, since, rows)))

    def want_checkpoint(self, generation: int, step: int) -> None:
        """The snapshot of this step is to become a checkpoint."""
        self.shell.tell(e.CheckpointWanted(generation, step))

    def commit(self, generation: int, step_folder: str, pointer: bytes) -> None:
        """Make a checkpoint visible that the ranks have written: the fence and the commit are one act."""
        control = self.shell.control
        control.fence(generation)
        self.shell.publisher.commit(step_folder, pointer, fence=lambda: control.fence(generation))

    def event(self, generation: int, event: str, fields: Mapping[str, Any]) -> None:
        self.shell.tell(e.Logged(generation, event, fields))

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Record something that is true whatever generation it comes from."""
        self.shell.tell(e.Noted(event, fields))

    def leaving(self, generation: int, step: int, cause: str) -> None:
        """The whole group leaves after this step, to form anew: its snapshot is worth a moment's wait."""
        self.shell.tell(e.Leaving(generation, step, cause))

    def not_finite(self, generation: int, step: int, detail: str) -> None:
        """The whole group leaves, for gradients are not finite: back to storage, as another coordinator has to know."""
        self.shell.tell(e.NotFinite(generation, step, detail))
        self.shell.await_log()

    def done(self) -> None:
        """The last step is trained: workers that wait to join may end. A coordinator after this one has to know."""
        self.shell.tell(e.Done())
        self.shell.await_log()

    def broke(self, generation: int, detail: str, rank: int | None = None) -> None:
        """A rank could not go on, because of a peer's death or by itself: then `rank` is its own."""
        self.shell.tell(e.Broke(generation, detail, rank))

    def unfit(self, node: str, pid: int, detail: str, machine: str) -> None:
        """A process' device computes wrong numbers; it ends itself."""
        self.shell.tell(e.Unfit(node, pid, detail, machine))

    def trouble(self, generation: int, member: Member, expected: int, message: str) -> None:
        """A process met an error that it would meet again: is it the run's? It asks `formation` what came of it."""
        self.shell.tell(e.Trouble(generation, member, expected, message))

    def newest_snapshot(self) -> Holders | None:
        """What the group that forms should begin from: the newest step that is whole in memory, and where its files
        are; None where nothing was committed. The group's nodes answer soon; copies on them are nearest."""
        return _newest_whole(self.shell)

    def committed_snapshot(self) -> Holders | None:
        """The newest committed step, and all its files that any node has, where what the other call gave is damaged."""
        return _newest_committed(self.shell)

    # keepers

    def register_keeper(self, handle: Any, info: KeeperInfo) -> None:
        """A node's keeper is up, or is up again."""
        with self.shell.lock:
            self.shell.tell(self.shell.fleet.register(handle, info))

    def greet(self, node: str, handle: Any) -> None:
        """A keeper was restarted and asks for work."""
        self.shell.tell(self.shell.fleet.greet(handle, this_actor()))

    def neighbours(self, info: KeeperInfo) -> list[Peer]:
        """For a keeper that is new to measure its links to; each rank of its node asks."""
        if time.monotonic() >= self._nodes_at:
            _look_for_nodes(self.shell)
            self._nodes_at = time.monotonic() + NODES_S
        return cast("list[Peer]", self.shell.tell(e.NeighboursAsked(info.node, info.address)))

    def complaint(self, node: str, text: str, peer: str = "", tried_s: float = 0.0) -> None:
        """A keeper cannot do what it is for; `peer`: to copy to that node, which it tried for so long."""
        if self.shell.control.copies_are_outside:
            _look_for_nodes(self.shell)
        self.shell.tell(e.Complaint(node, text, peer, tried_s))

    def gone(self, node: str, pid: int) -> None:
        """A node's keeper has seen one of its workers end."""
        self.shell.tell(e.Gone(node, pid))

    def gpu_error(self, node: str, gpu: str, xid: int) -> None:
        """The driver of a node's GPU reports an error."""
        self.shell.tell(e.GpuError(node, gpu, xid, HARDWARE_XIDS.get(xid, "")))

    # Ray Train's controller

    def ray_view(
        self, dead: Sequence[Death], left: int, draining: Mapping[str, float], placed: Mapping[str, int]
    ) -> None:
        """All that Ray Train sees, told again every few seconds: processes that are gone, and how many are left, those
        included that are still starting; nodes that are about to be taken away, and when (unix time); how many workers
        are on nodes where some were started lately."""
        for node, pid, cause, detail in dead:
            self.shell.tell(e.Died(((node, pid),), left, cause, detail))
        self.shell.tell(self._deadlines.notice(draining, self.shell.clock))
        self.shell.tell(e.Placed(dict(placed)))

    def avoided_nodes(self) -> set[str]:
        """Where no worker is to be started."""
        with self.shell.lock:
            return self.shell.control.excluded_nodes(self.shell.now)

    def _take_up_again(self, events: Sequence[Mapping[str, Any]], job: str) -> None:
        """This actor was restarted: go on with the group that trains, which may not even have noticed."""
        self.adopt_keepers()
        group = group_of(events, self.shell.control.generation, job)
        if group.members:
            _look_for_nodes(self.shell)
        self.shell.tell(group)


_offers: type[CoordinatorCalls] = Coordinator  # mypy holds it to that


def start_coordinator(folder: Storage, run_id: str, *, tell: Callable[[str], object] = print, **options: Any) -> Any:
    """The actor on this node, once it can be worked with; the two below, one after the other."""
    actor = make_coordinator(folder, run_id, tell=tell, **options)
    await_coordinator(actor, folder)
    return actor


def make_coordinator(folder: Storage, run_id: str, *, tell: Callable[[str], object] = print, **options: Any) -> Any:
    """The actor on this node, which may still wait for the run's lock.

    `tell` gets to know where it waits for one that another host has. Raises ResumeError if another job's actor is up.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = f"{run_id}:{COORDINATOR}"
    # calls that were on their way when it died are made again, in any order
    remote: Any = ray.remote(  # type: ignore[call-overload]
        num_cpus=0, scheduling_strategy=here, name=name, namespace=NAMESPACE, max_restarts=-1, max_task_retries=-1
    )
    in_use = f"run folder {folder} is in use by another process; wait for it, stop it, or choose another run.name"
    if is_held(folder, None) and (elsewhere := lock_elsewhere(folder)):
        tell(elsewhere)
    give_up_at = time.monotonic() + LOCK_WAIT_S
    options |= {"job": secrets.token_hex(8), "owner": os.environ.get(OWNER, "")}
    while True:
        try:
            return remote(Coordinator).remote(str(folder), run_id, **options)
        except ValueError as error:  # another job's has that name; a killed predecessor's takes a moment to be gone
            if time.monotonic() > give_up_at:
                raise ResumeError(in_use) from error
            time.sleep(READ_AGAIN_S)


def await_coordinator(actor: Any, folder: Storage) -> None:
    """Wait until it holds the run's lock and has found the keepers that are up.

    Raises ResumeError if another process keeps the lock, and another RegrowError where storage does not let the run go
    on.
    """
    try:
        ray.get(actor.ready.remote(), timeout=LEASE_WAIT_S + 30)
    except ray.exceptions.ActorDiedError as error:
        if said := _mistake(error, folder):
            raise (ResumeError if "ResumeError" in str(error) else RegrowError)(said) from error
        raise
    ray.get(actor.adopt_keepers.remote(), timeout=ADOPT_S)


def _mistake(error: Exception, folder: Storage) -> str:
    """What ended an actor's start that a user can mend, a line; empty for anything else.

    Of the exception, Ray hands on the traceback's text alone.
    """
    kind, _, words = str(error).strip().splitlines()[-1].partition(": ")
    if kind.startswith("regrow."):
        return words
    found = getattr(builtins, kind, None)
    is_of_system = isinstance(found, type) and issubclass(found, OSError)
    return f"run folder {folder} cannot be used: {words}" if is_of_system else ""


def _look_for_nodes(shell: Shell) -> None:
    if ray.is_initialized():
        alive = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        shell.tell(e.NodesAlive(alive))


def _newest_whole(shell: Shell) -> Holders | None:
    control = shell.control
    newest = control.newest_snapshot
    if newest is None:
        return None
    _look_for_nodes(shell)
    found = shell.fleet.holders(newest, control.can_ask, control.group_nodes)
    whole = [moment for moment, holders in found.items() if holders.is_whole]
    with shell.lock:
        if control.newest_snapshot is None:
            return None
        version = control.newest_of(whole)
    return found.get(version) or Holders(version)


def _newest_committed(shell: Shell) -> Holders | None:
    newest = shell.control.newest_snapshot
    if newest is None:
        return None
    _look_for_nodes(shell)
    return shell.fleet.holders(newest, shell.control.can_ask).get(newest) or Holders(newest)


def _read(folder: Storage, checkpoints: str, *, restarted: bool, job: str) -> tuple[list[dict[str, Any]], Past]:
    """The run's events, and what is known of it."""

    def patiently(work: Callable[[], Found]) -> Found:
        return _once_there(work, folder, patient=restarted)

    events = patiently(lambda: read_events(folder))
    generation = next_generation(events) - 1
    row = (patiently(lambda: newest_row(folder)) if generation else None) or {"step": 0}
    stored = patiently(lambda: committed_steps(folder / checkpoints))
    return events, Past.of(
        events,
        generation=generation,
        logged=int(row["step"]),
        stored=stored,
        restarted=restarted,
        job=job,
        logged_at=positive(row.get("time")),
    )


def _once_there(work: Callable[[], Found], folder: Storage, *, patient: bool) -> Found:
    """In a run that goes on, once storage is there: an actor whose start fails is not started again."""
    while True:
        try:
            return work()
        except OSError as error:
            if not patient:
                raise
            say(f"waiting for {folder}: {first_line(error)}")
            time.sleep(READ_AGAIN_S)


def this_actor() -> Any:
    return ray.get_runtime_context().current_actor


def is_restarted() -> bool:
    """Whether this actor's process died, and this is another one in its place."""
    return ray.is_initialized() and bool(ray.get_runtime_context().was_current_actor_reconstructed)

"""The coordinator: the one actor, on the driver's node, that numbers generations, commits, and writes the run's logs.

Every write of a run passes through it with the writer's generation, and one of an older generation is refused: a paused
worker that wakes up later changes nothing. It holds a lock on the run folder, so that a run has one writer.
"""

import contextlib
import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from regrow.checkpoint.commits import SnapshotBoard
from regrow.checkpoint.format import COMMIT
from regrow.checkpoint.keeper import KeeperInfo, end_keepers, running_keepers
from regrow.checkpoint.keeper_node import Holder, Sealed
from regrow.errors import ResumeError
from regrow.observe.run_log import RunLog, next_generation, read_events
from regrow.observe.tensorboard import TensorBoard
from regrow.storage import Storage

LOCK_FILE = ".lock"
LOCK_WAIT_S = 30.0
ADOPT_S = 10.0  # for a keeper of an earlier coordinator to answer
MAX_FRUITLESS_GENERATIONS = 3  # in a row, without finishing a step, before the run is given up


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
        checkpoints: str,
        tensorboard: bool,
        submitted: dict[str, Any],
    ) -> None:
        self.folder = Storage.at(folder)
        self.checkpoints = self.folder / checkpoints
        self.lock = _lock(self.folder)
        self.log = RunLog(self.folder)
        self.wants_tensorboard = tensorboard
        self.tensorboard: TensorBoard | None = None
        self.generation = next_generation(read_events(self.folder)) - 1
        self.fruitless, self.stop_reason, self.fatal, self.last_failure = 0, "", "", ""
        self.cause = "resume" if self.generation else "start"
        self.updates: deque[Update] = deque(maxlen=10_000)
        self.snapshots = SnapshotBoard()
        self.nodes: list[str] = []  # of the current generation, those with keepers
        self.keepers: dict[str, tuple[Any, KeeperInfo]] = {}  # node -> actor, what is known of it
        self._event("submitted", run_id=run_id, **submitted)

    def ready(self) -> int:
        """Answers once the lock is held: the newest generation so far."""
        return self.generation

    def begin_generation(self) -> tuple[int, str]:
        """Number a new group; from here on older ones are fenced off. Called by its rank 0.

        Also why the group should not even start, if the run has been given up.
        """
        self.fruitless += 1
        if self.fruitless > MAX_FRUITLESS_GENERATIONS:
            self.fail(
                f"{MAX_FRUITLESS_GENERATIONS} groups in a row failed before finishing a step; last failure: "
                f"{self.last_failure or 'unknown'}"
            )
        self.generation += 1
        return self.generation, self.fatal

    def start_training(self, generation: int, start_step: int, details: dict[str, Any]) -> None:
        """The group is ready to train from `start_step`: later rows of earlier generations are taken back."""
        self._fence(generation)
        self._begin_snapshots(generation, start_step, details["workers"])
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

    def adopt_keepers(self, run_id: str, secret: bytes) -> None:
        """Keepers that outlived an earlier coordinator of this run hold what it had committed."""
        me = ray.get_runtime_context().current_actor
        calls = {handle: handle.serve.remote(me, secret) for handle in running_keepers(run_id).values()}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=ADOPT_S) if calls else ([], [])
        for handle, call in calls.items():
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone
                if call in answered:
                    self.register_keeper(handle, ray.get(call))
        known = [info for _, info in self.keepers.values()]
        self.snapshots.rebuild((info.node, info.commit, info.held) for info in known)

    def register_keeper(self, handle: Any, info: KeeperInfo) -> None:
        """A node's keeper is up, or is up again."""
        self.keepers[info.node] = (handle, info)

    def newest_snapshot(self) -> tuple[int, list[Holder]] | None:
        """The newest committed step that is held in memory, and where its files are; None where there is none."""
        newest = self.snapshots.newest
        if newest is None:
            return None
        holders = [
            Holder(node, self.keepers[node][1].address, held) for node, held in newest.files if node in self.keepers
        ]
        return newest.step, holders

    def snapshot_sealed(self, report: Sealed) -> None:
        """All of a node's snapshots of a step are sealed and copied: commit the step if they were the last ones."""
        if report.generation != self.generation:
            return
        commit = self.snapshots.sealed(report)
        if commit is not None:
            for node in self.nodes:
                self.keepers[node][0].committed.remote(commit.generation, commit.step)

    def row(self, generation: int, row: dict[str, Any]) -> str:
        """Log one step's metrics; the answer is why the group should leave, or empty."""
        self._fence(generation)
        self.fruitless = 0
        self.log.row(row)
        if self.tensorboard:
            self.tensorboard.row(row)
        self.updates.append(Update("row", row))
        return self.stop_reason

    def event(self, generation: int, event: str, fields: dict[str, Any]) -> None:
        self._fence(generation)
        self._event(event, generation=generation, **fields)

    def note(self, event: str, fields: dict[str, Any]) -> None:
        """Record something that is true whatever generation it comes from."""
        self._event(event, **fields)

    def commit(self, generation: int, step_folder: str, pointer: bytes) -> None:
        """Make a checkpoint visible: the fence and the commit are this one act."""
        self._fence(generation)
        self.log.flush()  # a committed step's row is never missing
        self.checkpoints.write_bytes(f"{step_folder}/{COMMIT}", pointer)

    def failure(self, cause: str, detail: str, ranks: list[int]) -> None:
        """Record why a group broke; the next generation carries the cause. Called by Ray Train's controller."""
        self.cause, self.last_failure = cause, detail
        self._event("failure", cause=cause, detail=detail, ranks=ranks, generation=self.generation)

    def fail(self, message: str) -> None:
        """End the run for a reason that another attempt would meet again."""
        self.fatal = self.fatal or message
        self.stop_reason = self.stop_reason or "failed"

    def request_stop(self, reason: str) -> None:
        """Ask the group to commit a checkpoint and leave at the next step."""
        self.stop_reason = self.stop_reason or reason

    def drain_updates(self) -> tuple[list[Update], str]:
        """What happened since the last call, and the fatal message if there is one."""
        updates = list(self.updates)
        self.updates.clear()
        return updates, self.fatal

    def close(self, step: int, reason: str, detail: str) -> None:
        """Write the last event and flush everything."""
        self.generation += 1  # whoever still writes is fenced off
        end_keepers(handle for handle, _ in self.keepers.values())
        self._event("stopped", step=step, reason=reason, detail=detail)
        self.log.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _begin_snapshots(self, generation: int, start_step: int, workers: list[dict[str, Any]]) -> None:
        """The ranks' nodes must all report; each one's peer is the next one's keeper. No commit without all keepers."""
        nodes = list(dict.fromkeys(worker["node"] for worker in workers))
        self.nodes = nodes if self.keepers.keys() >= set(nodes) else []
        self.snapshots.begin(generation, start_step, self.nodes)
        for node, peer in zip(self.nodes, [*self.nodes[1:], *self.nodes[:1]], strict=True):
            address = self.keepers[peer][1].address
            self.keepers[node][0].set_peer.remote((peer, address) if peer != node else None)

    def _fence(self, generation: int) -> None:
        if generation != self.generation:
            raise Fenced(f"generation {generation} is over; {self.generation} is current")

    def _event(self, event: str, **fields: Any) -> None:
        self.log.event(event, **fields)
        self.updates.append(Update("event", {"event": event} | fields))


def start_coordinator(folder: Storage, run_id: str, *, secret: bytes, **options: Any) -> Any:
    """Start the actor on this node and wait until it holds the run's lock and has found the keepers that are up.

    Raises ResumeError if another process keeps it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(num_cpus=0, scheduling_strategy=here)  # type: ignore[call-overload]
    actor = remote(Coordinator).remote(str(folder), run_id, **options)
    try:
        ray.get(actor.ready.remote(), timeout=LOCK_WAIT_S + 30)
    except ray.exceptions.ActorDiedError as error:
        if "ResumeError" in str(error):
            raise ResumeError(
                f"run folder {folder} is in use by another process; wait for it, stop it, or choose another run.name"
            ) from error
        raise
    ray.get(actor.adopt_keepers.remote(run_id, secret), timeout=2 * ADOPT_S)
    return actor


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

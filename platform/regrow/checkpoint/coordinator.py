"""The coordinator: the one actor, on the driver's node, that numbers generations, commits, and writes the run's logs.

Every write of a run passes through it with the writer's generation, and one of an older generation is refused: a paused
worker that wakes up later changes nothing. It holds a lock on the run folder, so that a run has one writer.
"""

import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray

from regrow.checkpoint.format import COMMIT
from regrow.errors import ResumeError
from regrow.observe.run_log import RunLog, next_generation, read_events
from regrow.observe.tensorboard import TensorBoard
from regrow.storage import Storage

LOCK_FILE = ".lock"
LOCK_WAIT_S = 30.0
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
        self, folder: str, run_id: str, *, checkpoints: str, tensorboard: bool, submitted: dict[str, Any]
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
        self._event("stopped", step=step, reason=reason, detail=detail)
        self.log.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _fence(self, generation: int) -> None:
        if generation != self.generation:
            raise Fenced(f"generation {generation} is over; {self.generation} is current")

    def _event(self, event: str, **fields: Any) -> None:
        self.log.event(event, **fields)
        self.updates.append(Update("event", {"event": event} | fields))


def start_coordinator(folder: Storage, run_id: str, **options: Any) -> Any:
    """Start the actor on this node and wait until it holds the run's lock.

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

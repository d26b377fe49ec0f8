"""What a rank tells the coordinator while it trains, and hears from it; see `train.hooks.Hooks`."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

from regrow.control.phases import Phase
from regrow.control.states import RowAnswer
from regrow.control.verification import Outcome
from regrow.data.read.batch import RankBatch
from regrow.errors import NotWrittenError, RegrowError, first_line
from regrow.parallel.compile import CompileCache
from regrow.parallel.float8 import inner_tensor
from regrow.plan.mesh import Coordinates
from regrow.progress import last_step
from regrow.record.events import Cause
from regrow.runtime.abort import Breaker
from regrow.runtime.calls import CALL_TIMEOUT_S, CoordinatorClient
from regrow.runtime.process import Process
from regrow.state.collective import rank
from regrow.state.disk import catalog, store
from regrow.state.entries import Progress, training_entries
from regrow.storage import Storage
from regrow.train.callback import Called
from regrow.train.certificate import BrokenStep
from regrow.train.profile import ProfileWindow, profiled_steps
from regrow.train.step import TrainStep
from regrow.train.validation import Validation


class GenerationHooks:
    """The hooks of one rank in one generation, and the saver's ways to the coordinator."""

    def __init__(
        self,
        process: Process,
        generation: int,
        step: TrainStep,
        coordinates: Coordinates,
        validation: Validation,
        breaker: Breaker,
        progress: Progress,
        *,
        compiled: CompileCache | None = None,
    ) -> None:
        """`coordinates` are this rank's; a callback's state lies in `progress`, and is kept there. `compiled` takes
        what the first step has compiled."""
        self._breaker = breaker
        self._process, self._job, self._generation = process, process.job, generation
        self._coordinator = CoordinatorClient(process.job.coordinator, generation)
        self._step, self._coordinates, self._validation = step, coordinates, validation
        self._rank, self._probed = rank(), 0
        self._replies: deque[Any] = deque()  # of calls on their way to the coordinator
        self._again: Any = None  # the one of them that has rows sent again
        self._stop = ""  # why to leave
        self._called = Called(process.job.config.train.callback, progress, is_over=lambda: breaker.begun)
        if self._called.note:
            self._event("note", {"text": self._called.note})
        self._compiled = compiled
        self.every_steps = 0  # between snapshots, as the coordinator says; 0: it has not
        self.window = _profile_window(process) if self._rank == 0 else None
        is_late = self.window is not None and progress.step >= self.window.steps.start
        if is_late and generation == process.job.first_generation and not _is_profiled(self.window):
            asked = f"observe.profile_at_step={process.job.config.observe.profile_at_step}"
            text = f"{asked}: this job goes on after step {progress.step}, and takes no profile"
            self._event("note", {"text": text})

    def step_done(self, row: Mapping[str, float]) -> None:
        with self.phase(Phase.callback):
            self._called.after_step(row)

    def log(self, row: dict[str, Any]) -> None:
        if self._process.memory is not None:
            self._process.memory.heartbeat.timed(row)
        self._process.rows.add(row)
        if self._rank == 0:
            self._replies.append(self._coordinator.row(row))
            self.profile(row["step"])
        if self._compiled is not None:
            threading.Thread(target=self._compiled.keep_new, name="compile-cache", daemon=True).start()
            self._compiled = self._process.compiled = None

    def verified(self, step: int, outcome: Outcome) -> None:
        if self._rank == 0:
            self._replies.append(self._coordinator.verified(step, outcome))

    def wants_to_leave(self) -> bool:
        if self._breaker.begun:  # nothing breaks off what begins now
            raise BrokenStep(f"generation {self._generation} is over")
        replies = self._replies
        ready, _ = ray.wait(list(replies), num_returns=len(replies), timeout=0) if replies else ([], [])
        for reply in ready:
            replies.remove(reply)
        self._hear(ready)
        return bool(self._stop)

    def _hear(self, replies: Sequence[Any]) -> None:
        """Raises what the coordinator raised: a fenced-off rank ends here."""
        wanted: int | None = None
        for reply in replies:
            answer = ray.get(reply, timeout=CALL_TIMEOUT_S)
            if isinstance(answer, RowAnswer):
                self._stop = answer.leave or self._stop
                self.every_steps = answer.every_steps or self.every_steps
                if reply is self._again:  # which another coordinator may answer, that lacks some before those
                    self._again = None
                wanted = answer.wanted if answer.wanted is not None and self._again is None else wanted
        if wanted is not None:  # those that were sent since come after it, and are there twice
            self._again = self._coordinator.rows_again(wanted, self._process.rows.since(wanted))
            self._replies.append(self._again)

    def _hear_all(self) -> None:
        while self._replies:
            replies = list(self._replies)
            self._replies.clear()
            self._hear(replies)

    def validate(self, step: int) -> float:
        begun = time.perf_counter()
        with self.phase(Phase.validation):
            loss = self._validation.loss(self._step, self._process.stream, step)
        self._event("validation", {"step": step, "loss": loss, "seconds": time.perf_counter() - begun})
        return loss

    def profile(self, step: int) -> None:
        """Training has come to the end of this step."""
        if self.window is None:
            return
        written = None
        with self.phase(Phase.profile):
            try:
                written = self.window.after(step)
            except Exception as error:  # storage raises many kinds, the profiler as well: training goes on without
                self._event("note", {"text": f"no profile after step {step}: {first_line(error)}"})
                window, self.window = self.window, None
                window.abandon()
        if written is not None:
            self._coordinator.note("profile", {"step": step, "folder": written})

    def stepped(self, step: int) -> None:
        """This rank has seen a step succeed: its heartbeat says so, and now and then how fast its device is."""
        if self._process.memory is not None:
            self._process.memory.heartbeat.stepped(step)
        every_steps = self._job.config.cluster.probe_every_steps
        if every_steps and step % every_steps == 0 and step > self._probed:
            self._probed = step
            seconds = self._process.prober.probe()
            if self._process.memory is not None:
                self._process.memory.heartbeat.probed(seconds)

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """What this rank does now: it hangs where that takes far longer than usual, and others wait for it."""
        memory = self._process.memory
        return memory.phase(phase) if memory is not None else contextlib.nullcontext()

    def in_data(self, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
        """The same, while this rank waits for rows known to do so."""
        while True:
            with self.phase(Phase.data):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def want_checkpoint(self, step: int) -> None:
        """Have keepers write this step, from memory. A group that leaves to grow or drain goes on from memory, but for
        the run's last step."""
        train = self._job.config.train
        goes_on = self._stop in (Cause.grow, Cause.drain) and step < last_step(train.steps, train.stop_at_step)
        if self._rank == 0 and not goes_on:
            self._replies.append(self._coordinator.want_checkpoint(step))

    def write(self, progress: Progress) -> None:
        """Write a checkpoint by the ranks themselves: training stands still. Collective; raises as `store.save`."""
        begun = time.perf_counter()
        folder = Storage.at(self._job.checkpoints)
        try:
            index = store.save(
                folder,
                training_entries(self._step.model, self._step.optimizer, inner_tensor=inner_tensor),
                scalars=progress.to_dict(),
                run_id=self._job.run_id,
                generation=self._generation,
                coordinates=self._coordinates,
                commit=self._commit,
            )
        except NotWrittenError as error:
            self._event("checkpoint_failed", {"step": progress.step, "detail": str(error)})
            raise
        stall_s = time.perf_counter() - begun
        fields = {"step": progress.step, "seconds": stall_s, "stall_s": stall_s, "bytes": index.num_bytes}
        self._event("checkpoint", fields)
        if self._rank == 0:
            self._delete_old(folder)

    def _delete_old(self, checkpoints: Storage) -> None:
        """Those that are more than is kept, but for what the coordinator knows to be right."""
        self._hear_all()
        kept, spared = self._job.config.checkpoint, self._coordinator.spared_step()
        counts = {"keep": kept.keep, "keep_every_steps": kept.keep_every_steps}
        if spared is not None and (
            problem := catalog.try_retain(checkpoints, **counts, apart={spared}, run_id=self._job.run_id)
        ):
            self._event("note", {"text": problem})

    def not_finite(self, step: int, detail: str) -> None:
        """Every rank is about to leave for this."""
        if self._rank == 0:
            self._hear_all()
            ray.get(self._coordinator.not_finite(step, detail), timeout=CALL_TIMEOUT_S)

    def close(self, *, left_at: int | None, cause: str) -> None:
        """Wait until the coordinator has everything; say that the group left after a step, and why, or that it has
        finished. A coordinator that was restarted does not know that it had told the group to, which counts more than
        `cause`: a drain loses no step."""
        if self._rank == 0:
            coordinator = self._coordinator
            self._replies.extend(coordinator.row(row) for row in self._process.rows.newest())  # is it still known?
            self._hear_all()
            cause = self._stop if self._stop in (Cause.grow, Cause.drain) else cause
            self._replies.append(coordinator.leaving(left_at, cause) if left_at is not None else coordinator.done())
        self._hear_all()

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        if self._rank == 0:
            self._replies.append(self._coordinator.event(name, fields))

    def _commit(self, step_folder: str, pointer: bytes) -> None:
        self._coordinator.commit(step_folder, pointer)


def _is_profiled(window: ProfileWindow | None) -> bool:
    """Whether its profile is there, whole: taken by this job before its controller died, or by one before."""
    with contextlib.suppress(OSError, RegrowError):  # unknown, of storage that fails
        return window is not None and window.folder.exists("summary.md")  # which is written last
    return False


def _profile_window(process: Process) -> ProfileWindow | None:
    steps = profiled_steps(process.job.config)
    return ProfileWindow(Storage.at(process.job.folder), process.device, steps) if steps else None

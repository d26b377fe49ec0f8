"""When the training state is kept, in memory and in storage: the one policy. See `train.hooks.Saver`."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from regrow.control.phases import ROOM_S, Phase
from regrow.control.spacing import FIRST
from regrow.control.values import Scalar
from regrow.errors import NotWrittenError
from regrow.state.collective import from_rank_0, gather
from regrow.state.entries import Progress, user_scalars
from regrow.state.memory.writer import Snapshots

RETRY_S = 5.0  # between two tries to write the checkpoint that a group ends with
SAFE_S = 5.0  # that training waits for keepers which fall behind
LAST_ROOM_S = ROOM_S  # that the snapshot of the last step waits for room; a node that is taken away gives little more

Write = Callable[[Progress], None]  # a checkpoint, by all ranks; collective, NotWrittenError where storage fails
Stepped = Callable[[int], None]


@dataclass(frozen=True)
class Cadence:
    """Steps at which the state is kept, counted from 1."""

    last_step: int
    snapshot_every_steps: int | None = 0  # 0: never; None: as ranks are told, `spacing.FIRST` before that
    checkpoint_every_steps: int | None = None  # None: only at the end

    def snapshot(self, step: int) -> bool:
        return _divides(self.snapshot_every_steps, step)

    def checkpoint(self, step: int) -> bool:
        return step == self.last_step or _divides(self.checkpoint_every_steps, step)


def _divides(every_steps: int | None, step: int) -> bool:
    return every_steps is not None and every_steps > 0 and step % every_steps == 0


def write_at_last(write: Write, progress: Progress, *, timeout_s: float) -> None:
    """A checkpoint with which a group ends, tried again for so long. Collective; raises what the last try raised."""
    begun = time.monotonic()
    while True:
        try:
            return write(progress)
        except NotWrittenError:
            if from_rank_0(time.monotonic() - begun + RETRY_S > timeout_s):
                raise
        time.sleep(RETRY_S)


class CheckpointSaver:
    """In storage alone: training stands still while the ranks write."""

    def __init__(
        self, cadence: Cadence, write: Write, *, timeout_s: float, stepped: Stepped = lambda step: None
    ) -> None:
        """The last checkpoint is tried for `timeout_s`. `stepped` is told of each step that the host saw succeed."""
        self._cadence, self._write, self._timeout_s, self._stepped = cadence, write, timeout_s, stepped
        self._saved = -1  # the newest step that is in storage

    def has_room(self, step: int) -> bool:
        return True

    def is_held(self, step: int) -> bool:
        return False

    def held_by_all(self, step: int, held: bool) -> None: ...

    def spacing(self) -> int:
        return 0

    def space(self, every_steps: int) -> None: ...

    def before_update(self) -> float:
        return 0.0

    def confirm(self, step: int) -> float:
        self._stepped(step)
        return 0.0

    def is_checkpoint_due(self, step: int) -> bool:
        return self._cadence.checkpoint(step)

    def after_step(self, progress: Progress, *, blocked: bool, read: bool) -> float:
        if progress.step == self._cadence.last_step:
            return self.finish(progress, blocked=blocked)
        begun = time.perf_counter()
        if self.is_checkpoint_due(progress.step):
            with contextlib.suppress(NotWrittenError):  # the next one is written
                self._write(progress)
                self._saved = progress.step
        return time.perf_counter() - begun

    def finish(self, progress: Progress, *, blocked: bool) -> float:
        begun = time.perf_counter()
        if self._saved != progress.step:
            write_at_last(self._write, progress, timeout_s=self._timeout_s)
            self._saved = progress.step
        return time.perf_counter() - begun


class SnapshotSaver:
    """In the nodes' memory, from where keepers write checkpoints: training waits for neither, but for room."""

    def __init__(
        self,
        cadence: Cadence,
        snapshots: Snapshots,
        *,
        start_step: int,
        num_ahead: int,
        want_checkpoint: Callable[[int], None],
        write: Write,
        timeout_s: float,
        stepped: Stepped = lambda step: None,
        phase: Callable[[Phase], contextlib.AbstractContextManager[None]] = lambda phase: contextlib.nullcontext(),
        spacing: Callable[[], int] = lambda: 0,
        user: Mapping[str, Scalar] | None = None,
    ) -> None:
        """`num_ahead` steps are launched before one is read. `want_checkpoint` has the keepers write a step, `write`
        the ranks themselves, where a last step found no room, for up to `timeout_s`. `stepped` is told of a step
        before anything is waited for; `phase` says what this rank does; `spacing`, how many steps it has heard should
        lie between snapshots, 0 where it has heard nothing; `user` is what a callback keeps, of the newest step read.
        """
        self._cadence, self._snapshots, self._start_step, self._num_ahead = cadence, snapshots, start_step, num_ahead
        self._want_checkpoint, self._write, self._timeout_s = want_checkpoint, write, timeout_s
        self._stepped, self._phase = stepped, phase
        self._user = user if user is not None else {}  # it changes, and may be empty yet
        self._told, self._every_steps = spacing, FIRST  # steps between snapshots, where these are measured
        self._saved = -1  # the newest step that is, or will be, in storage
        self._on_credit = -1  # the newest step of which room was told without a look at the one before
        self._asked: dict[int, int] = {}  # by step that was launched: of which snapshot

    def keep_restored(self, progress: Progress) -> None:
        """What all ranks have restored is this generation's first snapshot: it has its copies, in the new layout, while
        the first step runs. A second node that is lost then costs no more than the first did."""
        self._snapshots.begin(progress.step, progress.to_dict())
        self._snapshots.confirm(progress.step)  # every byte was checked when it was read

    def has_room(self, step: int) -> bool:
        # read `num_ahead` steps later: a snapshot of this step may have been begun by then, and the next one be due
        if self._is_each_step:
            self._on_credit = step  # what is not committed now will be by then, unless keepers fall behind
            return self._snapshots.room() > 0 or not self._is_late(step)
        begins = self._is_due(step) or self.is_checkpoint_due(step)
        follows = not self._is_automatic and self._cadence.snapshot(step + 1) and not self.is_checkpoint_due(step + 1)
        return self._snapshots.room() > (self._num_ahead if begins and follows else 0)

    def is_held(self, step: int) -> bool:
        self._asked[step] = asked = self._snapshots.asked
        return self._snapshots.is_held(asked)

    def held_by_all(self, step: int, held: bool) -> None:
        asked = self._asked.pop(step)
        if held:
            self._snapshots.held_by_all(asked)

    def spacing(self) -> int:
        return self._told() if self._is_automatic else 0

    def space(self, every_steps: int) -> None:
        self._every_steps = every_steps or self._every_steps

    def before_update(self) -> float:
        return self._snapshots.wait()

    def confirm(self, step: int) -> float:
        """Waits until a snapshot is safe that is at most `snapshot_every_steps` steps older, where that is said: a
        distance that is measured is such that keepers keep up, and a link that cannot never holds training up."""
        self._snapshots.confirm(step, user_scalars(self._user))
        self._stepped(step)
        if self._is_automatic:
            return 0.0
        every_steps = max(1, self._cadence.snapshot_every_steps or 1)
        # some are left out, where keepers fall behind
        safe = self._snapshots.newest_begun((step - 1) // every_steps * every_steps)
        return self._snapshots.await_commit(safe, patience_s=SAFE_S) if safe > self._start_step else 0.0

    def is_checkpoint_due(self, step: int) -> bool:
        return self._cadence.checkpoint(step)

    def after_step(self, progress: Progress, *, blocked: bool, read: bool) -> float:
        due = self.is_checkpoint_due(progress.step)
        if due:
            return self._keep(progress, blocked=blocked, last=progress.step == self._cadence.last_step)
        if blocked or not self._is_due(progress.step):
            return 0.0
        waited_s = self._begin(progress, blocked=False, last=False)
        return waited_s + (self.confirm(progress.step) if read else 0.0)

    def finish(self, progress: Progress, *, blocked: bool) -> float:
        return self._keep(progress, blocked=blocked, last=True) if self._saved != progress.step else 0.0

    @property
    def _is_automatic(self) -> bool:
        return self._cadence.snapshot_every_steps is None

    @property
    def _is_each_step(self) -> bool:
        """Whether ranks take one of each step, and know of room a step late: that they agree on, for each."""
        every_steps = self._every_steps if self._is_automatic else self._cadence.snapshot_every_steps
        return self._num_ahead > 0 and every_steps == 1

    def _is_due(self, step: int) -> bool:
        """The same on all ranks, which begin a snapshot together or not at all."""
        if not self._is_automatic:
            return self._cadence.snapshot(step)
        return step - max(self._start_step, self._snapshots.begun) >= self._every_steps

    def _is_late(self, step: int) -> bool:
        """Whether keepers have fallen behind."""
        if not self._is_automatic:
            return self._snapshots.is_late
        return not self._snapshots.is_committed(self._snapshots.newest_begun(step - 1 - self._num_ahead))

    def _keep(self, progress: Progress, *, blocked: bool, last: bool) -> float:
        """In memory, and from there in storage; where its snapshot was not begun a later one's will do, unless it is
        the last."""
        waited_s = self._begin(progress, blocked=blocked, last=last) + self.confirm(progress.step)
        begun = time.perf_counter()
        if last or self._snapshots.begun == progress.step:
            self._saved = progress.step
        if last and self._snapshots.begun != progress.step:
            with self._phase(Phase.checkpoint):
                write_at_last(self._write, progress, timeout_s=self._timeout_s)
        else:
            self._want_checkpoint(progress.step)
        return waited_s + time.perf_counter() - begun

    def _begin(self, progress: Progress, *, blocked: bool, last: bool) -> float:
        """Begin to copy the state, which does not change before `before_update`.

        Where some rank is `blocked`, or may be by now, it waits for room, longest where this is the `last` step, and
        begins on no rank if none comes.
        """
        begun = time.perf_counter()
        may_be = self._is_each_step or self._on_credit >= progress.step - self._num_ahead
        if self._snapshots.begun != progress.step:
            room, patience_s = True, LAST_ROOM_S if last else SAFE_S
            if blocked or may_be:
                waits = last or blocked or not self._is_late(progress.step)
                with self._phase(Phase.snapshot):
                    room = all(gather(self._snapshots.await_room(patience_s if waits else 0.0)))
            if room and not self._snapshots.begin(progress.step, progress.to_dict()):
                raise RuntimeError(f"there is no room for the snapshot of step {progress.step}, or its group is over")
        return time.perf_counter() - begun

"""Which committed snapshots become checkpoints, which nodes write them, and when COMMIT may be written. Pure.

Keepers write one checkpoint at a time while training goes on, and what is on its way is pinned in memory. Where a node
does not write its part, because it is gone or its memory is damaged, one with its copies does. Then comes the
index, then COMMIT, each once the one before is known to be there. What was asked for is tried again until it is in
storage, or too late; keepers need no trainer for it, so that whatever ends a run has its newest snapshot written.
"""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.control.cadence import Cadence
from regrow.control.commands import Outbox, Withdraw
from regrow.control.commits import CommitTracker, SnapshotCommit
from regrow.control.deletions import Deletions
from regrow.control.events import (
    CheckpointCommitted,
    CheckpointWanted,
    HasReadBack,
    IndexNotWritten,
    IndexWritten,
    PublishFailed,
    Spoken,
    WriteFailed,
    Written,
)
from regrow.control.milestones import Milestones
from regrow.control.peers import KeeperRegistry
from regrow.control.read_back import Committed, ReadBacks, StoredSteps
from regrow.control.upload import Stage, Upload
from regrow.control.values import NEVER, NOTHING, Version

RETRY_S = 30.0  # from a checkpoint that failed to the next one that is due
ASK_AGAIN_S = 5.0  # the same, where one was asked for
ARRIVE_S, ARRIVE_WANTED_S = 5.0, 60.0  # for the last snapshot to be committed once the workers have left
NO_TIME = float("-inf")
IN_VAIN = 3  # tries in a row at a part that no node has, before it is given up


@dataclass
class Wanted:
    """This step, or a later one, is to be in storage."""

    step: int
    since: float
    reason: str


class Failures:
    """Why steps that were to be in storage are not."""

    def __init__(self) -> None:
        self.of_newest = ""  # of the newest checkpoint that was begun
        self._newest = NOTHING, ""  # the newest such step since a group began, whatever was begun for it since

    def add(self, step: int, problem: str) -> None:
        """A checkpoint of this step was not written."""
        self._newest = max(self._newest, (step, problem))
        self.of_newest = f"the checkpoint of step {step} was not written: {problem}"

    def forget(self) -> None:
        """The run has gone back: later steps are none any more."""
        self._newest = NOTHING, ""

    def lost(self, is_safe: Callable[[int], bool]) -> str:
        """That the newest such step is gone, and why, a line; empty where it, or a later one, is safe."""
        step, problem = self._newest
        gone = step != NOTHING and not is_safe(step)
        return f"step {step} is neither committed in memory nor in storage: {problem}" if gone else ""


class LastSnapshot:
    """The workers have left; that of the last step that was trained may yet be committed."""

    def __init__(self, snapshots: CommitTracker) -> None:
        self.step, self.is_done = NOTHING, False  # whether it is the run's last
        self._snapshots, self._until = snapshots, NO_TIME

    @property
    def is_awaited(self) -> bool:
        return self._until != NO_TIME

    def wait(self, step: int, until: float, *, is_done: bool) -> None:
        self.step, self.is_done, self._until = step, is_done, until

    def has_come(self, now: float) -> bool:
        """Whether it has, or will not: once."""
        if not self.is_awaited or (now < self._until and not self._snapshots.holds(self.step)):
            return False
        self._until = NO_TIME
        return True


class LateCommits:
    """Uploads that were given up when COMMIT was on its way."""

    def __init__(self) -> None:
        self._uploads: dict[int, Upload] = {}
        self._withdrawn: set[int] = set()  # of these, the ones that must not count should it arrive

    def add(self, upload: Upload, *, withdraw: bool) -> None:
        self._uploads[upload.number] = upload
        self._withdrawn |= {upload.number} if withdraw else set()

    def withdraw_after(self, step: int) -> None:
        """The run has gone back to this step."""
        self._withdrawn |= {number for number, late in self._uploads.items() if late.version.step > step}

    def drop(self, number: int) -> tuple[Upload | None, bool]:
        """It is there, or will not be: the upload, if it is one of these, and whether it must not count."""
        is_withdrawn = number in self._withdrawn
        self._withdrawn.discard(number)
        return self._uploads.pop(number, None), is_withdrawn


class Checkpoints:
    """Decides on checkpoints; is told what came of it."""

    def __init__(
        self,
        cadence: Cadence,
        snapshots: CommitTracker,
        keepers: KeeperRegistry,
        out: Outbox,
        *,
        timeout_s: float,
        steps: StoredSteps,
    ) -> None:
        """`steps` are in storage."""
        self.cadence, self.timeout_s, self.stored = cadence, timeout_s, steps.newest
        self.upload: Upload | None = None
        self.failures = Failures()
        self.is_left = False  # to another process, which writes the run now
        self._snapshots, self._keepers, self._out = snapshots, keepers, out
        self._wanted: Wanted | None = None
        self._secured = NEVER  # the newest version that was asked for because memory may be lost
        self._last, self._late = LastSnapshot(snapshots), LateCommits()
        self._milestones = Milestones(cadence.keep_every_steps, steps, out)
        self._failed_at = NO_TIME
        self._in_vain = 0  # checkpoints in a row that failed because no node has some part
        self._number, self.steps, self.deletions = 0, steps, Deletions(out)
        self.read_backs = ReadBacks(out, steps, timeout_s=timeout_s, keepers=keepers)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written or read back, or is to be."""
        return bool(self.upload or self._wanted or self._last.is_awaited or self.read_backs.busy)

    @property
    def unstored(self) -> Version | None:
        """What is committed in memory, and is not in storage."""
        newest = self._snapshots.newest
        is_there = newest is None or newest.version.step <= self.stored or self.is_left
        return newest.version if newest is not None and not is_there else None

    def began(self, start_step: int, now: float) -> None:
        """A generation trains from `start_step`: a checkpoint of a later step is none any more."""
        self.cadence.resumed(start_step, now)
        self.stored = min(self.stored, start_step)
        self.steps.begin(start_step)
        self.read_backs.end_at, self._last = None, LastSnapshot(self._snapshots)
        self._late.withdraw_after(start_step)
        if self.upload is not None and self.upload.version.step > start_step:
            self._give_up(f"the run went back to step {start_step}", now, withdraw=True)

    def want(self, event: CheckpointWanted, now: float) -> None:
        """The snapshot of this step, or the next one if it is lost, is to be a checkpoint."""
        self.ask(event.step, "asked for", now)

    def secure(self, reason: str, now: float) -> None:
        """Memory may be lost: the newest snapshot in it is to be in storage. To be said again and again."""
        version = self.unstored
        if version is not None and version > self._secured:
            self._secured = version
            self.ask(version.step, reason, now)

    def settle(self, last_step: int, now: float, *, is_done: bool) -> None:
        """No worker is left: what is committed, or is about to be, is to be in storage within `timeout_s`.

        `last_step` is the last one that was trained; `is_done`: the run's. To be said again and again.
        """
        if self.read_backs.end_at is None and not self.is_left:
            self.read_backs.end_at, self._secured = now + self.timeout_s, NEVER
            if self._keepers.known and not self._snapshots.holds(last_step) and self.stored < last_step:
                patience_s = ARRIVE_WANTED_S if self._wanted is not None else ARRIVE_S
                patience_s = min(patience_s, self.timeout_s / 3)  # the one before takes its time, too
                self._last.wait(last_step, now + patience_s, is_done=is_done)
        if not self._last.is_awaited and self.read_backs.end_at is not None and now <= self.read_backs.end_at:
            self.secure("the run ends", now)

    def leave_it(self, now: float) -> None:
        """Another process writes the run: no checkpoint is begun any more."""
        self.is_left, self._wanted = True, None
        if self.upload is not None:
            self._give_up("another process writes the run", now)

    def begin_if_due(self, now: float) -> None:
        """Call it whenever a snapshot was committed."""
        commit = self._snapshots.newest
        if commit is None or self.is_left:
            return
        self._milestones.look(step := commit.version.step, self.upload, self.failures.of_newest)
        if self.upload is not None or self.deletions.is_awaited(now):
            return
        if self._wanted is not None and step >= self._wanted.step:
            if now - self._failed_at > ASK_AGAIN_S:
                self._begin(commit, self._wanted.reason, now)
        elif now - self._failed_at > RETRY_S and (reason := self.cadence.due(step, now)):
            self._begin(commit, reason, now)

    def written(self, event: Written, now: float) -> None:
        """The index comes once all nodes have."""
        if (found := self._current(event.upload, Stage.WRITING)) is not None:
            found.written(event, now)

    def write_failed(self, event: WriteFailed, now: float) -> None:
        """The next node that has copies is to do it instead."""
        if (found := self._current(event.upload, Stage.WRITING)) is not None:
            self._give_up_for(found.write_failed(event, at_last=self.read_backs.end_at is not None), now)

    def spoken(self, event: Spoken, now: float) -> None:
        """What many nodes came to that were to write, or to read back."""
        if (found := self._current(event.upload, Stage.WRITING)) is not None:
            self._give_up_for(found.spoken(event, now, at_last=self.read_backs.end_at is not None), now)
            return
        for answer in event.answers:
            if isinstance(answer, HasReadBack):
                self.has_read_back(answer, now)
        self.read_backs.left_out(event)

    def gone_dark(self, nodes: set[str], now: float) -> None:
        """Nothing is to be expected of these nodes any more."""
        if self.upload is not None:
            self._give_up_for(self.upload.gone_dark(nodes, at_last=self.read_backs.end_at is not None), now)

    def index_written(self, event: IndexWritten, now: float) -> None:
        if (found := self._current(event.upload, Stage.INDEX)) is not None:
            found.index_written(now)

    def index_not_written(self, event: IndexNotWritten, now: float) -> None:
        """Neither by a keeper, which may say so late, nor by the coordinator where it gives the problem."""
        if (found := self._current(event.upload, Stage.INDEX)) is not None:
            self._give_up_for(found.index_not_written(event.problem), now)

    def committed(self, event: CheckpointCommitted, now: float) -> None:
        """COMMIT is there. What was written is read back, then retention follows."""
        upload, step = event.upload, event.step
        current, (late, is_withdrawn) = self._current(upload, Stage.COMMIT), self._late.drop(upload)
        found = current or late
        assert found is not None
        if is_withdrawn:
            if self.upload is None or self.upload.version.step != step:  # which would write over it
                self._out.append(Withdraw(step))
            return
        seconds = now - found.begun_at
        took = {"seconds": seconds, **found.times.to_event(now), **self.steps.told}
        self._out.record("checkpoint", step=step, bytes=event.num_bytes, reason=found.reason, **took)
        self.read_backs.begin(Committed(upload, step, self.stored, found.asked), now)
        self.has_stored(step)
        if current is not None:
            self.cadence.written(took_s=seconds)
            self.upload = None
            self.begin_if_due(now)

    def has_read_back(self, event: HasReadBack, now: float) -> None:
        """Older checkpoints are deleted for one that is there as it was written; one that is not is made anew."""
        if self.read_backs.take(event):
            step, before = self.read_backs.step, self.read_backs.before
            self.stored, self._secured = before if step == self.stored else self.stored, NEVER
            self._failed(step, str(event.problem), now)
            self.ask(step, "the one before is damaged", now)
        self.read_backs.tick(now)

    def publish_failed(self, event: PublishFailed, now: float) -> None:
        self._late.drop(event.upload)
        if self.upload is not None and self.upload.number == event.upload:
            self._give_up(event.problem, now, failed=True)

    def discard(self, now: float) -> None:
        """What is in memory is not to be used: the state itself went wrong."""
        self._wanted = None
        if self.upload is not None:
            self._give_up("the state went wrong", now, withdraw=True)

    def tick(self, now: float) -> None:
        """Give up what takes too long, and try again what was asked for."""
        self.read_backs.tick(now)
        late = now - self.timeout_s
        ended = self.read_backs.end_at is not None and now > self.read_backs.end_at
        if self._last.has_come(now):
            self._miss_last(now)
        upload, wanted = self.upload, self._wanted
        if upload is not None and (upload.begun_at < late or ended):
            self._give_up(f"after {self.timeout_s:.0f} s {upload.doing} still; checkpoint.timeout_s allows more", now)
        if self.upload is not None or wanted is None:
            return
        if wanted.since < late or ended or self._in_vain >= IN_VAIN:
            if not self._snapshots.holds(wanted.step):
                self._failed(wanted.step, f"its snapshot is not committed after {self.timeout_s:.0f} s", now)
                self._secured = NEVER
            self._wanted = None
        elif self._snapshots.holds(wanted.step):
            self.begin_if_due(now)

    def _miss_last(self, now: float) -> None:
        """The last snapshot of workers that have left has come, or it will not."""
        wanted = self._wanted
        step = wanted.step if wanted is not None else self._last.step
        if (wanted is not None or self._last.is_done) and not self._snapshots.holds(step):
            self._failed(step, "its snapshot was not committed in time", now)
            self._wanted, self._secured, self._failed_at = None, NEVER, NO_TIME  # the one before is to be stored now

    def ask(self, step: int, reason: str, now: float) -> None:
        """This step, or a later one, is to be in storage."""
        if step <= self.stored or self.is_left:
            return
        wanted, self._in_vain = self._wanted, 0
        if wanted is None or (self.upload is not None and self.upload.version.step >= wanted.step):
            self._wanted = Wanted(step, now, reason)
        else:
            wanted.step = max(step, wanted.step)
        self.begin_if_due(now)

    def _begin(self, commit: SnapshotCommit, reason: str, now: float) -> None:
        self.failures.of_newest = ""
        self._number += 1
        self.upload = Upload(self._number, commit, reason, now, self._keepers, self._out)
        self.cadence.begun(commit.version.step, now)
        self.upload.begin(self.timeout_s)

    def has_stored(self, step: int) -> None:
        """This step is in storage: keepers have written it, or the ranks themselves."""
        self.steps.add(step)
        self.stored, self._in_vain = max(self.stored, step), 0
        if self._wanted is not None and self._wanted.step <= self.stored:
            self._wanted = None

    def _current(self, upload: int, stage: Stage) -> Upload | None:
        """The upload, if it is that one and has come so far: what is said of others comes too late."""
        found = self.upload
        return found if found is not None and (found.number, found.stage) == (upload, stage) else None

    def _give_up_for(self, problem: str, now: float) -> None:
        """What is being written cannot be any more, for this if it is not empty."""
        if problem and self.upload is not None:
            self._in_vain = self._in_vain + 1 if self.upload.lacked else 0
            self._give_up(problem, now)

    def _give_up(self, problem: str, now: float, *, withdraw: bool = False, failed: bool = False) -> None:
        """`failed`: storage said so, and no COMMIT is on its way."""
        upload, self.upload = self.upload, None
        assert upload is not None
        if upload.stage is not Stage.COMMIT:
            self.deletions.clean_up(upload, now)
        elif not failed:
            self._late.add(upload, withdraw=withdraw)
        self.cadence.abandoned()
        self._failed(upload.version.step, problem, now)
        self.begin_if_due(now)

    def _failed(self, step: int, problem: str, now: float) -> None:
        self._failed_at = now
        self.failures.add(step, problem)
        self._out.record("checkpoint_failed", step=step, detail=problem)

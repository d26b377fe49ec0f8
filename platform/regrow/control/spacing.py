"""How many steps lie between two snapshots, where `snapshot.every_steps=auto`: K, from what is measured. Pure.

A snapshot costs training the seconds by which the steps beside its copies are longer than steps without one; a failure
costs, on average, half of the steps from one snapshot to the next. Both are shares of the run's time:

    share(K) = added_s / (K * step_s) + (K / 2 * step_s) / mtbf_s

K is at least the steps that a commit takes, or copies would queue, and at most so many that a failure right before a
commit costs no more than `most_steps_lost`.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from regrow.config.schema import SnapshotConfig
from regrow.config.snapshots import fixed_every_steps
from regrow.control.cadence import Cadence
from regrow.control.checkpoints import Checkpoints
from regrow.control.commands import Outbox
from regrow.control.values import NEVER, NOTHING, Version

FIRST = 4  # steps between snapshots until something is measured: some steps then have copies beside them, some none
LEAST_ALONE, LEAST_SNAPSHOTS = 4, 2  # steps without copies, and snapshots, that are measured before K is chosen
WARM_UP = 2  # steps of a group that are not compared with others
KEPT = 64  # newest measurements of each kind
WORTH = 0.001  # of the run's time, that another K must save


def share_of_time(every_steps: int, *, added_s: float, step_s: float, mtbf_s: float) -> float:
    """What snapshots at this distance take of the run's time, by what they add and by what failures lose."""
    return added_s / (every_steps * step_s) + every_steps / 2 * step_s / mtbf_s


def steps_of_commit(*, commit_s: float, step_s: float) -> int:
    """Steps that are begun before a snapshot is committed, the one in which that happens among them; at least 1."""
    return max(1, math.ceil(commit_s / step_s))


def allowed(*, commit_s: float, step_s: float, most_steps_lost: int) -> range:
    """The distances that keep up with commits and lose at most `most_steps_lost`: with K steps between snapshots and C
    steps to a commit, K + C - 1 are lost at the most. Where none does both, the nearest one: C, or the most.

    >>> allowed(commit_s=2.5, step_s=1.0, most_steps_lost=16)
    range(3, 15)
    """
    commit_steps = steps_of_commit(commit_s=commit_s, step_s=step_s)
    fewest = min(commit_steps, most_steps_lost)
    return range(fewest, max(fewest, most_steps_lost - (commit_steps - 1)) + 1)


def best_every_steps(*, added_s: float, commit_s: float, step_s: float, mtbf_s: float, most_steps_lost: int) -> int:
    """The allowed distance whose share of the run's time is least; the smaller one of two that cost the same.

    >>> best_every_steps(added_s=0.1, commit_s=4.0, step_s=6.0, mtbf_s=3.09 * 3600, most_steps_lost=16)
    8
    """
    choices = allowed(commit_s=commit_s, step_s=step_s, most_steps_lost=most_steps_lost)
    ideal = math.sqrt(2 * max(added_s, 0.0) * mtbf_s) / step_s
    near = {min(max(each, choices[0]), choices[-1]) for each in (math.floor(ideal), math.floor(ideal) + 1)}
    cost = {each: share_of_time(each, added_s=added_s, step_s=step_s, mtbf_s=mtbf_s) for each in sorted(near)}
    return min(cost, key=cost.__getitem__)


@dataclass(frozen=True)
class Choice:
    """A K, and what it follows from."""

    every_steps: int
    before: int  # the same, where another bound is told alone
    commit_s: float  # from a step's row to the commit of its snapshot
    added_s: float | None  # that a snapshot adds to the steps beside it; None: not known yet
    step_s: float
    mtbf_s: float
    steps_lost: int  # the most that a failure costs


@dataclass
class _Beside:
    """Steps beside one snapshot's copies."""

    seconds: list[float] = field(default_factory=list)
    disturbed: bool = False  # by something else too


@dataclass
class Spacing:
    """Told of steps and commits, in the order of their coming; `choose` says when K changes, or what a failure costs.

    Steps between a commit and the next snapshot have no copies beside them, all others do: so that there are some of
    both, K is at first twice as long as a commit.
    """

    most_steps_lost: int
    every_steps: int = 0  # 0: nothing is chosen yet
    _steps_lost: int = 0  # as told last
    _rows: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=4 * KEPT))  # since a commit
    _came: dict[int, float] = field(default_factory=dict)  # when each of them did
    _open: _Beside | None = None  # of the snapshot that was committed within the step that runs
    _alone_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _beside: deque[_Beside] = field(default_factory=lambda: deque(maxlen=KEPT))
    _commits_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _left_out: int = WARM_UP
    _measured: bool = False  # whether what was chosen follows from all that is to be measured in this group

    def resumed(self) -> None:
        """A group begins to train: other nodes, links and steps. What was chosen stays until it is measured anew."""
        for each in (self._rows, self._came, self._alone_s, self._beside, self._commits_s):
            each.clear()
        self._open, self._left_out, self._measured = None, WARM_UP, False

    def stepped(self, step: int, seconds: float, now: float, *, disturbed: bool = False) -> None:
        """A step took so long, waiting for snapshots included; `disturbed`: a checkpoint was written beside it."""
        self._came[step] = now
        if self._left_out:
            self._left_out -= 1
        elif self._open is not None:
            self._take(self._open, seconds, disturbed)
        else:
            self._rows.append((step, seconds, disturbed))
        if self._open is not None and not self._open.disturbed:
            self._beside.append(self._open)
        self._open = None

    def committed(self, step: int, now: float) -> None:
        """The snapshot of a step is."""
        if step not in self._came:  # of what was restored; or its row is on its way
            return
        self._commits_s.append(now - self._came[step])
        self._came = {each: at for each, at in self._came.items() if each > step}
        beside = _Beside()
        for number, seconds, disturbed in self._rows:
            if number > step:
                self._take(beside, seconds, disturbed)
            elif not disturbed:
                self._alone_s.append(seconds)
        self._rows.clear()
        self._open = beside

    def choose(self, mtbf_s: float) -> Choice | None:
        """Another K than before, if one should be, or the same where a failure costs more than was told, or less than
        half of it; failures come `mtbf_s` apart, in seconds."""
        if not self._commits_s or not (self._alone_s or self._beside):
            return None
        commit_s, added_s = median(self._commits_s), self._added_s()
        steps = self._alone_s or [each for beside in self._beside for each in beside.seconds]
        if not steps:
            return None
        step_s = median(steps)
        choices = allowed(commit_s=commit_s, step_s=step_s, most_steps_lost=self.most_steps_lost)
        if added_s is None:
            wanted = max(FIRST, 2 * steps_of_commit(commit_s=commit_s, step_s=step_s), self.every_steps)
            every_steps = min(max(wanted, choices[0]), choices[-1])
        else:
            costs = {"added_s": added_s, "step_s": step_s, "mtbf_s": mtbf_s}
            every_steps = best_every_steps(commit_s=commit_s, most_steps_lost=self.most_steps_lost, **costs)
            saved = share_of_time(self.every_steps or FIRST, **costs) - share_of_time(every_steps, **costs)
            if self._measured and self.every_steps in choices and saved < WORTH:
                every_steps = self.every_steps
            self._measured = True
        lost = every_steps + steps_of_commit(commit_s=commit_s, step_s=step_s) - 1
        if every_steps == self.every_steps and lost <= self._steps_lost <= 2 * lost:
            return None
        before, self.every_steps, self._steps_lost = self.every_steps, every_steps, lost
        return Choice(every_steps, before, commit_s, added_s, step_s, mtbf_s, lost)

    def _take(self, beside: _Beside, seconds: float, disturbed: bool) -> None:
        beside.seconds.append(seconds)
        beside.disturbed = beside.disturbed or disturbed

    def _added_s(self) -> float | None:
        """That one snapshot adds to the steps beside it; below what was measured by chance, nothing."""
        if len(self._alone_s) < LEAST_ALONE or len(self._beside) < LEAST_SNAPSHOTS:
            return None
        alone_s = median(self._alone_s)
        return max(0.0, median(sum(each.seconds) - len(each.seconds) * alone_s for each in self._beside))


class SpacingPolicy:
    """What control says of the distance of snapshots: nothing where it is set."""

    def __init__(self, snapshot: SnapshotConfig, cadence: Cadence, checkpoints: Checkpoints, out: Outbox) -> None:
        """`cadence` knows how often training fails."""
        self._spacing = Spacing(snapshot.most_steps_lost) if fixed_every_steps(snapshot) is None else None
        self._cadence, self._checkpoints, self._out = cadence, checkpoints, out
        self._generation, self._newest = NOTHING, NEVER

    def stepped(self, row: Mapping[str, Any], generation: int, now: float) -> int:
        """A step's row is here, for the cadence too; steps between snapshots from now on, 0: as before."""
        writing, seconds = self._checkpoints.upload is not None, row["step_s"] - row["data_wait_s"]
        self._cadence.stepped(max(seconds - row["snapshot_s"], 1e-6), writing=writing)
        if self._spacing is None:
            return 0
        if generation != self._generation:
            self._generation = generation
            self._spacing.resumed()
        self._spacing.stepped(row["step"], max(seconds, 1e-6), now, disturbed=writing)
        if choice := self._spacing.choose(self._cadence.mtbf_s(now)):
            self._out.record("snapshot_spacing", generation=generation, **asdict(choice))
        return self._spacing.every_steps

    def committed(self, newest: Version | None, now: float) -> None:
        """This is the newest that is; again for the same: nothing."""
        if self._spacing is not None and newest is not None and newest != self._newest:
            self._spacing.committed(newest.step, now)
        self._newest = newest or NEVER

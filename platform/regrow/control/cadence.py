"""When a committed snapshot becomes a durable checkpoint: by steps, by minutes, or by what one costs and may save.

Pure arithmetic: told what happened and what time it is, by any one clock that counts seconds.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

KEPT_STEPS = 256  # newest step times that are compared, of each kind
KEPT_COSTS = 16  # newest checkpoints whose median cost counts
LEAST_SLOWDOWN = 0.01  # no smaller one can be told from noise, nor is 0 ever true: files, requests, bandwidth
LONGER = 1.5  # than the newest one, another may take
FIRST_AFTER_STEPS = 20  # automatic: the first one, to be measured; shows early, too, that storage can be written


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds from the end of a checkpoint to the beginning of the next that waste least time, lost or spent.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), doi:10.1016/j.future.2004.11.016. `cost_s` is what one checkpoint takes from training,
    `mtbf_s` the mean time between failures, which come at random.

    >>> round(daly_interval(cost_s=60, mtbf_s=24 * 3600))
    3180
    """
    assert cost_s >= 0, f"{cost_s=}"
    assert mtbf_s > 0, f"{mtbf_s=}"
    share = cost_s / (2 * mtbf_s)
    if share >= 1:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


@dataclass(frozen=True)
class _Mark:
    step: int
    at: float


class Cadence:
    """Decides when to write a checkpoint; whichever of the ways that are on is due first counts.

    Calls follow the run: `resumed` whenever a group begins to train, `stepped` after each step, `due` when a snapshot
    commits; then `begun`, and `written` or `abandoned`: one is written at a time.
    """

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        automatic: bool,
        mtbf_hours: float,
        now: float,
        keep_every_steps: int = 0,
    ) -> None:
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.keep_every_steps = keep_every_steps  # those at multiples of it are kept for good; 0: none
        self.automatic = automatic
        self.mtbf_hours = mtbf_hours  # expected before anything is known; weighs as much as one failure seen
        self._started_at = now
        self._failures = 0
        self._since: _Mark | None = None  # begin of the newest checkpoint, or where training began without one
        self._begun: _Mark | None = None  # the one being written
        self._alone_s: deque[float] = deque(maxlen=KEPT_STEPS)  # steps while none was written
        self._beside_s: deque[float] = deque(maxlen=KEPT_STEPS)  # steps beside the writing of one
        self._costs_s: deque[float] = deque(maxlen=KEPT_COSTS)
        self._took_s = 0.0  # the newest, from its begin to its commit

    def resumed(self, step: int, now: float) -> None:
        """A group trains on from `step`: at the start, after an interruption, after a resize.

        Step times are measured anew, as the world size may differ. Back at the newest checkpoint, or before it, nothing
        is left to lose, and counting begins again; where memory kept later steps, it goes on.
        """
        self._alone_s.clear()
        self._beside_s.clear()
        if self._since is None or step <= self._since.step:
            self._since = _Mark(step, now)

    def stepped(self, seconds: float, *, writing: bool) -> None:
        """A step took so long, waiting for snapshots and checkpoints left out; was a checkpoint written beside it?"""
        assert seconds > 0, f"{seconds=}"
        (self._beside_s if writing else self._alone_s).append(seconds)

    def failed(self) -> None:
        """Training was interrupted, and not asked to be. Counts where memory survived it, too: it may not the next."""
        self._failures += 1

    def begun(self, step: int, now: float) -> None:
        """The snapshot of `step` is being written."""
        self._begun = _Mark(step, now)

    def written(self, *, took_s: float, stall_s: float = 0.0) -> None:
        """The checkpoint that was begun is committed, `took_s` later; training stood still for `stall_s`."""
        assert self._begun is not None, "written, but never begun"
        self._since, self._begun = self._begun, None
        lost_share = 1 - median(self._alone_s) / median(self._beside_s) if self._alone_s and self._beside_s else 0.0
        self._costs_s.append(stall_s + took_s * lost_share)  # may be negative: noise, which the median takes out
        self._took_s = took_s
        self._beside_s.clear()

    def abandoned(self) -> None:
        """The checkpoint that was begun will never commit: counting goes on from the one before."""
        self._begun = None

    def mtbf_s(self, now: float) -> float:
        """Mean time between failures: the run's so far and the one expected, as if that had ended in a failure.

        That is one over the posterior mean of the rate of random failures, with a Gamma(1, mtbf_hours) prior.
        """
        return (now - self._started_at + self.mtbf_hours * 3600) / (self._failures + 1)

    def cost_s(self) -> float | None:
        """What a checkpoint takes from training, by stall and by slower steps beside it; None before the first."""
        if not self._costs_s:
            return None
        return max(median(self._costs_s), LEAST_SLOWDOWN * self._took_s)

    def interval_s(self, now: float) -> float | None:
        """Automatic: seconds from the beginning of a checkpoint to that of the next; None before the first.

        Daly's, plus the cost, as his begin at an end; at least what writing takes, as one is written at a time. That
        a checkpoint counts only once it is written changes what a failure costs, but not which interval is best.
        """
        cost_s = self.cost_s()
        if not self.automatic or cost_s is None:
            return None
        return max(daly_interval(cost_s, self.mtbf_s(now)) + cost_s, self._took_s)

    def due(self, step: int, now: float) -> str:
        """Why a checkpoint of this step should be begun now, for a person; empty if it should not."""
        if self._since is None or self._begun is not None or step <= self._since.step:  # None: nothing trains yet
            return ""
        if self.every_steps and step // self.every_steps > self._since.step // self.every_steps:
            return f"every {self.every_steps} steps"
        if self._would_outlast(step):
            return ""
        elapsed_s = now - self._since.at
        if self.every_minutes is not None and elapsed_s >= self.every_minutes * 60:
            return f"every {self.every_minutes:g} minutes"
        if not self.automatic:
            return ""
        interval_s = self.interval_s(now)
        if interval_s is None:
            first = step - self._since.step >= FIRST_AFTER_STEPS
            return "automatic: the first one, to measure what it costs" if first else ""
        return f"automatic: every {interval_s:.0f} s" if elapsed_s >= interval_s else ""

    def _would_outlast(self, step: int) -> bool:
        """Whether one of this step may still be being written when one is due that is to be kept for good."""
        if not self.keep_every_steps or not self._alone_s:
            return False
        steps = self.keep_every_steps - step % self.keep_every_steps
        return LONGER * self._took_s > steps * median(self._alone_s)

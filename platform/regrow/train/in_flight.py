"""Steps that the host has launched and not read: on a device the host is a step ahead, and never waits for it."""

from concurrent.futures import Future
from dataclasses import dataclass

from regrow.train.hooks import Hooks, Saver
from regrow.train.metrics import Meter
from regrow.train.step import StepStats


class NotFinite(Exception):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass
class _Launched:
    step: int
    stats: Future[StepStats]
    row: dict[str, object]


class InFlight:
    """Launched steps, the oldest first, and what the newest one that was read has shown, the same on every rank."""

    def __init__(self, saver: Saver, hooks: Hooks, meter: Meter, *, nonfinite_skips: int) -> None:
        """A row is logged, and a snapshot confirmed, once its step was read and vouched for."""
        self.leaving = False  # some rank wants to leave
        self.blocked = False  # some rank has no room for a snapshot
        self._saver, self._hooks, self._meter = saver, hooks, meter
        self._nonfinite_skips, self._skipped = nonfinite_skips, 0
        self._launched: list[_Launched] = []

    def push(self, step: int, stats: Future[StepStats], row: dict[str, object]) -> None:
        self._launched.append(_Launched(step, stats, {"step": step} | row))

    def settle(self, left: int) -> None:
        """Read and log the oldest steps until only `left` are left. Raises NotFinite, and BrokenStep for one that its
        certificate does not vouch for."""
        while len(self._launched) > left:
            oldest = self._launched.pop(0)
            result = oldest.stats.result().resolve()
            self.leaving, self.blocked = self.leaving or result.flag, result.blocked
            self.waited(self._saver.confirm(oldest.step))
            self._hooks.log(self._meter.finish(oldest.row, result))
            self._skipped = self._skipped + 1 if result.skipped else 0
            if self._skipped > self._nonfinite_skips:
                steps = f"{self._skipped} steps in a row, up to step {oldest.step},"
                raise NotFinite(f"the gradients of {steps} are not finite")

    def waited(self, seconds: float) -> None:
        """The host has waited for the saver. It costs time only where the device had nothing to do meanwhile."""
        self._meter.snapshot_s += 0.0 if self._launched else seconds

    def validate(self, step: int) -> None:
        """Put the validation loss into the row of the newest step, which is timed without it. Collective."""
        self.settle(1)
        self._launched[0].stats.result().resolve()  # the device has come to its end
        self._launched[0].row["validation_loss"] = self._meter.outside_steps(lambda: self._hooks.validate(step))

"""The coordinator's clock on another host, by which events are stamped, and rows of metrics stand between them; and the
one by which its control tells which process is late."""

import time
from collections.abc import Callable, Mapping

from regrow.control.events import Notice

ALIKE_S = 0.5  # between two clocks that are left as they are
STANDSTILL_S = 2.0  # that pass between two ticks of the coordinator; what is more is a standstill of its own


def clock_of(ask: Callable[[], float]) -> Callable[[], float]:
    """Unix time as the clock tells it that `ask` reads once, elsewhere; this host's own where the two are alike.

    They are where they differ by no more than ALIKE_S and half of what the answer took: no better is that known.
    """
    here, begun = time.time(), time.monotonic()
    there = ask()
    middle_s = (time.monotonic() - begun) / 2
    if abs(there - (here + middle_s)) <= ALIKE_S + middle_s:
        return time.time
    ahead = there - (begun + middle_s)
    return lambda: ahead + time.monotonic()  # also where this host's clock is set right meanwhile


class ControlClock:
    """Control's: unix time at the start, and steady from there.

    Between two ticks no more than STANDSTILL_S pass on it. A process that was stopped, or did not get to run, has taken
    no call meanwhile: no process is late for that.
    """

    def __init__(self, unix_s: float, steady: Callable[[], float] = time.monotonic) -> None:
        """`steady`: seconds of any clock that never goes back."""
        self._steady, self._ahead_s = steady, unix_s - steady()
        self._ticked = steady(), 0.0  # when, and how long it had stood still by then

    @property
    def now(self) -> float:
        at = self._steady()
        return self._ahead_s + at - self._stood_s(at)

    @property
    def stood_s(self) -> float:
        """How long it has stood still so far."""
        return self._stood_s(self._steady())

    def tick(self) -> None:
        """Call it several times a second."""
        at = self._steady()
        self._ticked = at, self._stood_s(at)

    def _stood_s(self, at: float) -> float:
        ticked_at, stood_s = self._ticked
        return stood_s + max(0.0, at - ticked_at - STANDSTILL_S)


class Deadlines:
    """Of nodes, in unix time, on control's clock, which no step of the host's moves."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float], float] = {}

    def notice(self, told: Mapping[str, float], clock: ControlClock) -> Notice:
        """Of those that are told, by node. Each is converted once; from then on it comes nearer by what the clock
        stands still."""
        now, stood_s = clock.now, clock.stood_s
        ahead_s = now - time.time()
        self._known = {each: self._known.get(each, each[1] + ahead_s + stood_s) for each in told.items()}
        return Notice({node: at - stood_s for (node, _), at in self._known.items()}, ahead_s)

"""The coordinator's clock on another host: events are stamped by it, and rows of metrics stand between them."""

import time
from collections.abc import Callable, Mapping

from regrow.control.events import Notice

ALIKE_S = 0.5  # between two clocks that are left as they are


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


class Deadlines:
    """Of nodes, in unix time, on control's clock, which no step of the host's moves."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float], float] = {}

    def notice(self, told: Mapping[str, float], now: float) -> Notice:
        """Of those that are told, by node; `now` is control's. Each is converted once."""
        ahead_s = now - time.time()
        self._known = {each: self._known.get(each, each[1] + ahead_s) for each in told.items()}
        return Notice({node: at for (node, _), at in self._known.items()}, ahead_s)

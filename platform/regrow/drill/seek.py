"""Waits until what a fault has done is found, before the next one; a host that computed wrong goes then."""

import time
from collections.abc import Callable

from regrow.drill.faults import WRONG_UNITS
from regrow.drill.findings import SEEK_S, Row, find, sought
from regrow.drill.log import Record, RunFollower

AGAIN_S = 0.5  # between looks


class Seeker:
    """Of one attempt at a drill."""

    def __init__(self, record: Record, watch: RunFollower, verify_every: int) -> None:
        self._record, self._watch, self._verify_every = record, watch, verify_every
        self._faults: list[tuple[Row, float]] = []
        self._look_at = 0.0

    def began(self, fault: Row) -> None:
        """A fault was carried out, and recorded so."""
        if sought(fault["kind"], fault["what"]):
            self._faults.append((fault, time.monotonic() + SEEK_S))

    def is_seeking(self, end_node: Callable[[int, str], None]) -> bool:
        """Whether something is still to be found; `end_node` is for hosts that were."""
        now = time.monotonic()
        if self._faults and now > self._look_at:
            self._look_at = now + AGAIN_S
            self._faults = [
                (fault, until) for fault, until in self._faults if not self._is_over(fault, until, end_node)
            ]
        return bool(self._faults)

    def _is_over(self, fault: Row, until: float, end_node: Callable[[int, str], None]) -> bool:
        watch = self._watch
        found = find(fault, self._record.read(), watch.events, watch.rows, self._verify_every)
        was_found = found.seconds is not None
        if not was_found and time.monotonic() < until and not _cannot_be(found.found, fault):
            return False
        if fault["kind"] in WRONG_UNITS:
            end_node(fault["number"], fault["victims"][0]["node"])
        return True


def _cannot_be(found: bool | None, fault: Row) -> bool:
    """Whether it is known at once that nothing can see it."""
    return found is None and fault["kind"] == "flip_weights"

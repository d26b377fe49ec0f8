"""Nodes that a group had better be without: those about to be taken away, and those that fail again and again.

Pure; time is unix time and an argument.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

MARGIN_S = 10.0  # before a node is taken away, the group has left it: its last snapshot needs a moment elsewhere


@dataclass
class Notices:
    """What is known of nodes. One is barred after `failures` within `within_s`, for `barred_s`; 0 failures: never."""

    failures: int
    within_s: float
    barred_s: float
    deadlines: dict[str, float] = field(default_factory=dict)  # of nodes that are being drained
    barred_until: dict[str, float] = field(default_factory=dict)
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def drained(self, deadlines: Mapping[str, float]) -> list[str]:
        """All nodes that are being drained now, and until when they may be used; those that were not before."""
        new = [node for node in deadlines if node not in self.deadlines]
        self.deadlines = dict(deadlines)
        return new

    def failed(self, node: str, now: float) -> bool:
        """A worker of this node failed, or all of it did; whether that was once too often."""
        times = self._failed_at[node]
        times.append(now)
        while times[0] < now - self.within_s:
            times.popleft()
        if not self.failures or len(times) < self.failures:
            return False
        self.barred_until[node] = now + self.barred_s
        times.clear()
        return True

    def avoided(self, now: float) -> set[str]:
        """Nodes that no group is to be on."""
        self.barred_until = {node: until for node, until in self.barred_until.items() if until > now}
        return self.barred_until.keys() | self.leaving(now)

    def leaving(self, now: float) -> set[str]:
        """Nodes that are about to be taken away."""
        return {node for node, at in self.deadlines.items() if now > at - MARGIN_S}

"""Node exclusions: nodes that a group does without, because they are draining or quarantined. Pure."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from regrow.control.commands import Kill, Outbox
from regrow.control.events import GpuError, Notice, Unfit
from regrow.control.membership import Membership

MARGIN_S = 10.0  # before a node is taken away, the group has left it: its last snapshot needs a moment elsewhere


@dataclass
class Exclusions:
    """A node is quarantined after `failures` within `within_s`, for `quarantine_s`; 0 failures: never."""

    failures: int
    within_s: float
    quarantine_s: float
    deadlines: dict[str, float] = field(default_factory=dict)  # of draining nodes
    quarantined_until: dict[str, float] = field(default_factory=dict)
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))

    def draining(self, deadlines: Mapping[str, float]) -> list[str]:
        """All nodes that are draining now, and until when they may be used; returns those that were not before."""
        new = [node for node in deadlines if node not in self.deadlines]
        self.deadlines = dict(deadlines)
        return new

    def failed(self, node: str, now: float) -> bool:
        """A worker of this node failed, or all of it did; returns whether that was once too often."""
        times = self._failed_at[node]
        times.append(now)
        while times[0] < now - self.within_s:
            times.popleft()
        if not self.failures or len(times) < self.failures:
            return False
        self.quarantined_until[node] = now + self.quarantine_s
        times.clear()
        return True

    def excluded(self, now: float) -> set[str]:
        """Nodes that no group is to be on."""
        self.quarantined_until = {node: until for node, until in self.quarantined_until.items() if until > now}
        return self.quarantined_until.keys() | self.leaving(now)

    def leaving(self, now: float) -> set[str]:
        """Nodes that are about to be taken away."""
        return {node for node, at in self.deadlines.items() if now > at - MARGIN_S}


@dataclass
class NodeFailures:
    """Counts what fails on nodes, and quarantines those that the others do without."""

    exclusions: Exclusions
    membership: Membership
    out: Outbox
    _failed_in: dict[str, int] = field(default_factory=dict)  # the newest generation in which a node's failure counted

    def unfit(self, event: Unfit, now: float) -> None:
        self.out.record("unfit", node=event.node, pid=event.pid, detail=event.detail)
        self.failed(event.node, now)

    def gpu_error(self, event: GpuError, now: float) -> None:
        """The process that meets it fails by itself, if it does."""
        self.out.record("gpu_error", node=event.node, gpu=event.gpu, xid=event.xid, meaning=event.meaning)
        if event.meaning:
            self.failed(event.node, now, again=False)

    def notice(self, event: Notice, now: float) -> None:
        for node in self.exclusions.draining(event.deadlines):
            self.out.record("drain", node=node, deadline=event.deadlines[node])

    def failed(self, node: str, now: float, *, again: bool = True) -> None:
        """Not `again`: but for those that were counted in this generation, whose workers die one by one."""
        generation = self.membership.generation
        if not again and self._failed_in.get(node) == generation:
            return
        self._failed_in[node] = generation
        survivors = self.membership.survivors
        others = [member for member in survivors if member.node != node]
        if len(others) < min(self.membership.sizes) or not self.exclusions.failed(node, now):
            return
        self.out.record("quarantine", node=node, seconds=self.exclusions.quarantine_s)
        for member in [*survivors, *self.membership.waiting.values()]:
            if member.node == node:
                self.out.append(Kill(node, member.pid))  # it is started elsewhere, where there is room

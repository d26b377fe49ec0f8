"""Which nodes a run's workers come from and go with: when newcomers are ready, when a node is lost, what failed.

Pure.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from regrow.control.commands import Outbox
from regrow.control.events import KeeperUp, NodesAlive
from regrow.control.membership import Member, Membership
from regrow.control.nodes import OF_NODE, NodeFailures
from regrow.record.events import Cause, FaultKind

OF_CUDA = re.compile(r"\b(CUDA|cuDNN|cuBLAS|ECC|Xid)\b|CUDAError|AcceleratorError", re.IGNORECASE)


@dataclass
class Arrivals:
    """Tells of nodes; decides nothing."""

    membership: Membership
    nodes: NodeFailures
    out: Outbox
    began: float  # when this control did: of nodes that were there before it is not told how long they took to start
    _alive: frozenset[str] | None = None  # as Ray said last
    _up_at: dict[str, float] = field(default_factory=dict)  # of nodes that came since
    _lost_at: dict[str, float] = field(default_factory=dict)  # when they last lost a worker
    _told: set[str] = field(default_factory=set)  # members that are known to be ready

    def alive(self, event: NodesAlive, now: float) -> None:
        """Say which nodes of members are gone."""
        before, self._alive = self._alive, event.nodes
        if before is None:
            return
        self._up_at = dict.fromkeys(event.nodes - before, now) | self._up_at
        gone = before - event.nodes
        for node in sorted(gone & self.nodes.machines.keys()):
            self.out.record(
                "node_lost",
                node=node,
                host=self.nodes.machines[node],
                drained=node in self.nodes.exclusions.going,
                generation=self.membership.generation,
            )
        for node in gone:
            self._up_at.pop(node, None)
            self._lost_at.pop(node, None)

    def keeper_up(self, event: KeeperUp, now: float) -> None:
        """A node that Ray may not have been asked about since it came."""
        if event.node_up_s is not None and (at := now - event.node_up_s) > self.began:
            self._up_at[event.node] = min(at, self._up_at.get(event.node, at))

    def lost(self, members: Iterable[Member], now: float) -> None:
        """They ended: others start in their places."""
        self._lost_at |= {member.node: now for member in members}

    def ready(self, now: float) -> None:
        """Say which processes wait that are of no group: once each."""
        waiting = self.membership.waiting
        new = [member for member in waiting.values() if member.id not in self._told]
        if not new:
            return
        in_group = {member.id for member in self.membership.current}
        self._told = {*waiting, *in_group}
        came = [member for member in new if member.id not in in_group] if in_group else []  # none: all start
        for node, ranks in Counter(member.node for member in came).items():
            since = max((times[node] for times in (self._up_at, self._lost_at) if node in times), default=None)
            self.out.record(
                "ready",
                node=node,
                ranks=ranks,
                host=self.nodes.machines.get(node, node),
                start_s=None if since is None else round(now - since, 3),
                generation=self.membership.generation,
            )


def kind_of(
    cause: str,
    detail: str,
    nodes: Collection[str],
    *,
    is_dead: Callable[[str], bool],
    failures: NodeFailures,
    slow_links: Collection[str] = (),
) -> FaultKind:
    """What failed, by what is known by now of these nodes."""
    if cause == Cause.corrupted:
        return FaultKind.sdc
    generation = failures.membership.generation
    has_reported = any(failures.with_gpu_errors.get(node) == generation for node in nodes)
    if has_reported or (cause == Cause.worker_failed and OF_CUDA.search(detail)):
        return FaultKind.gpu
    if cause == Cause.node_silent and any(node in slow_links for node in nodes):
        return FaultKind.network
    if cause == Cause.node_silent or any(is_dead(node) for node in nodes) or OF_NODE.search(detail):
        return FaultKind.host
    return FaultKind.hang if cause == Cause.worker_hung else FaultKind.software

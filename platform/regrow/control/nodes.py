"""Node exclusions: nodes that a group does without, because they are draining or their host is quarantined. Pure."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from regrow.control.commands import Outbox
from regrow.control.events import Died, GpuError, Notice, Unfit
from regrow.control.membership import Member, Membership
from regrow.record.events import Cause

MARGIN_S = 10.0  # before a node is taken away, the group has left it: its last snapshot needs a moment elsewhere
MARGIN_STEPS = 4  # a row's answer is read by all ranks of a device three steps later; a row comes once a step
OF_NODE = re.compile(r"node (was terminated|was marked dead|died|has died)", re.IGNORECASE)  # in Ray's words
TOGETHER_S = 5.0  # processes of a host that fail within this fail for one reason
UNTRIED_S = 600.0  # at most, since the last group of others broke: several more are to form and to do a step or break


@dataclass
class Exclusions:
    """A host is quarantined after `failures` within `within_s`, for `quarantine_s`; 0 failures: never."""

    failures: int
    within_s: float
    quarantine_s: float
    margin_s: float = MARGIN_S
    deadlines: dict[str, float] = field(default_factory=dict)  # of draining nodes
    corrupt: set[str] = field(default_factory=set)  # hosts that computed wrong: better none than these
    asked: set[str] = field(default_factory=set)  # nodes that are drained for maintenance; see `control.drains`
    quarantined_until: dict[str, float] = field(default_factory=dict)  # by host
    untried_until: dict[str, float] = field(default_factory=dict)  # by host, while others are tried without these
    _failed_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))  # by host

    def draining(self, deadlines: Mapping[str, float]) -> list[str]:
        """All nodes that are draining now, and until when they may be used; returns those that were not before."""
        new = [node for node in deadlines if node not in self.deadlines]
        self.deadlines = dict(deadlines)
        return new

    def failed(self, host: str, now: float) -> bool:
        """A worker of this host failed, or all of it did; returns whether that was once too often."""
        times = self._failed_at[host]
        times.append(now)
        while times[0] < now - self.within_s:
            times.popleft()
        if not self.failures or len(times) < self.failures:
            return False
        self.quarantined_until[host] = now + self.quarantine_s
        self.untried_until.clear()
        times.clear()
        return True

    def leave_untried(self, hosts: Collection[str], now: float) -> None:
        """No group is to be on these until one with others has done a step, or a host is in quarantine."""
        if hosts and self.failures:
            until = now + min(UNTRIED_S, self.quarantine_s)
            self.untried_until = dict.fromkeys([*self.untried_until, *hosts], until)

    def quarantined(self, now: float) -> set[str]:
        """Hosts that no group is to be on."""
        self.quarantined_until = {host: until for host, until in self.quarantined_until.items() if until > now}
        self.untried_until = {host: until for host, until in self.untried_until.items() if until > now}
        self.corrupt &= self.quarantined_until.keys()
        return self.quarantined_until.keys() | self.untried_until.keys()

    def measured(self, step_s: float, restore_s: float) -> None:
        """What the group takes for a step, and took to restore: a notice is heeded some steps after it is given."""
        self.margin_s = max(MARGIN_S, MARGIN_STEPS * step_s + restore_s)

    def leaving(self, now: float) -> set[str]:
        """Nodes that are about to be taken away, or are out of service."""
        return {node for node, at in self.deadlines.items() if now > at - self.margin_s} | self.asked

    @property
    def going(self) -> set[str]:
        """Nodes that will be taken away, sooner or later."""
        return self.deadlines.keys() | self.asked


@dataclass
class NodeFailures:
    """Counts what fails on nodes, by their hosts, and quarantines those that the others do without.

    A host that comes back has another Ray node, and what was counted of it still counts.
    """

    exclusions: Exclusions
    membership: Membership
    out: Outbox
    machines: dict[str, str] = field(default_factory=dict)  # the hosts of all nodes that workers have come from
    heard_of: set[tuple[str, int]] = field(
        default_factory=set
    )  # by node and pid, living processes that have said something
    hears_ray: bool = False  # before, what Ray Train tells may be of an earlier coordinator's time
    with_gpu_errors: dict[str, int] = field(
        default_factory=dict
    )  # nodes, and the generation: of the hardware, its last
    _failed_in: dict[str, int] = field(default_factory=dict)  # the newest generation in which a node's failure counted
    _unfit_at: dict[str, float] = field(default_factory=dict)  # by host, when one of its processes was so last

    def met(self, member: Member) -> None:
        """A process of this node has come."""
        self.machines[member.node] = member.machine or member.node
        self.heard_of.add((member.node, member.pid))

    def excluded(self, now: float) -> set[str]:
        """Nodes that no group is to be on."""
        return self._on(self.exclusions.quarantined(now)) | self.exclusions.leaving(now)

    def refused(self, now: float) -> set[str]:
        """Those that no group is to be on, however few there are."""
        self.exclusions.quarantined(now)
        return self._on(self.exclusions.corrupt) | self.exclusions.leaving(now)

    def _on(self, hosts: set[str]) -> set[str]:
        return {node for node, machine in self.machines.items() if not hosts.isdisjoint((node, machine))}

    def corrupt(self, node: str, now: float) -> list[Member]:
        """Quarantine a node's host at once, for it computed wrong; its members, which are to end."""
        host_of = self._hosts()
        host = host_of(node)
        self.exclusions.quarantined_until[host] = now + self.exclusions.quarantine_s
        self.exclusions.corrupt.add(host)
        self.out.record("quarantine", node=node, host=host, seconds=self.exclusions.quarantine_s, reason="corrupt")
        return [member for member in self._used() if host_of(member.node) == host]

    def unfit(self, event: Unfit, now: float, *, counts: bool = True) -> list[Member]:
        """`counts`: as a failure of its host. Those that are to end, as `failed` says."""
        self.out.record("unfit", node=event.node, pid=event.pid, detail=event.detail)
        self.machines.setdefault(event.node, event.machine or event.node)
        self.heard_of.add((event.node, event.pid))
        host = self._hosts()(event.node)
        if counts and now - self._unfit_at.get(host, now - TOGETHER_S) >= TOGETHER_S:
            self._unfit_at[host] = now
            return self.failed(event.node, now)
        return []

    def died(self, event: Died, now: float) -> list[Member]:
        """Of these some may have died before they joined: what starts in their places would again, elsewhere it may
        not. What goes with its node, or would have to soon, is no failure of that. Those that are to end, as `failed`
        says."""
        going = list[Member]()
        if event.cause != Cause.worker_died or not self.hears_ray or OF_NODE.search(event.detail):
            return going
        for node, pid in event.processes:
            if (node, pid) not in self.heard_of and node not in self.exclusions.going:
                said = event.detail.removeprefix(f"process {pid} on node {node[:12]}: ")
                going += self.unfit(Unfit(node, pid, f"it died before it joined: {said}"), now)
        return going

    def gpu_error(self, event: GpuError, now: float) -> list[Member]:
        """The process that meets it fails by itself, if it does. One of a GPU that no member there has is another
        run's. Those that are to end, as `failed` says."""
        self.out.record("gpu_error", node=event.node, gpu=event.gpu, xid=event.xid, meaning=event.meaning)
        members = [*self.membership.current, *self.membership.waiting.values()]
        theirs = {member.gpu_uuid for member in members if member.node == event.node}
        if event.meaning and (not event.gpu or not theirs.isdisjoint(("", event.gpu))):
            self.with_gpu_errors[event.node] = self.membership.generation
            return self.failed(event.node, now, again=False)
        return []

    def slow(self, node: str, now: float) -> None:
        """Leave a slow node, as one that is to be taken away, if spares wait for the places of its ranks."""
        quarantined = self.exclusions.quarantined(now)
        host, excluded = self._hosts()(node), self.excluded(now)
        going = [member for member in self.membership.survivors if member.node in {node, *excluded}]
        spares = [each for each in self.membership.spares if each.node not in {node, *excluded}]
        is_here = any(member.node == node for member in going)
        if host not in quarantined and is_here and len(spares) >= len(going):  # others that go have theirs
            self.exclusions.quarantined_until[host] = now + self.exclusions.quarantine_s
            self.out.record("quarantine", node=node, host=host, seconds=self.exclusions.quarantine_s, reason="slow")

    def notice(self, event: Notice, now: float) -> None:
        for node in self.exclusions.draining(event.deadlines):
            self.out.record("drain", node=node, deadline=event.deadlines[node] - event.ahead_s)

    def failed(self, node: str, now: float, *, again: bool = True, is_spared: bool = False) -> list[Member]:
        """The members of a host that is in quarantine for that, which are to end, and start elsewhere, given room.

        Not `again`: but for those that were counted in this generation, whose workers die one by one. `is_spared`: a
        host in its place is waited for where the others are too few."""
        generation = self.membership.generation
        if not again and self._failed_in.get(node) == generation:
            return []
        self._failed_in[node] = generation
        self.machines.setdefault(node, node)
        host_of = self._hosts()
        host = host_of(node)
        others = [member for member in self.membership.survivors if host_of(member.node) != host]
        is_needed = len(others) < min(self.membership.sizes) and not is_spared
        if is_needed or not self.exclusions.failed(host, now):
            return []
        self.out.record("quarantine", node=node, host=host, seconds=self.exclusions.quarantine_s)
        return [member for member in self._used() if host_of(member.node) == host]

    def hosts(self, members: Iterable[Member]) -> dict[str, str]:
        """By which these members' failures are counted, by their ids."""
        host_of = self._hosts()
        return {member.id: host_of(member.node) for member in members}

    def leave_untried(self, members: Iterable[Member], now: float) -> None:
        """These are to end, for others are tried without their hosts, but for hosts of the group that trains."""
        if hosts := set(self.hosts(members).values()):
            self.exclusions.leave_untried(hosts.difference(self.hosts(self.membership.current).values()), now)

    def _used(self) -> list[Member]:
        return [*self.membership.survivors, *self.membership.waiting.values()]

    def _hosts(self) -> Callable[[str], str]:
        """What a node's failures are counted by: its machine, or itself where others of that are in use beside it.

        Made once for all nodes: of thousands, looked for one by one, it takes seconds.
        """
        used = {each.node for each in self._used()}
        sharing = Counter(self.machines.get(node, node) for node in used)  # nodes of each machine

        def host_of(node: str) -> str:
            machine = self.machines.get(node, node)
            return node if sharing[machine] > (node in used) else machine

        return host_of

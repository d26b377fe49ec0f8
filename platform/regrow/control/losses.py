"""What is done about processes that are lost, that hang, or that have trouble of their own. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from regrow.control.arrivals import Arrivals, kind_of
from regrow.control.commands import Connect, GiveUp, Kill, Outbox, TellOver
from regrow.control.events import Broke, Died, Gone, GpuError, PortRefused, Trouble, Unfit
from regrow.control.health import Health, Suspect
from regrow.control.membership import Formation, Member, Membership
from regrow.control.nodes import NodeFailures
from regrow.control.peers import KeeperRegistry
from regrow.control.slow import Kind
from regrow.control.states import Ending, Forming, GivenUp, GroupState, LeavingGroup, Training, Waiting
from regrow.control.too_few import TooFew
from regrow.control.troubles import LOSSES, FirstSteps, Troubles
from regrow.control.verification import Finding
from regrow.record.events import Cause

REMEMBERED_S = 1200.0  # Ray Train tells of a death again and again for half as long; a pid comes round much later
SPOILT = (Cause.corrupted, Cause.nonfinite)  # the next group begins before what it has in memory
SUSPECTED = (Cause.node_silent, Cause.worker_hung, Cause.worker_died)  # of several the first is told


@dataclass
class Ended:
    """Processes, by node and pid, that Ray Train has found dead or given up, and tells of or did until lately."""

    _told_at: dict[tuple[str, int], float] = field(default_factory=dict)

    def tell(self, processes: Iterable[tuple[str, int]], now: float) -> list[tuple[str, int]]:
        """Those of these that are told of for the first time."""
        new = [each for each in processes if not self.has(each, now)]
        self._told_at |= dict.fromkeys(processes, now)
        return new

    def has(self, process: tuple[str, int], now: float) -> bool:
        return now - self._told_at.get(process, -math.inf) < REMEMBERED_S


@dataclass
class Losses:
    """The run's workers, as far as some of them are lost. `group.Group` is the rest of it."""

    membership: Membership
    nodes: NodeFailures
    health: Health
    keepers: KeeperRegistry
    out: Outbox
    in_place: bool
    too_few: TooFew
    cause: str  # of the next generation
    first_steps: FirstSteps
    arrivals: Arrivals
    state: GroupState = field(default_factory=Waiting)
    ending: Ending | None = None
    formation: Formation | None = None  # the newest
    last_failure: str = ""
    num_failures: int = 0  # groups that broke
    _failed: int = -1  # the newest generation of which a failure is told
    ended: Ended = field(default_factory=Ended)  # those that Ray Train has replaced
    processes: frozenset[tuple[str, int]] | None = None  # the only ones, where all start at once; None: not known
    turned_away: set[str] = field(default_factory=set)  # members among them that came back
    troubles: Troubles = field(default_factory=Troubles)
    expelled: set[str] = field(default_factory=set)  # members whose trouble is their own
    going: set[tuple[str, int]] = field(default_factory=set)  # node and pid of processes that leave a drained node
    _told_over: int = 0  # the newest generation whose ranks were told that it is over for one of them

    @property
    def generation(self) -> int:
        return self.membership.generation

    def enter(self, state: GroupState, now: float) -> None:
        """Go over to a state; a rank that stands still in it is found by `health`."""
        self.state = state
        if isinstance(state, Forming | Training):
            self.health.stalls.begin(now, forming=isinstance(state, Forming))
            self.out.append(Connect(self.membership.current))
        else:
            self.health.stalls.end()

    def give_up(self, message: str) -> None:
        """End the run for a reason that another attempt would meet again."""
        if not isinstance(self.ending, GivenUp):
            self.ending = GivenUp(message)
            self.health.stalls.end(for_good=True)  # its processes end, as they are told
            self.out.append(GiveUp(message))

    def died(self, event: Died, now: float) -> None:
        """Ray Train has found processes dead, or given them up."""
        gone, membership = self.ended.tell(event.processes, now), self.membership
        self.going.difference_update(event.processes)
        if not gone:  # told again
            return
        known = {(each.node, each.pid): each for each in [*membership.current, *membership.waiting.values()]}
        if event.cause == Cause.worker_hung:  # they are to go
            self.out.extend(kill(known[each]) if each in known else Kill(*each) for each in sorted(gone))
        dead = [known[each].id for each in gone if each in known]
        if self.ending is None and not any(self.keepers.is_dead(node) for node, _ in gone):
            dead += end(self, self.nodes.died(replace(event, processes=tuple(gone)), now))
        self.nodes.heard_of.difference_update(gone)
        self.troubles.forget(gone)
        self.lose(dead, event.cause, event.detail, now, left=event.left)

    def gone(self, event: Gone, now: float) -> None:
        """A keeper has seen a worker end. Ray tells later, and NCCL never of its peers."""
        self.going.discard((event.node, event.pid))
        those = self.membership.survivors if self.in_place and self.ending is None else ()  # at its end all go
        dead = [each for each in those if (each.node, each.pid) == (event.node, event.pid)]
        if dead:
            detail = f"process {event.pid} on node {event.node[:12]}: gone, says its node"
            self.lose((member.id for member in dead), Cause.worker_died, detail, now)

    def refused(self, event: PortRefused, now: float) -> None:
        """These do not come, for they are dead; Ray Train finds it later."""
        dead = [member for member in self.membership.survivors if member.id in event.member_ids]
        gone = ", ".join(f"process {member.pid} on node {member.node[:12]}" for member in dead)
        if dead and self.in_place:  # where all restart, Ray Train says why
            detail = f"{gone}: gone, its port refuses connections"
            self.lose((member.id for member in dead), Cause.worker_died, detail, now)

    def suspected(self, suspects: list[Suspect], now: float) -> None:
        """End processes that keep the others waiting; of one that is gone, or of a dark node, no more is expected."""
        ranks = {member.id: rank for rank, member in enumerate(self.membership.current)}
        for each in suspects:
            self.out.append(kill(each.member))
            if each.cause == Cause.worker_hung:
                rank = ranks.get(each.member.id)
                self.health.suspects.hung(each.member.node, each.member.pid, rank, now, each.detail)
        details = dict.fromkeys(f"node {each.member.node[:12]}: {each.detail}" for each in suspects)
        cause = min((each.cause for each in suspects), key=SUSPECTED.index)
        self.lose((each.member.id for each in suspects), cause, "; ".join(details), now)

    def broke(self, event: Broke, now: float) -> None:
        """What it says is kept for the case that all of them cannot go on."""
        if event.generation == self.generation:
            if self._failed != self.generation:  # else peers tell of it
                self.last_failure = event.detail
            if isinstance(self.state, Forming | Training):
                own = [each.id for rank, each in enumerate(self.membership.current) if rank == event.rank]
                self.first_steps.cannot_go_on(event.detail, *own)
            self._tell_over()

    def trouble(self, event: Trouble, now: float) -> None:
        """Whose it is, is known once the others of its group have come again, or said that they have it too."""
        if self._is_turned_away(event.member, now):
            return
        self.nodes.met(event.member)
        self.membership.announce(event.expected)
        self.troubles.add(event, now)
        self.last_failure = event.message
        if event.generation == self.generation:
            self._tell_over()
        if self.membership.are_all_told(self.troubles.told, event.member):  # else the next tick judges
            self._judge(now)

    def failed(
        self,
        cause: str,
        detail: str,
        ranks: Iterable[int],
        nodes: Iterable[str] = (),
        *,
        step: int | None = None,
        generation: int | None = None,
        interrupts: bool = True,
    ) -> None:
        """Record why a group broke, the newest where nothing is said, and how the GPUs of these nodes were; the next
        generation carries the first failure's cause, unless a later one explains that. `interrupts`: there was a group,
        so that this counts for how often they break, once for each."""
        nodes, broken = list(nodes), self.generation if generation is None else generation
        survivors = {each.id for each in self.membership.survivors}
        error = self.first_steps.broke(cause, survivors) if broken == self.generation else ""
        is_first, self._failed = broken != self._failed, broken
        self.num_failures += interrupts and is_first
        if is_first or not interrupts or explains(cause, self.cause):
            self.cause, self.last_failure = cause, error or detail
        gpus = {node: [str(each) for each in self.health.gpus[node]] for node in nodes if node in self.health.gpus}
        slow = {each.node for each in self.health.suspects.found.values() if each.kind is Kind.slow_link}
        kind = kind_of(cause, detail, nodes, is_dead=self.keepers.is_dead, failures=self.nodes, slow_links=slow)
        fields = {"cause": cause, "detail": detail, "ranks": list(ranks), "generation": broken, "nodes": nodes}
        more = {"kind": str(kind)} | ({"gpus": gpus} if gpus else {}) | ({"step": step} if step is not None else {})
        is_loss = cause not in LOSSES and broken == self.generation and self.first_steps.is_loss
        self.out.record("failure", **fields, **more, **({"is_loss": True} if is_loss else {}))

    def tick(self, now: float) -> None:
        self._judge(now)
        if isinstance(self.state, Training):
            end_drained(self, now)
        overdue = self.first_steps.overdue(now) if isinstance(self.state, Forming | Training) else frozenset()
        if late := [member for member in self.membership.survivors if member.id in overdue]:
            self.out.extend(kill(member) for member in late)
            detail = f"no first step within {self.first_steps.patience_s:.0f} s of a group with newcomers, ended"
            self.lose((member.id for member in late), Cause.worker_hung, detail, now)
        if why := self.too_few.tick(lambda: self.membership.num_left, self.nodes.exclusions.going, now):
            self.give_up(why)

    def lose(
        self,
        member_ids: Iterable[str],
        cause: str,
        detail: str,
        now: float,
        *,
        left: int | None = None,
        counts: bool = True,
        interrupts: bool = True,
    ) -> None:
        """Processes are gone: the other members of the group, which may wait for them in a collective, are told.

        `counts`: as failures of their hosts, whose other processes go with them where that was once too often.
        """
        lost = self.membership.died(member_ids, left=left)
        for node in dict.fromkeys(member.node for member in lost if counts):
            lost += self.membership.died(end(self, self.nodes.failed(node, now, again=False)))
        self.arrivals.lost(lost, now)
        self.count_left(now)
        if not lost:
            return
        gone = {member.id for member in lost}
        ranks = [rank for rank, member in enumerate(self.membership.current) if member.id in gone]
        self.failed(cause, detail, ranks, dict.fromkeys(member.node for member in lost), interrupts=interrupts)
        self.health.lost(lost)
        if not isinstance(self.state, LeavingGroup):
            self.enter(Waiting(), now)
        self._tell_over()

    def _judge(self, now: float) -> None:
        """Errors that all ranks have end the run; the others cost their own process."""
        if self.troubles.told and self.ending is None:
            starts = self.formation is None or not self.in_place
            message, own = self.troubles.verdict(self.membership, starts=starts, now=now)
            if message:
                self.give_up(message)
            for each in own:
                del self.troubles.told[each.member.id]
            self._expel({each.member: each.message for each in own}, now)

    def _expel(self, why: Mapping[Member, str], now: float, *, counts: bool = True) -> None:
        """These processes end once they hear of it; they are started anew, elsewhere if that `counts` again and again.
        Those of a group break it once."""
        membership, others = self.membership, list[Member]()
        for member, detail in why.items():
            self.expelled.add(member.id)
            membership.turn_away(member.id)
            if not membership.current:
                membership.expected = max(1, membership.expected - 1)
            others += self.nodes.unfit(Unfit(member.node, member.pid, detail), now, counts=counts)
        members = {each.id for each in membership.current}  # with ports, which one that has trouble does not tell
        inside = {member.id: detail for member, detail in why.items() if member.id in members}
        if inside and self.in_place:
            detail = "; ".join(dict.fromkeys(inside.values()))
            self.lose([*inside, *end(self, others)], Cause.worker_failed, detail, now)
        elif inside:  # Ray Train finds them dead
            self.troubles.own = self.troubles.own or next(iter(inside.values()))
            self.first_steps.broke(Cause.worker_failed, {each.id for each in membership.survivors})
        else:
            end_quarantined(self, others, "; ".join(why.values()), now)

    def expel_corrupt(self, found: Finding, detail: str, now: float) -> None:
        """The hosts of these members are given up at once; the state that they have spoilt is the caller's to drop."""
        nodes = dict.fromkeys(member.node for member in found.members)
        going = {member.id: member for node in nodes for member in self.nodes.corrupt(node, now)}
        self.lose(end(self, going.values()), Cause.corrupted, detail, now, counts=False)

    def count_left(self, now: float) -> None:
        """Where all restart, Ray Train counts."""
        if not self.in_place:
            self.too_few.restarts(now)
            return
        self.too_few.count(self.membership.num_left, now, deciding=min(self.membership.deciding, default=0))

    def _tell_over(self) -> None:
        """Once a generation: all of its ranks say so in the end."""
        if self._told_over < self.generation:
            self._told_over = self.generation
            nodes = self.keepers.known_of(member.node for member in self.membership.current)
            self.out.append(TellOver(self.generation, nodes))

    def _is_turned_away(self, member: Member, now: float) -> bool:
        process = (member.node, member.pid)
        is_left_over = self.processes is not None and process not in self.processes
        if not (is_left_over or self.ended.has(process, now)):
            return False
        self.turned_away.add(member.id)
        self.out.append(kill(member))
        return True


def explains(cause: str, told: str) -> bool:
    """Whether a later failure of a group says more of why it broke than the cause that is told."""
    return (cause not in LOSSES and told in LOSSES) or (cause in SPOILT and told not in SPOILT)


def kill(member: Member) -> Kill:
    return Kill(member.node, member.pid, member.started)


def end(group: Losses, members: Iterable[Member]) -> list[str]:
    """Have these end, to be started elsewhere; their ids, which are as good as lost."""
    ids = list[str]()
    for member in members:
        group.expelled.add(member.id)
        group.out.append(kill(member))
        ids.append(member.id)
    return ids


def unfit(group: Losses, event: Unfit, now: float) -> None:
    end_quarantined(group, group.nodes.unfit(event, now), event.detail, now)


def gpu_error(group: Losses, event: GpuError, now: float) -> None:
    why = f"Xid {event.xid} of {event.gpu}, {event.meaning}"
    end_quarantined(group, group.nodes.gpu_error(event, now), why, now)


def end_quarantined(group: Losses, members: Collection[Member], why: str, now: float, *, cause: str = "") -> None:
    """A host is in quarantine, and these are on it. `cause`: that of the group before, where that is why."""
    if members:
        detail = f"node {', '.join(dict.fromkeys(each.node[:12] for each in members))} is in quarantine: {why}"
        cause, interrupts = cause or Cause.worker_died, not cause
        group.lose(end(group, members), cause, detail, now, counts=False, interrupts=interrupts)


def end_drained(group: Losses, now: float) -> None:
    """A group trains: what waits on nodes that are out of service, or in quarantine, ends, and is started elsewhere,
    given room."""
    exclusions, waiting = group.nodes.exclusions, group.membership.waiting.values()
    barred = exclusions.asked | (set() if group.too_few.yields(now) else exclusions.quarantined(now))
    for member in [each for each in waiting if not barred.isdisjoint((each.node, each.machine))]:
        group.expelled.add(member.id)
        group.going.add((member.node, member.pid))
        group.membership.turn_away(member.id)

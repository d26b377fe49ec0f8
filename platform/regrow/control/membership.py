"""Which processes train: they join, die, come back; each change is another generation. Pure; time is an argument.

A generation forms as soon as every living member of the one before has joined again, with what else has come by
then; a death while it forms voids it, and the next one forms. A member that does not come within `patience_s` is left
out.
Members on nodes that are avoided wait, as do those that no allowed size has room for, unless it does not go without.
Newcomers whose first group broke before its first step wait, too, until the others have done one without them.
Where ranks share a block's arithmetic, a unit of them is on one node: a process without room in a whole one waits.
At the start it waits as long for as many as were announced. Where none is left of the one before, and where a group
could be larger, it waits until no other has come for `settle_s`; a larger one, which costs a stop of all, also for
workers that were started and have not joined yet, for `announced_s`. Where more ranks would take none of the slices of
those that have most, a step would take as long as before: nothing is stopped for that, and they wait as spares. By
`fewest` a group that forms leaves such ranks out, too: the next one takes them in where it has lost others.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regrow.plan.tree import parent_of

LAST_CALL_S = 1.0  # for members that are late: their calls may wait where the coordinator has not answered for a while
NODE_NAME = "REGROW_NODE_NAME"  # environment: the host's name, where a process would see that of a pod
ENDS_WITH_JOB = "REGROW_CLUSTER_ENDS_WITH_JOB"  # environment of a driver: set where its Ray cluster ends with its job


@dataclass(frozen=True)
class Member:
    """One worker process, as it offers itself for one generation."""

    id: str  # of the process: the same for as long as it lives
    node: str
    host: str  # where its store listens, at which groups meet whose first rank it is
    port: int
    pid: int
    lifeline: int = 0  # the port at which the process listens while it lives; 0: nowhere
    gpu: int = 0  # its number among the node's; 0 on CPUs
    machine: str = ""  # the host's name, which outlives its Ray node
    started: int = 0  # of the process, as its kernel counts; 0: not known
    control: int = 0  # the port at which it takes those below it in the tree of small values
    gpu_uuid: str = ""  # as NVML tells of its errors; empty: not known


@dataclass(frozen=True)
class Seat:
    """What one member is told of its generation. It hears of the others by way of rank 0: thousands that were told of
    thousands would keep the coordinator busy for longer than all else."""

    generation: int
    rank: int
    size: int
    secret: bytes  # by which members know each other
    parent: tuple[str, int] | None  # where the rank above it in the tree of small values listens; None: it is rank 0
    members: tuple[Member, ...] = ()  # for rank 0


@dataclass(frozen=True)
class Formation:
    """A generation: its members in the order of their ranks."""

    generation: int
    members: tuple[Member, ...]

    def rank_of(self, member_id: str) -> int | None:
        """None for one that is to wait: no size that is allowed has a place for it."""
        return self._ranks.get(member_id)

    def seat_of(self, rank: int, secret: bytes) -> Seat:
        above = self.members[parent_of(rank)] if rank else None
        return Seat(
            self.generation,
            rank,
            len(self.members),
            hashlib.sha256(secret + self.generation.to_bytes(8)).digest(),
            (above.host, above.control) if above is not None else None,
            () if rank else self.members,
        )

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {member.id: rank for rank, member in enumerate(self.members)}


@dataclass
class Membership:
    """The state of a run's membership. `sizes` are how many ranks may be there, in whole units of `unit` ranks.

    `fewest`: for some of them a smaller world size that is taken in their place. `step_costs` are how long a step of
    each world size takes, next to the others; none: each of `sizes` is one, and any larger group is faster.
    `configured` are world sizes with the pipelines that were asked for, where others have not: a group grows to them
    from others whatever a step takes.
    """

    sizes: Sequence[int]
    unit: int = 1
    step_costs: Mapping[int, float] = field(default_factory=dict)
    fewest: Mapping[int, int] = field(default_factory=dict)
    configured: Collection[int] = ()
    settle_s: float = 2.0
    patience_s: float = 120.0
    announced_s: float = 60.0
    generation: int = 0
    current: tuple[Member, ...] = ()
    waiting: dict[str, Member] = field(default_factory=dict)
    expected: int = 1  # announced for a start from nothing, and not lost since
    avoided: set[str] = field(default_factory=set)  # nodes
    held_back: set[str] = field(default_factory=set)  # newcomers whose first group broke
    their_nodes: set[str] = field(default_factory=set)  # on which others wait, but none that have done steps
    deciding: Collection[int] = ()  # world sizes that a group may have to tell which unit computes wrong; none: any
    differing: Collection[str] = ()  # members of which one computes wrong: others are left out before them
    placed: dict[str, int] = field(default_factory=dict)  # by node, workers that live there or start
    spares: tuple[Member, ...] = ()  # that wait, as a group with them would take as long for a step, or be too large
    over_since: float | None = None  # when a coordinator found the group broken that another one had left
    left_out: list[Member] = field(default_factory=list)  # since this was last read: they live, and say nothing
    _living: dict[str, Member] = field(default_factory=dict)  # members of the current group, in order of their ranks
    _absent: dict[str, Member] = field(default_factory=dict)  # those of them that do not wait
    _first_at: float = 0.0  # of those waiting that the group is formed of: members of the current one, if any live
    _last_at: float = 0.0
    _late_at: float | None = None  # when it was first seen that members are
    _broke: bool = False  # `is_breaking`, and since `_first_at`
    _announced: int = 0  # the most that were, since all were started anew
    _could_grow_at: float | None = None  # since when a larger group could be formed

    def join(self, member: Member, *, expected: int, now: float) -> None:
        """A process is ready for the next generation; one that waits already may say so again. One that was given up
        for dead comes as a newcomer."""
        if self.waiting.get(member.id) != member:
            self._last_at = now
        self.announce(expected)
        self.waiting[member.id] = member
        self._absent.pop(member.id, None)
        if not self._broke and self.is_breaking:
            self._broke, self._first_at, self._late_at = True, now, None

    def turn_away(self, member_id: str) -> None:
        """A process does not wait any more: it is to end, and has not yet."""
        self.waiting.pop(member_id, None)
        if member_id in self._living:
            self._absent[member_id] = self._living[member_id]

    def take_up(self, members: tuple[Member, ...]) -> None:
        """These are the current group from here on."""
        self.current = members
        self._living = {member.id: member for member in members}
        self._absent = {name: member for name, member in self._living.items() if name not in self.waiting}

    def announce(self, expected: int) -> None:
        """So many processes start together: a start from nothing waits for them, but for those that are lost since."""
        if not self.current and expected > self._announced:
            self.expected = self._announced = expected

    def died(self, member_ids: Iterable[str], *, left: int | None = None) -> list[Member]:
        """These processes are gone; those of them that were members of the current generation.

        `left` is how many there are still, where that is known, the ones included that have not joined yet.
        """
        gone = set(member_ids)
        self.expected = self.expected if left is None else left
        lost = [member for member_id, member in self._living.items() if member_id in gone]
        for member_id in gone:
            for those in (self.waiting, self._living, self._absent):
                those.pop(member_id, None)
        self._broke = self._broke and self.is_breaking
        return lost

    def dissolve(self) -> None:
        """All processes are ended, to be started anew: none is waited for."""
        self.take_up(())
        self._broke, self._announced, self.over_since = False, 0, None
        self.waiting.clear()

    @property
    def survivors(self) -> list[Member]:
        return list(self._living.values())

    @property
    def num_left(self) -> int:
        """Of the current group, in whole units; before there is one, of those that start."""
        return len(self._in_units(self._living.values())) if self.current else self.expected

    @property
    def is_breaking(self) -> bool:
        """Whether the current group is over for some of it; without one, whether a process waits for the next."""
        return len(self._absent) < len(self._living) if self._living else bool(self.waiting)

    @property
    def without_unit(self) -> list[Member]:
        """Those that wait because too few of their node do."""
        whole = {member.id for member in self._in_units(self.waiting.values())}
        return [member for member in self.waiting.values() if member.id not in whole]

    @property
    def missing(self) -> list[Member]:
        """Members of the current group that are not known to be dead, while others of it wait for the next one."""
        return list(self._absent.values())

    def are_all_told(self, told: Collection[str], member: Member) -> bool:
        """Whether as many members have said something as are missing, this one the last, or it is none of them. Quick:
        thousands may say so."""
        return len(told) >= len(self._absent) or member.id not in self._living

    def must_wait(self, now: float) -> bool:
        """Whether members of the group before, or others that were announced, may still come. Quick: thousands ask."""
        if self._absent:
            since = self._first_at if self.is_breaking else self.over_since
            return since is None or now - since < self.patience_s
        if not self._living and len(self.waiting) < self.expected and now - self._first_at < self.patience_s:
            return True
        # those that take the places of the dead come one after another
        return bool(self.current) and not self._living and now - self._last_at < self.settle_s

    def may_come(self, now: float, *, but_for: Collection[str]) -> bool:
        """Whether some are waited for, or members without these have their last call. `form` begins that."""
        is_last_call = self._late_at is None or now - self._late_at < LAST_CALL_S
        return self.must_wait(now) or (is_last_call and not self._absent.keys() <= {*but_for})

    def wants_to_grow(self, now: float) -> bool:
        """Whether those that wait, and have stopped coming, make a larger and faster group than the current one."""
        if not self.waiting:
            self.spares = ()
        if not self.waiting or now - self._last_at < self.settle_s:
            return False
        all_members = {member.id: member for member in [*self.survivors, *self.waiting.values()]}
        size, now_size = self._size(self._welcome(all_members.values())), len(self.current)
        is_larger = size > now_size
        is_worth_it = is_larger and (not now_size or self._is_better(size, now_size))
        self.spares = () if is_worth_it else self._left_over()
        if not is_worth_it:
            self._could_grow_at = None
            return False
        since = self._could_grow_at = now if self._could_grow_at is None else self._could_grow_at
        here = Counter(member.node for member in all_members.values())
        placed = {node: count for node, count in self.placed.items() if node not in self.avoided}
        still_starting = any(here[node] < count for node, count in placed.items())
        return not still_starting or now - since > self.announced_s

    @property
    def could_grow(self) -> bool:
        """Whether those that wait were found to make a faster group, for which others may be waited for."""
        return self._could_grow_at is not None

    def wants_to_leave_nodes(self) -> bool:
        """Whether the current group is on a node to be avoided, and can do without."""
        staying = {member.id: member for member in self._welcome(self.survivors)}
        rest = {member.id: member for member in self._welcome(self.waiting.values())}
        return len(staying) < len(self.survivors) and self._size((staying | rest).values()) > 0

    def could_form_without(self, nodes: Collection[str]) -> bool:
        """Whether those that are left, and those that wait, would be enough for a group."""
        all_members = {member.id: member for member in [*self.survivors, *self.waiting.values()]}
        return self._size(member for member in all_members.values() if member.node not in nodes) > 0

    @property
    def has_others(self) -> bool:
        """Whether a group can be formed of those that wait without any that are held back, that wait on their nodes, or
        on nodes to be avoided."""
        return self._size(self._apart(self.waiting.values())) > 0

    def form(self, now: float) -> Formation | None:
        """The next generation, if it can be formed now."""
        if not self.waiting or self.must_wait(now):
            return None
        missing = self.missing
        self._late_at = (now if self._late_at is None else self._late_at) if missing else None
        if self._late_at is not None and now - self._late_at < LAST_CALL_S:
            return None
        if missing:
            self.left_out += missing
            self.died(member.id for member in missing)
            if self.must_wait(now):
                return None
        candidates = self._in_order()
        choices = (self._apart(candidates), self._welcome(candidates), candidates)
        candidates = next((each for each in choices if self._size(each)), [])
        size = self._size(candidates)
        if not size:
            return None
        chosen = self._in_units(candidates)[:size]
        self.generation += 1
        for member in chosen:
            del self.waiting[member.id]
        self.take_up(tuple(_node_by_node(chosen)))
        self._first_at, self._broke, self.over_since = now, False, None
        self._could_grow_at, self.spares = None, self._left_over()
        return Formation(self.generation, self.current)

    def _left_over(self) -> tuple[Member, ...]:
        """Those that wait and could be in a group, in whole units."""
        return tuple(self._in_units(self._welcome(self.waiting.values())))

    def _welcome(self, members: Iterable[Member]) -> list[Member]:
        return [each for each in members if each.node not in self.avoided and each.id not in self.held_back]

    def _apart(self, members: Iterable[Member]) -> list[Member]:
        return [each for each in self._welcome(members) if each.node not in self.their_nodes]

    def _size(self, members: Iterable[Member]) -> int:
        """Of the largest group that these can form, or of the one in its place; 0: none."""
        count = len(self._in_units(members))
        sizes = (size for size in self.deciding or self.sizes if size <= count and size % self.unit == 0)
        largest = max(sizes, default=0)
        fewest = self.fewest.get(largest, largest)
        return largest if self.deciding and fewest not in self.deciding else fewest

    def _is_better(self, size: int, than: int) -> bool:
        """Whether a step takes less time in a larger group of this size, as far as is known, or it is laid out as
        asked for."""
        costs = self.step_costs
        if size in self.configured and than not in self.configured:
            return True
        return size not in costs or than not in costs or costs[size] < costs[than] - 1e-9

    def _in_units(self, members: Iterable[Member]) -> list[Member]:
        """Those that make up whole units, in the order of the units' first members."""
        if self.unit == 1:
            return list(members)
        units: dict[tuple[str, int], list[Member]] = {}
        so_far: Counter[str] = Counter()
        for member in members:
            units.setdefault((member.node, so_far[member.node] // self.unit), []).append(member)
            so_far[member.node] += 1
        return [member for unit in units.values() if len(unit) == self.unit for member in unit]

    def _in_order(self) -> list[Member]:
        """Those that wait, survivors first, in the order of their ranks: what they hold moves least."""
        survivors = [self.waiting[member.id] for member in self.survivors if member.id in self.waiting]
        survivors.sort(key=lambda member: member.id not in self.differing)
        known = {member.id for member in survivors}
        return survivors + [member for member_id, member in self.waiting.items() if member_id not in known]


def _node_by_node(members: Sequence[Member]) -> list[Member]:
    """Ranks of a node stand together, by their GPUs; nodes in the order of their first.

    Which of a node's ranks holds what moves nothing between nodes, as all of them read its memory. Which ranks of two
    nodes meet in a replica group decides whether what they send stays on one rail.
    """
    nodes = {node: at for at, node in enumerate(dict.fromkeys(member.node for member in members))}
    return sorted(members, key=lambda member: (nodes[member.node], member.gpu))

"""Whose trouble it is: the run's, or that of one process or newcomer, which the others then do without. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.control.events import Trouble
from regrow.control.membership import Membership
from regrow.control.phases import form_s
from regrow.plan.topology import Table
from regrow.record.events import Cause

OTHERS_S = 10.0  # for the other ranks of a group to say whether they have an error too, or to come again
FIRST_STEPS = 4.0  # a group with newcomers may form so many times the longest, or as long as its ranks may take to meet
# (`phases.form_s`), apart from what has limits of its own (`phases.OWN_LIMITS`), and as long take for its first step
MAX_FAILED_GENERATIONS = 3  # in a row, without finishing a step, before the run is given up
# groups in a row that broke with newcomers of several hosts, no newcomer alone having had an error of its own, until
# all of these hosts count a failure: one of a thousand is found by as many halvings
MAX_UNEXPLAINED = 10
MAX_REPEATED = 7  # groups in a row that break by an error, none of which has got beyond the ones before
LOSSES = (Cause.worker_died, Cause.worker_hung, Cause.node_silent)  # which hosts cause, too: three count as one error
ERROR, LOSS = 3, 1


@dataclass
class Troubles:
    """Errors that processes would meet again, until it is known whose they are."""

    told: dict[str, Trouble] = field(default_factory=dict)  # by member
    own: str = ""  # what the newest group's first was that was its process' own, and of which Ray Train does not know
    _since: float = 0.0

    def add(self, trouble: Trouble, now: float) -> None:
        self._since = self._since if self.told else now
        self.told[trouble.member.id] = trouble

    def forget(self, gone: Collection[tuple[str, int]]) -> None:
        """These processes, by node and pid, have ended."""
        self.told = {name: each for name, each in self.told.items() if (each.member.node, each.member.pid) not in gone}

    def clear(self, cause: str, detail: str) -> tuple[str, str]:
        """All processes have, by what Ray Train says; cause and detail by what they told."""
        told, own, self.told, self.own = list(self.told.values()), self.own, {}, ""
        return (Cause.worker_failed, own) if own else (cause, told[0].message if told else detail)

    def verdict(self, membership: Membership, *, starts: bool, now: float) -> tuple[str, list[Trouble]]:
        """The error that is the run's, or empty; those that are their processes' own. Neither while that is open.

        `starts`: no group has been formed yet, and what all have that come is the run's.
        """
        told, waited_s = list(self.told.values()), now - self._since
        survivors = membership.survivors
        if not survivors:
            if membership.waiting or not starts:
                return "", told
            all_have_it = len(told) >= membership.expected or waited_s > membership.patience_s
            return (self._most_told(told) if all_have_it else ""), []
        inside = [self.told[member.id] for member in survivors if member.id in self.told]
        ids = {each.member.id for each in inside}
        outside = [each for each in told if each.member.id not in ids]
        if inside and len(inside) == len(membership.current):
            return self._most_told(inside), outside
        is_open = any(member.id not in self.told for member in membership.missing)
        return "", outside if is_open and waited_s <= OTHERS_S else told

    def _most_told(self, told: Iterable[Trouble]) -> str:
        return Counter(each.message for each in told).most_common(1)[0][0]


@dataclass
class FirstSteps:
    """Groups that break before they have done a step, or a step that none had done; newcomers that may be why."""

    timeout_s: float  # of a collective
    failed: int = 0  # of groups in a row without a step: ERROR or LOSS each; see `formed` and `broke`
    repeated: int = 0  # groups that broke by an error after steps that had been done before; see `_erred`
    error: str = ""  # of the newest group's ranks the first that had one; empty: none has, or it is known why
    proven: frozenset[str] = frozenset()  # members that have done a step together
    new: frozenset[str] = frozenset()  # the newest group's others, where it has proven ones
    compiles: bool = False  # newcomers do in their first step: `runtime.warm_up` cannot before
    topologies: Table = field(default_factory=dict)  # where blocks are compiled, for each number of slices of a pass
    verifies: bool = False  # a first step has a pass more, of as many slices as any has
    is_watched: bool = False  # keepers of the newest group tell what its ranks do
    _members: frozenset[str] = frozenset()  # of the newest group
    _hosts: Mapping[str, str] = field(default_factory=dict)  # of those, and of `_held_back`
    _own: frozenset[str] = frozenset()  # of its members, those that had errors of their own
    _held_back: frozenset[str] = frozenset()  # the newest group was formed without them
    _to_blame: frozenset[str] = frozenset()  # of these, as `newcomers_to_blame` said
    _unexplained: int = 0  # groups in a row that broke with newcomers of several hosts, none of which is to blame
    _start: int = 0  # the step from which the newest group began that did
    _step: int = 0  # the newest one that the newest group has done, if that is a later one
    _broke_at: int = 0  # the newest one that any of the `repeated` has done
    _starts: range = range(0)  # from the first to the last step from which those began
    _has_repeated: bool = False  # the newest group is one of them
    _counts: int = 0  # how much it does, unless it does a step
    _is_error: bool = False  # it broke by one, whatever has been lost of it since
    _since: float | None = None  # when it was last seen to get on; None: it has done a step, or there is none
    _trains: bool = False  # it does its first step, else it forms
    _took_s: float = 0.0  # the longest that it did not get on, in what it does
    _longest_s: dict[bool, float] = field(default_factory=dict)  # the same of all groups, by `_trains`
    _passes: Mapping[str, frozenset[int]] = field(default_factory=dict)  # by member of the newest group, slices of each
    _compiled: dict[str, frozenset[int]] = field(default_factory=dict)  # by member, of these what it has compiled for
    _compile: bool = False  # some of the newest group may in its first step
    _not_formed: int = 0  # in a row: all processes ended by an error before a group was formed of them

    def formed(self, hosts: Mapping[str, str], held_back: frozenset[str], now: float) -> bool:
        """A group tries, and counts until it has done a step, but for one of fewer members of the one before; one that
        had done steps counts where it broke by an error. False where too many have failed in a row. `hosts` are by
        member, in the order of their ranks."""
        if self.error:
            self._erred()
        members = frozenset(hosts)
        self._to_blame = (self._to_blame | self.newcomers_to_blame()) & held_back
        self._hosts = {each: host for each, host in self._hosts.items() if each in held_back} | dict(hosts)
        self._own = frozenset()
        self.error, self._has_repeated, self._is_error, self._step = "", False, False, self._start
        self._counts = 0 if members < self._members else ERROR
        self.failed += self._counts
        self._not_formed = 0
        self.new = members - self.proven if members & self.proven else frozenset()
        self._members, self._held_back = members, held_back - members
        self._since, self._trains, self._took_s, self.is_watched = now, False, 0.0, False
        self._plan_passes(tuple(hosts))
        return self.failed <= MAX_FAILED_GENERATIONS * ERROR and self.repeated < MAX_REPEATED

    def _plan_passes(self, members: Sequence[str]) -> None:
        """Where blocks are compiled, the warm-up of what has done no step has for as many slices as any pass has."""
        topology = self.topologies.get(len(members))
        if topology is None:
            self._passes, self._compile = {}, False
            return
        most = frozenset({topology.batch.most_slices_of_a_pass})
        also = most if self.verifies else frozenset()
        self._passes = {each: topology.passes_of(rank) | also for rank, each in enumerate(members)}
        known = {each: self._compiled[each] for each in self._members | self.proven if each in self._compiled}
        self._compiled = {each: most for each in members if each not in self.proven} | known
        self._compile = any(map(self.may_compile, members))

    def may_compile(self, member: str) -> bool:
        """Whether this one of the newest group does in its first step, be it alone, as far as is known."""
        passes = self._passes.get(member)
        if passes is None:  # another coordinator has formed the group, if blocks are compiled
            return bool(self.topologies)
        return (self.compiles and member in self.new) or not passes <= self._compiled.get(member, frozenset())

    def _erred(self) -> None:
        """The newest group broke by an error, of one rank or more; without a step it is among those that `failed`.

        It repeats no other where the run has gone back and it came to none of the steps from which those began.
        """
        if self._step <= self._start or self._has_repeated:
            return
        if self.repeated == 0 or self._step <= self._starts.start:
            self.repeated, self._broke_at, self._starts = 0, 0, range(self._start, self._start)
        self.repeated, self._has_repeated = self.repeated + 1, True
        self._broke_at = max(self._broke_at, self._step)
        self._starts = range(min(self._starts.start, self._start), max(self._starts.stop, self._start))

    def set_back(self, now: float) -> None:
        """A rank of the newest group is in a phase that has limits of its own: the group's time begins anew."""
        if self._since is not None:
            self._took_s, self._since = max(self._took_s, now - self._since), now

    def began(self, start_step: int, now: float) -> None:
        """The newest group trains: its first step after this one."""
        self._start = self._step = start_step
        if self._since is not None:
            self._learn(now - self._since)
            self._since, self._trains, self._took_s = now, True, 0.0

    def _learn(self, newest_s: float) -> None:
        self._longest_s[self._trains] = max(self._longest_s.get(self._trains, 0.0), self._took_s, newest_s)

    def all_ended(self) -> None:
        """All processes have, so that a group has none of these newcomers to do without."""
        self.new = self._own = self._held_back = self._to_blame = frozenset()

    def not_formed(self, cause: str) -> bool:
        """All processes have ended, and no group was formed of them; whether errors did that too often in a row."""
        self._not_formed += cause == Cause.worker_failed
        return self._not_formed >= MAX_FAILED_GENERATIONS

    def broke(self, cause: str, survivors: Collection[str]) -> str:
        """The newest group has, whether it had done a step or not. The error of its ranks, where one that had its own
        is no survivor: some leave a device that answers no more, so that the process ends itself."""
        error = self.error if not self._own <= {*survivors} else ""
        if cause == Cause.worker_failed or error:
            self._erred()
        self._is_error, self.error = self._is_error or cause == Cause.worker_failed, ""
        if cause in LOSSES and not self._is_error:
            self.counts_as_loss()
        return error

    def counts_as_loss(self) -> None:
        """The newest group, if it broke before a step: a host is why, and another one may take its place."""
        if self._since is not None and self._counts == ERROR:
            self.failed, self._counts = self.failed - ERROR + LOSS, LOSS

    @property
    def is_loss(self) -> bool:
        """Whether the newest group counts as one that broke by a host."""
        return self._counts == LOSS

    def cannot_go_on(self, error: str, *own: str) -> None:
        """A rank of the newest group, by this error; the member whose own that is, where it is one's own."""
        self.error, self._own = self.error or error, self._own | {*own}

    def _unfit(self, without: frozenset[str]) -> dict[str, bool]:
        """Of those that broke groups which do without them: which are to end, and whether that counts as a failure of
        their hosts. Where it is open whose error it was, half of the hosts are tried without the others."""
        if to_blame := self._to_blame & without:
            return dict.fromkeys(to_blame, True)
        hosts = list(dict.fromkeys(host for each, host in self._hosts.items() if each in without))
        if len(hosts) <= 1 or self._unexplained >= MAX_UNEXPLAINED:
            return dict.fromkeys(without, True)
        self._unexplained += 1
        half = hosts[(len(hosts) + 1) // 2 :]
        return dict.fromkeys((each for each in without if self._hosts[each] in half), False)

    def stepped(self, step: int, now: float) -> Mapping[str, bool]:
        """The newest group has done this step; of those that it was formed without, as they had broken the one before,
        which are to end, and whether that counts.

        A step from later than all of the `repeated` began from is as good as a new one; to go on from an earlier
        snapshot than the last is nothing new."""
        if step > self._broke_at or (self._start > self._starts.stop and step > self._start):
            self.repeated = 0
        self._step, self.failed = max(step, self._step), 0
        if self._since is None:
            return {}
        self._learn(now - self._since)
        self._since = None
        self._compiled |= {each: self._compiled.get(each, passes) | passes for each, passes in self._passes.items()}
        self._unexplained = 0 if self.new else self._unexplained
        without, self._held_back = self._held_back, frozenset()
        self.proven, self.new = self._members, frozenset()
        return self._unfit(without)

    def newcomers_to_blame(self) -> frozenset[str]:
        """All on hosts of ranks that had errors of their own; none where a rank that is no newcomer had one, too."""
        hosts = {self._hosts[each] for each in self._own} if self._own <= self.new else set()
        return frozenset(each for each in self.new if self._hosts[each] in hosts)

    def held_back(self, *, lost: bool) -> frozenset[str]:
        """Those that a group in place of the newest one does without, if it can; `lost`: a member of that was."""
        if self._since is None or lost:
            return self._held_back
        if not self.new:  # it broke without them, too
            return frozenset()
        is_first = not self._held_back  # a second one does without all of them: not each is tried
        return self._held_back | ((is_first and self.newcomers_to_blame()) or self.new)

    def hosts(self, members: Collection[str]) -> set[str]:
        """Of members of the newest group, and of those that it was formed without."""
        return {self._hosts[each] for each in members}

    @property
    def patience_s(self) -> float:
        """With a group of newcomers that forms, then with its first step, phases with limits of their own apart."""
        if (self._trains and self._compile) or not self.is_watched or self._trains not in self._longest_s:
            return self.timeout_s
        usual_s = FIRST_STEPS * self._longest_s[self._trains]
        return min(self.timeout_s, max(form_s(len(self._members), self.timeout_s), usual_s))

    def overdue(self, now: float, share: float = 1.0) -> frozenset[str]:
        """Newcomers with which a group has not got on within a share of the patience with it."""
        late = self._since is not None and now - self._since > share * self.patience_s
        return self.new if late else frozenset()

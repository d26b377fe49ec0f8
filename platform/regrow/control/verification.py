"""Silent corruption: whether units that computed the same came to the same, which of them is the odd one, and up to
which step the state is verified. Pure.

In a verification, in step N, every unit computes the same micro-batch with the weights of step N - 1. A unit *passes*
where its checksums are those of most units of its kind of device; one that is alone of its kind is taken on trust.
What computes wrong is taken to go on doing so: a unit that passes in step N has computed right up to the end of step
N - 1. A state of step S is *verified* once all units of the group that trains have passed in a step after S.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.control.membership import Member

PER_UNIT = 3  # numbers of a unit: its kind of device, the checksums of its loss and of its gradients
LOSS, GRADIENTS = "loss", "gradients"
AGAIN = 2  # verifications more, in steps right after one in which units differ
CONFIRMED = 2  # verifications in which a unit was the odd one, or units differed


@dataclass(frozen=True)
class Outcome:
    """Of a verification. A unit that is in none of these passes."""

    num_units: int
    odd: tuple[int, ...] = ()  # units that differ from most others of their kind
    undecided: tuple[int, ...] = ()  # units among which there is no majority: some compute wrong
    alone: tuple[int, ...] = ()  # units of a kind that no other unit has
    compared: tuple[str, ...] = (LOSS, GRADIENTS)

    @property
    def differs(self) -> bool:
        return bool(self.odd or self.undecided)


@dataclass
class Checks:
    """Those of one group: when one is due, and what it came to. The same on all of its ranks."""

    every_steps: int  # 0: never
    num_units: int  # one alone is compared with none
    first_step: int  # a group begins with one: newcomers are looked at before much is built on what they compute
    last_step: int
    gradients_agree: bool = False  # those of all units of a kind have: its kernels can be compared
    _again: int = 0
    _repeated: set[int] = field(default_factory=set)  # steps

    def is_due(self, step: int) -> bool:
        """Whether the step that is about to be launched verifies. To be asked once a step."""
        if not self.every_steps or self.num_units < 2:
            return False
        if self._again:
            self._again -= 1
            self._repeated.add(step)
            return True
        return step in (self.first_step, self.last_step) or step % self.every_steps == 0

    def judge(self, step: int, slots: Sequence[float]) -> Outcome:
        """What the numbers of all units say, PER_UNIT each, unit by unit."""
        units: dict[int, list[int]] = {}  # by kind
        for unit in range(self.num_units):
            units.setdefault(int(slots[PER_UNIT * unit]), []).append(unit)
        found = [_odd_ones({unit: slots[PER_UNIT * unit + 1] for unit in each}) for each in units.values()]
        gradients = [_odd_ones({unit: slots[PER_UNIT * unit + 2] for unit in each}) for each in units.values()]
        is_known = all(not undecided for _, undecided in gradients)  # else their kernels may add in any order
        self.gradients_agree = self.gradients_agree or is_known
        if self.gradients_agree:
            found += gradients
        undecided = {unit for _, several in found for unit in several}
        odd = {unit for several, _ in found for unit in several} - undecided
        alone = tuple(each[0] for each in units.values() if len(each) == 1)
        compared = (LOSS, GRADIENTS) if self.gradients_agree else (LOSS,)
        outcome = Outcome(self.num_units, tuple(sorted(odd)), tuple(sorted(undecided)), alone, compared)
        if outcome.differs and step not in self._repeated:
            self._again = AGAIN
        return outcome


def _odd_ones(values: Mapping[int, float]) -> tuple[list[int], list[int]]:
    """Of units of one kind: those that differ from more than half, which agree; or all, where there is no majority."""
    (most, count), *others = Counter(values.values()).most_common()
    if not others:
        return [], []
    if 2 * count > len(values):
        return [unit for unit, value in values.items() if value != most], []
    return [], list(values)


@dataclass(frozen=True)
class Finding:
    """A confirmed corruption."""

    units: tuple[int, ...]
    members: tuple[Member, ...]  # of these units
    state_of: int  # the newest step whose state these have passed after
    is_decided: bool  # these are the odd ones; else there is one among them, and none to tell which


class Verification:
    """Of a run: which members have passed for which state, and how often each was the odd one."""

    def __init__(self, every_steps: int, unit: int, last_step: int) -> None:
        """`unit` is the number of ranks of one."""
        self._every_steps, self.unit, self._last_step = every_steps, unit, last_step
        self._passed: dict[str, int] = {}  # by member: up to the state of which step it is taken to compute right
        self._struck: dict[str, list[int]] = {}  # by node: steps in which one of its units was the odd one
        self._differed: list[int] = []  # steps in which there was no majority
        self._members: tuple[Member, ...] = ()
        self.start_step = 0  # of the newest group
        self.limit: int | None = None  # the newest step that may be restored, since a corruption was confirmed

    def begin(self, members: Sequence[Member], start_step: int) -> None:
        """A group trains from this state. A newcomer has not computed any of it."""
        self._members, self.start_step = tuple(members), start_step
        self._passed = {each.id: min(start_step, self._passed.get(each.id, start_step)) for each in members}
        self._struck = {node: steps for node, steps in self._struck.items() if node in {each.node for each in members}}
        self._differed.clear()
        self.limit = None

    @property
    def verified(self) -> int:
        """The newest step whose state is: all members have passed after it."""
        return min(self._passed.values(), default=0)

    def next_after(self, step: int) -> int:
        """The next step that verifies, as far as nothing differs."""
        return min((step // self._every_steps + 1) * self._every_steps, max(self._last_step, step + 1))

    def members_of(self, units: Collection[int]) -> tuple[Member, ...]:
        return tuple(each for rank, each in enumerate(self._members) if self.unit_of(rank) in units)

    def unit_of(self, rank: int) -> int:
        return rank // self.unit

    def take(self, step: int, outcome: Outcome) -> Finding | None:
        """What a verification came to; the corruption that it confirms."""
        failed = {*outcome.odd, *outcome.undecided}
        for rank, member in enumerate(self._members):
            if self.unit_of(rank) not in failed:
                self._passed[member.id] = step - 1
        for node in {each.node for each in self.members_of(outcome.odd)}:
            self._struck.setdefault(node, []).append(step)
        if outcome.undecided:
            self._differed.append(step)
        confirmed = [
            unit
            for unit in outcome.odd
            if any(len(self._struck[each.node]) >= CONFIRMED for each in self.members_of([unit]))
        ]
        if confirmed:
            return self._finding(confirmed, is_decided=True)
        if outcome.undecided and len(self._differed) >= CONFIRMED:
            return self._finding(outcome.undecided, is_decided=False)
        return None

    def _finding(self, units: Sequence[int], *, is_decided: bool) -> Finding:
        members = self.members_of(units)
        self.limit = min(self._passed[each.id] for each in members)
        return Finding(tuple(units), members, self.limit, is_decided)

    def has_recovered(self, node: str, step: int) -> bool:
        """Whether a node that was the odd one has not been for as long as from one verification to the next."""
        steps = self._struck.get(node)
        return steps is not None and step - steps[-1] >= self._every_steps

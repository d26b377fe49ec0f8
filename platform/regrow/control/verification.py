"""Silent corruption: whether units that computed the same came to the same, which of them is the odd one, and up to
which step the state is verified. Pure.

In a verification, in step N, every unit computes the same micro-batch with the weights of step N - 1. A unit *passes*
where its checksums are those of most units of its kind of device; one that is alone of its kind is taken on trust.
What computes wrong is taken to go on doing so: a unit that passes in step N has computed right up to the end of step
N - 1. A state of step S is *verified* once all units of the group that trains have passed in a step after S.

Units that are pipelines are compared stage by stage. What is wrong in a stage is wrong in all that come behind it,
forward and then backward: the first one that is odd tells which *part* of its unit it is, the ranks of one pipeline
rank. Parts are numbered unit x pp + pipeline rank; without pipelines a unit is one part.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.control.membership import Member
from regrow.plan.mesh import MeshShape

PER_STAGE = 3  # numbers of a unit's stage: its kind of device, the checksums of its output and of its gradients
LOSS, ACTIVATIONS, GRADIENTS = "loss", "activations", "gradients"
AGAIN = 2  # verifications more, in steps right after one in which units differ
CONFIRMED = 2  # verifications in which a part was the odd one, or units differed


@dataclass(frozen=True)
class Outcome:
    """Of a verification. A unit that has a part in none of these passes."""

    num_units: int
    odd: tuple[int, ...] = ()  # parts that differ from most others of their kind
    undecided: tuple[int, ...] = ()  # parts among which there is no majority: some compute wrong
    alone: tuple[int, ...] = ()  # units of a kind that no other unit has
    compared: tuple[str, ...] = (LOSS, GRADIENTS)
    pp: int = 1  # parts of a unit

    @property
    def differs(self) -> bool:
        return bool(self.odd or self.undecided)


def _at_the_end(last_step: int) -> tuple[int, int]:
    """Steps that verify: where units differ in the former, what follows it confirms that."""
    return last_step - AGAIN, last_step


def named(parts: Sequence[int], pp: int) -> str:
    """Parts, for people.

    >>> named([0, 3], 1), named([5], 4)
    ('units 0, 3', 'unit 1 (pipeline rank 1)')
    """
    names = [str(part) if pp == 1 else f"{part // pp} (pipeline rank {part % pp})" for part in parts]
    return f"unit{'s' * (len(names) > 1)} {', '.join(names)}"


@dataclass
class Checks:
    """Those of one group: when one is due, and what it came to. The same on all of its ranks."""

    every_steps: int  # 0: never
    num_units: int  # one alone is compared with none
    first_step: int  # a group begins with one: newcomers are looked at before much is built on what they compute
    last_step: int
    pp: int = 1
    num_stages: int = 1  # of a unit; stage s is on its pipeline rank s % pp
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
        return step in (self.first_step, *_at_the_end(self.last_step)) or step % self.every_steps == 0

    def judge(self, step: int, slots: Sequence[float]) -> Outcome:
        """What the numbers of all units say: PER_STAGE of each stage, unit by unit."""
        of_unit = PER_STAGE * self.num_stages
        units = [slots[of_unit * unit : of_unit * (unit + 1)] for unit in range(self.num_units)]
        kinds: dict[tuple[float, ...], list[int]] = {}  # units by the devices of all their stages
        for unit, numbers in enumerate(units):
            kinds.setdefault(tuple(numbers[::PER_STAGE]), []).append(unit)
        outputs, gradients = ([numbers[each::PER_STAGE] for numbers in units] for each in (1, 2))
        stages = range(self.num_stages)
        is_known = all(  # else their kernels may add in any order
            not _odd_ones({unit: gradients[unit][stage] for unit in each})[1]
            for each in kinds.values()
            for stage in stages
        )
        self.gradients_agree = self.gradients_agree or is_known
        odd: list[int] = []
        undecided: list[int] = []
        for each in kinds.values():
            compared = [(outputs, stage) for stage in stages]  # as an error spreads
            compared += [(gradients, stage) for stage in reversed(stages)] if self.gradients_agree else []
            left = each
            for values, stage in compared:
                differ, several = _odd_ones({unit: values[unit][stage] for unit in left})
                odd += [unit * self.pp + stage % self.pp for unit in differ]
                undecided += [unit * self.pp + stage % self.pp for unit in several]
                left = [unit for unit in left if unit not in {*differ, *several}]
        alone = tuple(each[0] for each in kinds.values() if len(each) == 1)
        names = (LOSS if self.num_stages == 1 else ACTIVATIONS, *((GRADIENTS,) if self.gradients_agree else ()))
        outcome = Outcome(self.num_units, tuple(sorted(odd)), tuple(sorted(undecided)), alone, names, self.pp)
        if outcome.differs and step not in self._repeated:
            self._again = AGAIN
        return outcome


def _odd_ones(values: Mapping[int, float]) -> tuple[list[int], list[int]]:
    """Of units of one kind: those that differ from more than half, which agree; or all, where there is no majority."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return [], []
    most, count = counts[0]
    if 2 * count > len(values):
        return [unit for unit, value in values.items() if value != most], []
    return [], list(values)


@dataclass(frozen=True)
class Finding:
    """A confirmed corruption."""

    parts: tuple[int, ...]
    members: tuple[Member, ...]  # of these parts
    state_of: int  # the newest step whose state these have passed after
    is_decided: bool  # these are the odd ones; else there is one among them, and none to tell which


class Verification:
    """Of a run: which members have passed for which state, and how often each was the odd one."""

    def __init__(self, every_steps: int, last_step: int, verified: int | None = None) -> None:
        """`verified`: the state of this step was, when another coordinator had the group; None: there was none."""
        self._every_steps, self._last_step = every_steps, last_step
        self._verified_before = verified
        self._passed: dict[str, int] = {}  # by member: up to the state of which step it is taken to compute right
        self._struck: dict[tuple[str, int], list[int]] = {}  # by node and GPU: steps in which its part was the odd one
        self._differed: list[int] = []  # steps in which there was no majority
        self._members: tuple[Member, ...] = ()
        self.mesh = MeshShape(1, 1)  # of the newest group
        self.start_step = 0  # of that
        self.limit: int | None = None  # the newest step that may be restored, since a corruption was confirmed

    def begin(self, members: Sequence[Member], mesh: MeshShape, start_step: int, *, trained: int | None = None) -> None:
        """A group trains from this state, and had come to step `trained` with another coordinator. A newcomer has not
        computed any of it; which ones are, is not known of the first group after another coordinator's."""
        self._members, self.mesh, self.start_step = tuple(members), mesh, start_step
        done = start_step if trained is None else trained
        unknown = done if self._verified_before is None else self._verified_before
        self._passed = {each.id: min(done, self._passed.get(each.id, unknown)) for each in members}
        self._verified_before = None
        here = {_device(each) for each in members}
        self._struck = {device: steps for device, steps in self._struck.items() if device in here}
        self._differed.clear()
        self.limit = None

    @property
    def verified(self) -> int:
        """The newest step whose state is: all members have passed after it."""
        return min(self._passed.values(), default=0)

    def next_after(self, step: int) -> int:
        """The next step that verifies, as far as nothing differs."""
        ends = [each for each in _at_the_end(self._last_step) if each > step]
        return min([(step // self._every_steps + 1) * self._every_steps, *ends])

    def members_of(self, parts: Collection[int]) -> tuple[Member, ...]:
        return tuple(each for rank, each in enumerate(self._members) if self.mesh.part_of(rank) in parts)

    def take(self, step: int, outcome: Outcome) -> Finding | None:
        """What a verification came to; the corruption that it confirms."""
        failed = {part // outcome.pp for part in (*outcome.odd, *outcome.undecided)}  # units
        for rank, member in enumerate(self._members):
            if self.mesh.unit_of(rank) not in failed:
                self._passed[member.id] = step - 1
        for device in {_device(each) for each in self.members_of(outcome.odd)}:
            self._struck.setdefault(device, []).append(step)
        if outcome.undecided:
            self._differed.append(step)
        confirmed = [
            part
            for part in outcome.odd
            if any(len(self._struck[_device(each)]) >= CONFIRMED for each in self.members_of([part]))
        ]
        if confirmed:
            return self._finding(confirmed, is_decided=True)
        if outcome.undecided and len(self._differed) >= CONFIRMED:
            return self._finding(outcome.undecided, is_decided=False)
        return None

    def _finding(self, parts: Sequence[int], *, is_decided: bool) -> Finding:
        members = self.members_of(parts)
        self.limit = min(self._passed[each.id] for each in members)
        return Finding(tuple(parts), members, self.limit, is_decided)

    def has_recovered(self, member: Member, step: int) -> bool:
        """Whether what was the odd one has not been for as long as from one verification to the next."""
        steps = self._struck.get(_device(member))
        return steps is not None and step - steps[-1] >= self._every_steps


def _device(member: Member) -> tuple[str, int]:
    """Its node and GPU, which it may have had another process on before."""
    return member.node, member.gpu

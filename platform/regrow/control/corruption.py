"""What is done about units that compute wrong: they are named, their hosts given up, the run goes back. Pure."""

from collections.abc import Collection, Iterable, Sequence

from regrow.config.check import topologies
from regrow.config.schema import PretrainConfig
from regrow.control.commands import NoteDamaged, Outbox
from regrow.control.events import Verified
from regrow.control.group import Group
from regrow.control.membership import Member
from regrow.control.past import Past
from regrow.control.replicas import Replicas, Unequal
from regrow.control.slow import Kind
from regrow.control.snapshots import Snapshots
from regrow.control.states import Training
from regrow.control.too_few import A_THIRD
from regrow.control.values import COMPUTED_WRONG, SnapshotAck
from regrow.control.verification import CONFIRMED, Finding, Outcome, Verification, named
from regrow.record.events import Cause, Corruption

DECIDING_UNITS = 3  # of which two agree


def _shown(members: Iterable[Member]) -> str:
    """Their nodes, for people."""
    return ", ".join(dict.fromkeys(member.node[:12] for member in members))


class Corruptions:
    """Of a run."""

    def __init__(self, config: PretrainConfig, group: Group, snapshots: Snapshots, out: Outbox, past: Past) -> None:
        every_steps, train = config.cluster.verify_every_steps, config.train
        last_step = min(train.steps, train.stop_at_step or train.steps)
        self._meshes = {size: each.mesh for size, each in topologies(config).items()}
        self.verification = Verification(every_steps, last_step, past.verified)
        self.verification.limit = past.limit
        self._verifies, self._group, self._snapshots, self._out = every_steps > 0, group, snapshots, out
        self._told_alone: set[str] = set()  # nodes
        steps = snapshots.checkpoints.steps
        steps.keep, steps.compared = config.checkpoint.keep if self._verifies else 0, self._verifies
        self._replicas = Replicas()
        self.found = 0  # corruptions that were recorded
        self._unconfirmed = ""  # what units differed in, in the newest verification
        self._undecided = 0  # times that two replicas differed, with no snapshot committed in between
        if past.limit is not None:
            self._drop_checkpoints(past.limit)  # which the one before may have died doing

    @property
    def limit(self) -> int | None:
        """The newest step that a group that forms may begin from; None: any."""
        return self.verification.limit

    def begin(self, start_step: int, *, trained: int | None = None) -> None:
        """The newest group trains from this step; it had come to step `trained` with another coordinator."""
        members, verification = self._group.membership.current, self.verification
        verification.begin(members, self._meshes[len(members)], start_step, trained=trained)
        self._replicas.begin()
        self._unconfirmed = ""
        steps = self._snapshots.checkpoints.steps
        steps.verify(verification.verified)
        steps.compared = self._verifies and verification.mesh.num_units > 1
        if steps.compared:
            verifies = start_step + 1 if trained is None else verification.next_after(trained)
            self._snapshots.commits.expect(verifies)

    def sealed(self, acks: Sequence[SnapshotAck], now: float) -> None:
        """Nodes have versions safe; where a snapshot's replicas differ, it is not to be committed."""
        is_compared = self._verifies and isinstance(self._group.state, Training)
        found = self._replicas.take(acks) if is_compared else None
        if found is not None:
            self._replicas_differ(found, now)
            return
        before = self._snapshots.commits.newest
        self._snapshots.sealed(acks, now)
        if (newest := self._snapshots.commits.newest) is not None and newest is not before:
            self._replicas.committed(newest.version)
            self._undecided = 0

    def _replicas_differ(self, found: Unequal, now: float) -> None:
        """It costs the odd one its place, and the run the steps since the newest committed snapshot: in that they
        agreed. Where there are two, it is not known which is wrong: both go on, until they differ once more before a
        snapshot is committed. Then the run ends, and both are named."""
        group = self._group
        parts = sorted({self.verification.mesh.part_of(rank) for rank in found.ranks})
        newest = self._snapshots.commits.newest
        step = newest.version.step if newest is not None else self.verification.start_step
        members = tuple(group.membership.current[rank] for rank in found.ranks)
        bad = Finding(tuple(parts), members, step, found.is_decided)
        self._record(found.version.step, bad, "weights and moments, with those of its replicas")
        self._snapshots.go_back(step, now)
        detail = f"its snapshot of step {found.version.step} is not what other replicas hold"
        if found.is_decided:
            self._give_up_hosts(bad, f"rank {found.ranks[0]}: {detail}", now)
            return
        ranks = ", ".join(map(str, found.ranks))
        text = f"ranks {ranks} hold different bits of one shard in step {found.version.step}"
        self._undecided += 1
        if self._undecided < CONFIRMED:
            group.failed(Cause.corrupted, text, [])
        else:
            nodes = _shown(members)
            group.give_up(
                f"{text} (nodes {nodes}), and no snapshot was committed since they differed before; with two replicas "
                f"there is no third to tell which is wrong; the state of step {step} is the newest in which they "
                "agreed: leave one of these nodes out, and start the same command again"
            )
        group.break_off(now)

    def _give_up_hosts(self, found: Finding, detail: str, now: float) -> None:
        """No further group is on the hosts of these members; where Ray Train starts all at once, on these too, there
        is none."""
        group = self._group
        if group.in_place:
            group.expel_corrupt(found, detail, now)
            return
        group.failed(Cause.corrupted, detail, [])
        group.give_up(
            f"{detail}; with cluster.in_place=false workers would start there again: take node {_shown(found.members)} "
            "out of the cluster, and start the same command again"
        )
        group.break_off(now)

    def take(self, event: Verified, now: float) -> None:
        """The outcome of a verification; a corruption that it confirms costs the odd ones their place, the run the
        steps since the newest verified state. Where two units differ, a third one is waited for, which can tell."""
        if not isinstance(self._group.state, Training):
            return
        outcome, verification = event.outcome, self.verification
        found = verification.take(event.step, outcome)
        self._tell(event.step, outcome, now)
        self._unconfirmed = ""
        if found is None:
            verified = verification.verified
            if outcome.differs:
                self._unconfirmed = self._differing(event.step, outcome)
            self._snapshots.verify(verified, verification.next_after(event.step))
            if not outcome.differs:
                self._ask_which((), (), "")
            return
        where = f"{named(found.parts, outcome.pp)}: " if outcome.pp > 1 else ""
        sizes = () if found.is_decided else self._deciding(found, outcome.num_units)
        detail = f"{where}{' and '.join(outcome.compared)} of the same micro-batch"
        self._record(event.step, found, detail, min(sizes, default=None))
        self._snapshots.go_back(found.state_of, now)
        self._drop_checkpoints(found.state_of)
        if found.is_decided:
            parts = named(found.parts, outcome.pp)
            detail = f"{parts}: its checksums in step {event.step} differ from those of most others"
            self._ask_which((), (), "")
            self._give_up_hosts(found, detail, now)
            return
        self._differ(found, event.step, sizes, now)

    def _differing(self, step: int, outcome: Outcome) -> str:
        parts = (*outcome.odd, *outcome.undecided)
        nodes = _shown(self.verification.members_of(parts))
        compared = " and ".join(outcome.compared)
        return f"{named(parts, outcome.pp)} (nodes {nodes}) differed in {compared} in the verification of step {step}"

    def trained(self) -> None:
        """The job's last step is trained: no verification follows that could confirm what the newest one has shown."""
        if self._unconfirmed:
            text = (
                f"{self._unconfirmed}, and none follows that could confirm it: some of them may compute wrong, the "
                f"state of step {self.verification.verified} is the newest known to be right"
            )
            self._out.record("note", text=text)

    def _drop_checkpoints(self, step: int) -> None:
        """Those of states after this step are not to be used: some rank computed wrong."""
        checkpoints = self._snapshots.checkpoints
        stored, dropped = checkpoints.steps.roll_back(step)
        checkpoints.stored = min(checkpoints.stored, stored)
        self._out.extend(NoteDamaged(each, COMPUTED_WRONG.format(step=step), True) for each in dropped)

    def _deciding(self, found: Finding, num_units: int) -> tuple[int, ...]:
        """World sizes of groups with a third unit, which can tell; none: it would not, or there is none that is
        allowed. `num_units` has those of other kinds of device, too."""
        missing = DECIDING_UNITS - len({part // self.verification.mesh.pp for part in found.parts})
        return self._with_units(num_units + missing) if missing > 0 and self._group.in_place else ()

    def _with_units(self, num_units: int) -> tuple[int, ...]:
        """World sizes of so many units or more: a smaller one may have more of them than a larger one."""
        return tuple(size for size, mesh in self._meshes.items() if mesh.num_units >= num_units)

    def go_on(self, question: Corruption, members: Sequence[Member]) -> None:
        """Another coordinator has left this open, and a group of these members. How many units it takes is not in the
        log: as many as the smallest group has that would do."""
        sizes = self._with_units(self._meshes[question.waits_for or min(self._meshes)].num_units)
        differing = [members[rank] for rank in question.ranks if rank < len(members)]
        self._ask_which(sizes, differing, question.sentence())

    def _ask_which(self, sizes: Collection[int], differing: Collection[Member], question: str) -> None:
        """The next group is of one of these sizes, which tells which of these members computes wrong; empty: of any."""
        membership, self._group.too_few.open_question = self._group.membership, question
        membership.deciding, membership.differing = sizes, {member.id for member in differing}

    def _differ(self, found: Finding, step: int, sizes: tuple[int, ...], now: float) -> None:
        """Units differ, and it is not known which is wrong."""
        group, parts = self._group, named(found.parts, self.verification.mesh.pp)
        nodes = _shown(found.members)
        question = (
            f"{parts} (nodes {nodes}) come to different checksums from the same micro-batch, as in step {step}, "
            "and there is no third of their kind to tell which is wrong; the state of step "
            f"{found.state_of} is the newest known to be right"
        )
        if sizes:
            group.failed(Cause.corrupted, f"{parts} differ in step {step}, and a third is to tell", [])
            self._ask_which(sizes, found.members, question)
            group.count_left(now)
        else:
            group.give_up(f"{question}: {A_THIRD}")
        group.break_off(now)

    def _tell(self, step: int, outcome: Outcome, now: float) -> None:
        """What is suspected from here on, and no longer."""
        suspects, verification = self._group.health.suspects, self.verification
        ranks = {member.id: rank for rank, member in enumerate(self._group.membership.current)}
        compared = " and ".join(outcome.compared)
        for kind, parts in ((Kind.corrupt, outcome.odd), (Kind.differing, outcome.undecided)):
            for member in verification.members_of(parts):
                detail = f"its {compared} in the verification of step {step}"
                suspects.wrong(kind, member.node, member.pid, ranks[member.id], now, detail)
        for member in self._group.membership.current:
            if verification.has_recovered(member, step):
                suspects.right(member.node, member.pid)
        alone = {unit * outcome.pp + rank for unit in outcome.alone for rank in range(outcome.pp)}
        for node in {each.node for each in verification.members_of(alone)} - self._told_alone:
            self._told_alone.add(node)
            text = f"node {node[:12]} has the only unit with its kind of device: what it computes is compared with none"
            self._out.record("note", text=text)

    def _record(self, step: int, found: Finding, detail: str, waits_for: int | None = None) -> None:
        ranks = {member.id: rank for rank, member in enumerate(self._group.membership.current)}
        self.found += 1
        self._out.record(
            "corruption",
            step=step,
            units=sorted({part // self.verification.mesh.pp for part in found.parts}),
            ranks=[ranks[member.id] for member in found.members],
            nodes=list(dict.fromkeys(member.node for member in found.members)),
            verified_step=found.state_of,
            is_decided=found.is_decided,
            waits_for=waits_for,
            detail=detail,
        )

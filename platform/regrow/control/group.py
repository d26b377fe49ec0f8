"""The group of ranks that trains: its states, and what each event makes of them. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from regrow.control.commands import Form, Probe, Reply, TellOver
from regrow.control.events import Asked, Closed, Done, Failed, Joined, KeeperUp, Leaving, Placed, StopAsked
from regrow.control.losses import Losses, end_quarantined, kill
from regrow.control.membership import Formation, Member, Membership
from regrow.control.states import (
    Answer,
    Finished,
    Forming,
    GivenUp,
    GroupState,
    LeavingGroup,
    Stopping,
    Training,
    Waiting,
)
from regrow.record.events import Cause

FORM_POLL_S = 0.02  # at which a worker asks for its generation
FORM_POLLS_PER_S = 2000.0  # of all workers together
LOOK_AT_S = 1e-5  # a worker, to see whether a group can be formed: not at every poll of thousands
WAITING_POLL_S = 0.1  # while a group trains, at which workers that wait for a place in one ask
LEAVING_S = 5.0  # for the last snapshot of a group that leaves in good order
DRAINING_S = 60.0  # the same where nothing presses: no step is to be lost to maintenance
BROKE_FIRST = "its first group broke before a step, and the others have done one without it"
BROKE_ALONE = "its first group broke before a step by its error alone, and is to have another one in its place"
ONE_OF_SEVERAL = "its first group broke before a step, by which host is not known: others are tried without this one"
LEFT_OUT = "others of its processes did not come for the next group"
QUARANTINE_WITHIN_S = 3600.0  # failures of a node that count together


@dataclass
class Group(Losses):
    """The run's workers, from one generation to the next."""

    _formed: int = 0  # the newest generation that this coordinator has formed; one that it took up may train long since
    _left_slow_at: float = -math.inf  # when slow nodes were last looked at to be left
    _form_at: float = 0.0  # to look again whether a group can be formed, if no worker comes that it waited for
    _must_wait: bool = True  # for such workers, when it was looked last
    told_spares: Mapping[str, int] = field(default_factory=dict)  # by node

    @property
    def is_over(self) -> bool:
        """Whether the run ends, and no group is on that could end by itself."""
        return self.ending is not None and not isinstance(self.state, Forming | Training)

    def is_current(self, generation: int) -> bool:
        """Whether this is the newest group, whose processes are not all ended, and one that this coordinator knows: of
        another one's, which formed it while storage was away, nothing is taken."""
        known = self.formation.generation if self.formation is not None and self.membership.current else None
        return generation == self.generation == known

    @property
    def stop_reason(self) -> str:
        return self.ending.reason if self.ending is not None else ""

    # how the run ends

    def stop(self, event: StopAsked, now: float) -> None:
        """A group that trains leaves after a step. One that forms is over: some of its ranks may not have their seats,
        and get none. Another coordinator's may train, unless one of its ranks asks for a seat."""
        self.ending = self.ending or Stopping(event.reason)
        if isinstance(self.state, Forming) and self._formed == self.generation:
            self.break_off(now)

    def finish(self, event: Done, now: float) -> None:
        """The last step is trained: workers that wait to join may end."""
        self.ending = self.ending or Finished()
        self.enter(Waiting(), now)

    def fail(self, event: Failed, now: float) -> None:
        self.give_up(event.message)

    # workers come

    def join(self, event: Joined, now: float) -> None:
        """One that Ray Train has replaced is turned away: its node was cut off and is back, or Ray was mistaken.

        What has its place in the newest group is no news: a process that comes again has other ports. Its keeper and
        the process itself may tell of one offer both, one of them late."""
        member = event.member
        if self._is_turned_away(member, now) or member.id in self.expelled or has_place(self.formation, member):
            return
        self.nodes.met(member)
        quarantined, exclusions = self.nodes.exclusions.quarantined(now), self.nodes.exclusions
        names = member.node, member.machine  # its host's failures are counted by either
        is_quarantined, is_corrupt = (not each.isdisjoint(names) for each in (quarantined, exclusions.corrupt))
        is_in = self.formation is not None and self.formation.rank_of(member.id) is not None  # its host is slow
        is_refused = is_corrupt or (is_quarantined and not is_in and not self.too_few.yields(now))
        if is_refused and self.in_place:
            self.expelled.add(member.id)  # a host that came back as another node: it is started elsewhere
            return
        self.membership.join(member, expected=event.expected, now=now)
        if isinstance(self.state, Forming) and self.membership.is_breaking:  # no rank need wait for more
            self.enter(Waiting(), now)
            self._tell_over()

    def keeper_up(self, event: KeeperUp, now: float) -> None:
        """It may not have heard that the group is over."""
        self.arrivals.keeper_up(event, now)
        if self._told_over == self.generation > 0:
            self.out.append(TellOver(self.generation, (event.node,)))

    def placed(self, event: Placed, now: float) -> None:
        self.membership.placed = dict(event.workers)
        self.nodes.hears_ray = True  # a view of it ends with this

    def excluded_nodes(self, now: float) -> set[str]:
        """Where no worker is to be started: not on nodes that fail again and again, unless too few are left."""
        return self.nodes.refused(now) if self.too_few.yields(now) else self.nodes.excluded(now)

    def ask(self, event: Asked, now: float, *, last_snapshot_is_safe: bool, must_wait: Callable[[], bool]) -> None:
        """Answer a worker, having formed the next group if it can be formed, and need not wait for nodes."""
        self.out.append(Reply(self._answer(event, now, last_snapshot_is_safe, must_wait)))

    def _answer(self, event: Asked, now: float, last_snapshot_is_safe: bool, must_wait: Callable[[], bool]) -> Answer:
        if isinstance(self.ending, GivenUp):
            return Answer(given_up=self.ending.message)
        formation, waits = self.formation, event.member_id in self.membership.waiting
        is_in = formation is not None and formation.rank_of(event.member_id) is not None
        if self.ending is not None and isinstance(self.state, Forming) and is_in:  # it has no seat, and gets none
            self.break_off(now)
        if self.ending is not None or event.member_id in self.turned_away:
            return Answer(over=True)
        if event.member_id in self.expelled:
            return Answer(unfit=True)
        if event.member_id in self.troubles.told:
            return Answer(wait_s=WAITING_POLL_S)
        if formation is None or formation.generation <= event.after or not is_in or waits:
            if isinstance(self.state, LeavingGroup) and now < self.state.until and not last_snapshot_is_safe:
                return Answer(wait_s=ask_again_s(self.membership.waiting, event.member_id, FORM_POLL_S, now))
            formation = self._form(now) if self._is_time_to_form(now) and not must_wait() else None
        if isinstance(self.ending, GivenUp):
            return Answer(given_up=self.ending.message)
        if formation is not None and formation.rank_of(event.member_id) is not None:
            return Answer(formation)
        if event.member_id not in self.membership.waiting:
            return Answer(join_again=True)
        poll_s = WAITING_POLL_S if isinstance(self.state, Training) else FORM_POLL_S
        return Answer(wait_s=ask_again_s(self.membership.waiting, event.member_id, poll_s, now))

    def _is_time_to_form(self, now: float) -> bool:
        """Whether to look, which takes as long as there are workers: at once when all are there, else now and then."""
        membership = self.membership
        must_wait = membership.must_wait(now)
        if now < self._form_at and (must_wait or not self._must_wait):
            return False
        self._must_wait = must_wait
        self._form_at = now + (len(membership.current) + len(membership.waiting)) * LOOK_AT_S
        return True

    def _form(self, now: float) -> Formation | None:
        """Number a new group if one can be formed; from here on older ones are fenced off."""
        membership = self.membership
        before = Formation(self.generation, membership.current)
        membership.avoided = self.nodes.excluded(now)
        if membership.is_breaking:
            hold_back(self)
            self._end_newcomers_to_blame(now)
            if missing := membership.missing:
                self.out.append(Probe(tuple(missing)))
        self.arrivals.ready(now)
        formation = membership.form(now)
        others = end_left_out(self, before, now)
        if formation is None:
            end_quarantined(self, others, LEFT_OUT, now)
            return None
        self._must_wait = True
        tell_spares(self)
        if error := self.first_steps.error:
            self.failed(Cause.worker_failed, error, [], generation=before.generation)
        hosts = self.nodes.hosts(formation.members)
        if not self.first_steps.formed(hosts, frozenset(membership.held_back), now):
            self.give_up(f"group after group failed before a new step; last failure: {self.last_failure or 'unknown'}")
        self.formation, self._formed = formation, formation.generation
        self.too_few.enough()
        self.enter(Forming(formation.generation), now)
        self.out.append(Form(formation.generation, formation.members))
        if apart := membership.without_unit:
            self.out.record("note", text=apart_text(apart, membership.unit))
        end_quarantined(self, others, LEFT_OUT, now, cause=Cause.worker_hung)
        return formation

    def _end_newcomers_to_blame(self, now: float) -> None:
        """Those without which no group is allowed, as one with the others alone would be formed first: others are
        waited for in their places."""
        membership = self.membership
        to_blame = frozenset[str]() if has_lost(membership) else self.first_steps.newcomers_to_blame()
        if to_blame and not membership.may_come(now, but_for=to_blame) and not membership.has_others:
            self.first_steps.counts_as_loss()
            self.out.extend(kill(each) for each in membership.missing if each.id in to_blame)  # it asks no more
            members = [each for each in membership.current if each.id in to_blame]
            others = list[Member]()
            for node in dict.fromkeys(each.node for each in members):
                others += self.nodes.failed(node, now, again=False, is_spared=True)
            self._expel(dict.fromkeys(members, BROKE_ALONE), now, counts=False)
            end_quarantined(self, others, BROKE_ALONE, now)
            membership.avoided = self.nodes.excluded(now)  # it may be in quarantine now
            hold_back(self)

    # a group trains, and leaves

    def train(self, start_step: int, now: float) -> None:
        """It is ready, to go on from this step."""
        self.cause = Cause.worker_failed  # until something else is known of this generation
        self.first_steps.began(start_step, now)
        self.enter(Training(self.generation), now)

    def take_up(self, state: GroupState, lost: tuple[int, ...] | None, lost_at: float, now: float) -> None:
        """Another coordinator left the newest group in this state; or, where some of it was lost, over."""
        if lost is not None:
            self.membership.died(self.membership.current[rank].id for rank in lost)
            self.membership.over_since = now  # others may have died meanwhile, and none says so again
            self.count_left(min(lost_at, now))
            self._tell_over()  # as the other one may have died before
        if lost is None:
            self.too_few.enough()
        self.enter(state if lost is None and self.ending is None else Waiting(), now)
        if isinstance(state, Training):
            self._prove()

    def break_off(self, now: float) -> None:
        """The group is over, and nothing that it does counts any more."""
        self.enter(Waiting(), now)
        self._tell_over()

    def close(self, event: Closed, now: float) -> None:
        """The run is over: no process of its groups gets any further."""
        self.membership.generation += 1

    def stepped(self, step: int, now: float) -> None:
        """The newest group has done this step. Newcomers that the one before broke with, it seems, are not fit."""
        if self.first_steps.new:  # none of them is why the group before broke
            self.nodes.exclusions.untried_until.clear()
        if not self.first_steps.proven:  # it may be a group of another coordinator's, and formed then
            self._prove()
        waiting = self.membership.waiting
        unfit = self.first_steps.stepped(step, now)
        going = {waiting[each]: counts for each, counts in unfit.items() if each in waiting}
        self.nodes.leave_untried([member for member, counts in going.items() if not counts], now)
        for member, counts in going.items():
            self._expel({member: BROKE_FIRST if counts else ONE_OF_SEVERAL}, now, counts=counts)
        self.membership.held_back.clear()
        self.membership.their_nodes.clear()

    def _prove(self) -> None:
        """The newest group's members have done a step together."""
        self.first_steps.proven = frozenset(member.id for member in self.membership.current)

    def why_leave(self, now: float) -> str:
        """Why the group should leave in good order and form anew, or empty."""
        self.arrivals.ready(now)
        self.membership.avoided = self.nodes.excluded(now)
        reason = ""
        if self.membership.wants_to_leave_nodes():
            reason = Cause.drain
        elif self.membership.wants_to_grow(now):
            reason = Cause.grow
        tell_spares(self)
        if reason and isinstance(self.state, Training):
            self.state = replace(self.state, asked_to_leave=reason)
        return reason

    def leave_slow_nodes(self, after_s: float, now: float) -> None:
        """Those that have been slow for so long, where spares wait; 0: never. Once a second, as thousands answer."""
        if after_s <= 0 or not self.membership.spares or now - self._left_slow_at < 1.0:
            return
        self._left_slow_at = now
        if isinstance(self.state, Training):
            for node in self.health.suspects.slow_nodes(now, after_s):
                self.nodes.slow(node, now)

    def leave(self, event: Leaving, now: float) -> None:
        if isinstance(self.ending, Stopping):  # for good
            self.out.record("trained", step=event.step)
        asked = self.state.asked_to_leave if isinstance(self.state, Training) else ""
        self.cause = event.cause or asked
        here = {member.node for member in self.membership.survivors}
        for_maintenance = self.cause == Cause.drain and not here.isdisjoint(self.nodes.exclusions.asked)
        self.enter(LeavingGroup(event.step, now + (DRAINING_S if for_maintenance else LEAVING_S)), now)


def ask_again_s(waiting: Mapping[str, Member], member_id: str, least_s: float, now: float) -> float:
    """In how long: each node has its own time in a round of all, so that some node asks soon, whatever the round
    takes, and has the group formed."""
    round_s = len(waiting) / FORM_POLLS_PER_S
    if member_id not in waiting or round_s <= least_s:
        return least_s
    turn = crc32(waiting[member_id].node.encode()) / 2**32
    return least_s + (turn * round_s - now - least_s) % round_s


def has_place(formation: Formation | None, member: Member) -> bool:
    """Whether this group was formed with this very offer."""
    rank = formation.rank_of(member.id) if formation is not None else None
    return formation is not None and rank is not None and formation.members[rank] == member


def has_lost(membership: Membership) -> bool:
    """Whether some of the current group are gone."""
    return len(membership.survivors) < len(membership.current)


def hold_back(group: Group) -> None:
    """Newcomers that the next group does without, if it can, and then also without what else waits on their hosts, but
    for hosts of members that have done steps."""
    membership, first_steps = group.membership, group.first_steps
    membership.held_back = set(first_steps.held_back(lost=has_lost(membership)))
    membership.their_nodes.clear()
    if membership.held_back:
        hosts = group.nodes.hosts([*membership.survivors, *membership.waiting.values()])
        proven = {host for member_id, host in hosts.items() if member_id in first_steps.proven}
        theirs = first_steps.hosts(membership.held_back) - proven
        membership.their_nodes |= {each.node for each in membership.waiting.values() if hosts[each.id] in theirs}


def tell_spares(group: Group) -> None:
    """How many wait beside the group, where that has changed."""
    nodes = dict(Counter(member.node for member in group.membership.spares))
    if nodes != group.told_spares:
        group.told_spares = nodes
        group.out.record("spares", count=sum(nodes.values()), nodes=nodes, generation=group.generation)


def end_left_out(group: Group, before: Formation, now: float) -> list[Member]:
    """Members of the group before that live, and have not come in time; of others that are to end, as their hosts are
    in quarantine for that."""
    membership = group.membership
    left_out, membership.left_out = membership.left_out, []
    if not left_out:
        return []
    group.first_steps.error = ""
    group.out.extend(kill(member) for member in left_out)  # Ray Train finds them dead, and fills their places
    detail = f"{membership.patience_s:.0f} s without a word, ended"
    ranks = [rank for member in left_out if (rank := before.rank_of(member.id)) is not None]
    nodes = dict.fromkeys(member.node for member in left_out)
    group.failed(Cause.worker_hung, detail, ranks, nodes, generation=before.generation)
    return [member for node in nodes for member in group.nodes.failed(node, now, again=False)]


def apart_text(apart: Sequence[Member], unit: int) -> str:
    nodes = ", ".join(dict.fromkeys(member.node[:12] for member in apart))
    return f"{len(apart)} of the workers of node {nodes} wait: parallel.tp={unit} takes as many of a node at a time"

"""Who trains: the group's states, what each event makes of them, and what is done about those that are lost. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from regrow.control.commands import Connect, Form, GiveUp, Kill, Outbox, Probe, Reply, TellOver
from regrow.control.events import (
    Asked,
    Broke,
    Died,
    Done,
    Failed,
    Gone,
    GroupFailed,
    Joined,
    Leaving,
    PortRefused,
    StopAsked,
)
from regrow.control.health import Health, Suspect
from regrow.control.membership import Formation, Membership
from regrow.control.nodes import NodeFailures
from regrow.control.peers import KeeperRegistry
from regrow.control.states import (
    Answer,
    Ending,
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

YIELD_S = 10.0  # that too few wait for workers elsewhere before nodes are used that failed again and again
FORM_POLL_S = 0.02  # at which a worker asks for its generation
FORM_POLLS_PER_S = 2000.0  # of all workers together
LOOK_AT_S = 1e-6  # a worker that waits, to see whether a group can be formed: not at every poll of thousands
WAITING_POLL_S = 0.1  # while a group trains, at which those who wait for a place in one ask
LEAVING_S = 5.0  # for the last snapshot of a group that leaves in good order
QUARANTINE_WITHIN_S = 3600.0  # failures of a node that count together
MAX_FAILED_GENERATIONS = 3  # in a row, without finishing a step, before the run is given up


@dataclass
class Group:
    """The run's workers, from one generation to the next."""

    membership: Membership
    nodes: NodeFailures
    health: Health
    keepers: KeeperRegistry
    out: Outbox
    in_place: bool
    wait_for_workers_s: float
    cause: str  # of the next generation
    state: GroupState = field(default_factory=Waiting)
    ending: Ending | None = None
    formation: Formation | None = None  # the newest
    last_failure: str = ""
    failed_in_a_row: int = 0  # generations that have not finished a step
    too_few_since: float | None = None
    num_failures: int = 0
    ended: set[tuple[str, int]] = field(default_factory=set)  # node and pid of processes that Ray Train has replaced
    turned_away: set[str] = field(default_factory=set)  # members among them that came back
    _told_over: int = 0  # the newest generation whose ranks were told that it is over for one of them
    _form_at: float = 0.0  # to look again whether a group can be formed

    @property
    def generation(self) -> int:
        return self.membership.generation

    @property
    def stop_reason(self) -> str:
        return self.ending.reason if self.ending is not None else ""

    def enter(self, state: GroupState, now: float) -> None:
        """Go over to a state; who stands still in it is found by `health`."""
        self.state = state
        if isinstance(state, Forming | Training):
            self.health.stalls.begin(now, forming=isinstance(state, Forming))
            self.out.append(Connect(self.membership.current))
        else:
            self.health.stalls.end()

    # how the run ends

    def stop(self, event: StopAsked, now: float) -> None:
        self.ending = self.ending or Stopping(event.reason)

    def finish(self, event: Done, now: float) -> None:
        """The last step is trained: whoever waits to join may go."""
        self.ending = self.ending or Finished()
        self.enter(Waiting(), now)

    def fail(self, event: Failed, now: float) -> None:
        self.give_up(event.message)

    def give_up(self, message: str) -> None:
        """End the run for a reason that another attempt would meet again."""
        if not isinstance(self.ending, GivenUp):
            self.ending = GivenUp(message)
            self.out.append(GiveUp(message))

    # workers come

    def join(self, event: Joined, now: float) -> None:
        """One that Ray Train has replaced is turned away: its node was cut off and is back, or Ray was mistaken."""
        member = event.member
        if (member.node, member.pid) in self.ended:
            self.turned_away.add(member.id)
            self.out.append(Kill(member.node, member.pid))
            return
        self.membership.join(member, expected=event.expected, now=now)
        if isinstance(self.state, Forming) and self.membership.is_breaking:  # nobody need wait for more
            self.enter(Waiting(), now)
            self._tell_over()

    def ask(self, event: Asked, now: float, *, last_snapshot_is_safe: bool) -> None:
        """Answer a worker, having formed the next group if it can be formed."""
        self.out.append(Reply(self._answer(event, now, last_snapshot_is_safe)))

    def _answer(self, event: Asked, now: float, last_snapshot_is_safe: bool) -> Answer:
        if isinstance(self.ending, GivenUp):
            return Answer(given_up=self.ending.message)
        if self.ending is not None or event.member_id in self.turned_away:
            return Answer(over=True)
        formation, waits = self.formation, event.member_id in self.membership.waiting
        is_in = formation is not None and formation.rank_of(event.member_id) is not None
        if formation is None or formation.generation <= event.after or not is_in or waits:
            if isinstance(self.state, LeavingGroup) and now < self.state.until and not last_snapshot_is_safe:
                return Answer(wait_s=FORM_POLL_S)
            formation = self._form(now) if now >= self._form_at else None
        if isinstance(self.ending, GivenUp):
            return Answer(given_up=self.ending.message)
        if formation is not None and formation.rank_of(event.member_id) is not None:
            return Answer(formation)
        waiting = self.membership.waiting
        if event.member_id not in waiting:
            return Answer(join_again=True)
        poll_s = WAITING_POLL_S if isinstance(self.state, Training) else FORM_POLL_S
        return Answer(wait_s=max(poll_s, len(waiting) / FORM_POLLS_PER_S))

    def _form(self, now: float) -> Formation | None:
        """Number a new group if one can be formed; from here on older ones are fenced off."""
        membership = self.membership
        ranks = {member.id: rank for rank, member in enumerate(membership.current)}
        membership.avoided = self.nodes.exclusions.excluded(now)
        self._form_at = now + len(membership.waiting) * LOOK_AT_S
        if membership.is_breaking and (missing := membership.missing):
            self.out.append(Probe(tuple(missing)))
        formation = membership.form(now)
        for member in membership.left_out:
            self.out.append(Kill(member.node, member.pid))  # Ray Train finds it dead, and fills its place
            detail = f"{membership.patience_s:.0f} s without a word, ended"
            self.failed(Cause.worker_hung, detail, [ranks[member.id]], [member.node])
        membership.left_out.clear()
        if formation is None:
            return None
        self.failed_in_a_row += 1
        if self.failed_in_a_row > MAX_FAILED_GENERATIONS:
            self.give_up(
                f"{MAX_FAILED_GENERATIONS} groups in a row failed before finishing a step; last failure: "
                f"{self.last_failure or 'unknown'}"
            )
        self.formation, self.too_few_since = formation, None
        self.enter(Forming(formation.generation), now)
        self.out.append(Form(formation.generation, formation.members))
        if apart := membership.without_unit:
            nodes = ", ".join(dict.fromkeys(member.node[:12] for member in apart))
            text = f"{len(apart)} of the workers of node {nodes} wait: parallel.tp={membership.unit} takes as "
            self.out.record("note", text=text + "many of a node at a time")
        return formation

    # a group trains, and leaves

    def train(self, now: float) -> None:
        """It is ready."""
        self.cause = Cause.worker_failed  # until something else is known of this generation
        self.enter(Training(self.generation), now)

    def take_up(self, state: GroupState, lost: tuple[int, ...] | None, lost_at: float, now: float) -> None:
        """Another coordinator left the newest group in this state; or, where some of it was lost, over."""
        if lost is not None:
            self.membership.died(self.membership.current[rank].id for rank in lost)
            self._count_too_few(min(lost_at, now))
        self.enter(state if lost is None and self.ending is None else Waiting(), now)

    def why_leave(self, now: float) -> str:
        """Why the group should leave in good order and form anew, or empty."""
        self.membership.avoided = self.nodes.exclusions.excluded(now)
        reason = ""
        if self.membership.wants_to_leave_nodes():
            reason = Cause.drain
        elif self.membership.wants_to_grow(now):
            reason = Cause.grow
        if reason and isinstance(self.state, Training):
            self.state = replace(self.state, asked_to_leave=reason)
        return reason

    def leave(self, event: Leaving, now: float) -> None:
        asked = self.state.asked_to_leave if isinstance(self.state, Training) else ""
        self.cause = event.cause or asked
        self.enter(LeavingGroup(event.step, now + LEAVING_S), now)

    # workers are lost

    def died(self, event: Died, now: float) -> None:
        """Ray Train has found processes dead, or given them up."""
        gone = set(event.processes)
        self.ended |= gone
        if event.cause == Cause.worker_hung:  # they are to go
            self.out.extend(Kill(node, pid) for node, pid in event.processes)
        membership = self.membership
        known = {member.id: member for member in [*membership.current, *membership.waiting.values()]}
        dead = [member_id for member_id, member in known.items() if (member.node, member.pid) in gone]
        self._lose(dead, event.cause, event.detail, now, left=event.left)

    def gone(self, event: Gone, now: float) -> None:
        """A keeper has seen a worker end. Ray tells later, and of peers on NCCL nobody does."""
        dead = [each for each in self.membership.survivors if (each.node, each.pid) == (event.node, event.pid)]
        if dead and self.in_place and self.ending is None:  # where all restart, Ray Train says why
            detail = f"process {event.pid} on node {event.node[:12]}: gone, says its node"
            self._lose((member.id for member in dead), Cause.worker_died, detail, now)

    def refused(self, event: PortRefused, now: float) -> None:
        """These do not come, for they are dead; Ray Train finds it later."""
        dead = [member for member in self.membership.survivors if member.id in event.member_ids]
        gone = ", ".join(f"process {member.pid} on node {member.node[:12]}" for member in dead)
        if dead and self.in_place:  # where all restart, Ray Train says why
            detail = f"{gone}: gone, its port refuses connections"
            self._lose((member.id for member in dead), Cause.worker_died, detail, now)

    def suspected(self, suspects: list[Suspect], now: float) -> None:
        """End processes that keep the others waiting; of a node that has gone dark nothing more is expected."""
        self.out.extend(Kill(each.member.node, each.member.pid) for each in suspects)
        dark = {each.member.node for each in suspects if each.dark}
        details = dict.fromkeys(f"node {each.member.node[:12]}: {each.detail}" for each in suspects)
        cause = Cause.node_silent if dark else Cause.worker_hung
        self._lose((each.member.id for each in suspects), cause, "; ".join(details), now)

    def broke(self, event: Broke, now: float) -> None:
        """What it says is kept for the case that all of them cannot go on."""
        if event.generation == self.generation:
            self.last_failure = event.detail
            if self._told_over < event.generation:  # all of them say so in the end
                self._told_over = event.generation
                self._tell_over()

    def restarted_by_ray(self, event: GroupFailed, now: float) -> None:
        """All processes are ended, to be started anew."""
        current = self.membership.current
        nodes = {current[rank].node for rank in event.ranks if rank < len(current)}
        self.membership.dissolve()
        self.enter(Waiting(), now)
        self.failed(event.cause, event.detail, event.ranks, nodes)

    def failed(
        self, cause: str, detail: str, ranks: Iterable[int], nodes: Iterable[str] = (), step: int | None = None
    ) -> None:
        """Record why a group broke, and how the GPUs of these nodes were; the next generation carries the cause."""
        self.cause, self.last_failure = cause, detail
        self.num_failures += 1
        gpus = {node: self.health.gpus[node] for node in nodes if node in self.health.gpus}
        fields = {"cause": cause, "detail": detail, "ranks": list(ranks), "generation": self.generation}
        more = ({"gpus": gpus} if gpus else {}) | ({"step": step} if step is not None else {})
        self.out.record("failure", **fields, **more)

    def excluded_nodes(self, now: float) -> set[str]:
        """Where no worker is to be started: not on nodes that fail again and again, unless too few are left."""
        if self.too_few_since is not None and now - self.too_few_since > YIELD_S:
            return self.nodes.exclusions.leaving(now)
        return self.nodes.exclusions.excluded(now)

    def tick(self, now: float) -> None:
        if self.too_few_since is not None and now - self.too_few_since > self.wait_for_workers_s:
            self.give_up(
                f"fewer than cluster.min_workers={min(self.membership.sizes)} for {self.wait_for_workers_s:.0f} s; "
                "start nodes and run the same command again, or let it wait longer with cluster.wait_for_workers_s"
            )

    def _lose(self, member_ids: Iterable[str], cause: str, detail: str, now: float, *, left: int | None = None) -> None:
        """Processes are gone: the other members of the group, who may wait for them in a collective, are told."""
        lost = self.membership.died(member_ids, left=left)
        self._count_too_few(now)
        if not lost:
            return
        ranks = [rank for rank, member in enumerate(self.membership.current) if member in lost]
        nodes = list(dict.fromkeys(member.node for member in lost))
        self.failed(cause, detail, ranks, nodes)
        for node in nodes:
            self.nodes.failed(node, now, again=False)
        if not isinstance(self.state, LeavingGroup):
            self.enter(Waiting(), now)
        self._tell_over()

    def _count_too_few(self, now: float) -> None:
        too_few = self.in_place and len(self.membership.survivors) < min(self.membership.sizes)
        if too_few and self.too_few_since is None:
            self.too_few_since = now

    def _tell_over(self) -> None:
        nodes = self.keepers.known_of(member.node for member in self.membership.current)
        self.out.append(TellOver(self.generation, nodes))

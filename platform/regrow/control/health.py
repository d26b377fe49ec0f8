"""When a group that stands still is worth asking about, and what to make of the answers. Pure; time is an argument.

A group stands still, while it trains or while it forms, because one of its processes does: the others wait for it.
Its node's keeper sees which process is stopped, or has not run for long; a keeper that does not answer is on a node
that has gone dark.
A rank that runs and does not get on is compared with the others: one that waits in no collective, as they do, and
begins none, is the one they wait for. It hangs once what it does takes far longer than is usual (`control.phases`).
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from regrow.control.commands import Ask, Outbox, Probe, Question, SaveStacks
from regrow.control.events import ConnectionLost
from regrow.control.membership import Member, Membership
from regrow.control.phases import BEYOND_S, OWN_LIMITS, Phase, Usual
from regrow.control.silent import DARK_S, SilentKeepers
from regrow.control.slow import READ_PER_S, READ_S, Spent, Worker
from regrow.control.suspects import Suspects
from regrow.control.troubles import FirstSteps
from regrow.control.values import NOTHING, GpuReading
from regrow.plan.topology import Table
from regrow.record.events import Cause

STEPS, SECONDS = 2.0, 0.4  # so many median steps, and seconds, without a step: ask
STOPPED_S = 0.7  # silent and stopped by a signal
STUCK_SHARE = 0.25  # of a collective's timeout without a step: worth a look at where each rank is
WINDOW = 50  # steps that the median is of
ASK_AGAIN_S, ASKED_PER_S = 0.2, 2000.0  # between questions, and more where there are more keepers
NEWCOMERS_SHARE = 0.5  # of the patience with a group that forms, to look which of its newcomers is to blame
WHERE_AGAIN_S = 5.0  # between questions where each rank is: one that gets on has begun a collective meanwhile
LOOK_S = 1.5  # for keepers to say where each rank is
KNOCK_S = 30.0  # after a connection has ended: a kernel closes a killed process' files once it has its memory back
LATE_S = 30.0  # for a check-up, before another one is asked for
LINKS_S = 15.0  # for links to be measured: a node behind a slow one may not come to tell
AT_ONCE = 1024  # nodes that are asked in one call, where nothing waits for the answers: it takes 60 ms
LOOKED_AT = 64  # nodes, at most: stacks are read by people


@dataclass(frozen=True)
class Pulse:
    """What a node knows of one of its workers."""

    pid: int
    generation: int
    step: int  # the newest one it finished in this generation
    silent_s: float  # since it last ran
    probe_s: float  # of its newest probe (`train.probe`); 0 before the first
    state: str  # of the process, as the kernel says: R, S and D run or wait, T is stopped; empty: it is gone
    asked: int = 0  # the newest question where it is (`ControlWord.traces`) that it has answered; 0: none
    collectives: int = NOTHING  # at that time: begun since the process began
    waits: bool = False  # at that time: one of them had not ended
    waits_s: float = 0.0  # at that time: since the first of those had begun
    phase: Phase = Phase.forming  # what it does
    phase_s: float = 0.0  # since when
    longest_s: tuple[float, ...] = ()  # of each of `phases.PHASES` that it came through lately
    spent: Spent = field(default_factory=Spent)

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


@dataclass
class Stalls:
    """Watches the steps of one generation after the other."""

    silence_s: float  # that a process is allowed, whatever keeps it
    timeout_s: float  # of a collective
    stuck_s: float  # for a phase of which nothing is known; 0: no rank is looked for that keeps the others waiting
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    forming: bool = False  # the group does not train yet
    _since: float | None = None  # the last progress; None: there is no group
    _looked: bool = False  # in this stall
    _is_over: bool = False  # no process is looked at any more

    def begin(self, now: float, *, forming: bool = False) -> None:
        """A generation begins to train, or to form: while it forms only stopped processes count as hung."""
        if not self._is_over:
            self._since, self._looked, self.forming = now, forming, forming

    def stepped(self, step_s: float, now: float) -> None:
        self._step_s.append(step_s)
        if self._since is not None:  # else its group is over, and the next one is waited for
            self.begin(now)

    def end(self, *, for_good: bool = False) -> None:
        """There is no group; `for_good`: nor will there be one."""
        self._since, self.forming, self._is_over = None, False, self._is_over or for_good

    @property
    def training(self) -> bool:
        """Whether there is a group that trains."""
        return self._since is not None and not self.forming

    @property
    def step_s(self) -> float:
        """That a step takes; 0: not known."""
        return median(self._step_s) if self._step_s else 0.0

    @property
    def patience_s(self) -> float:
        """Without a step for so long, the group stands still; how long steps take says little of one that forms."""
        if not self._step_s:
            return self.silence_s
        steps_s = STEPS * self.step_s + SECONDS
        return min(steps_s, BEYOND_S) if self.forming else steps_s

    def stalled_s(self, now: float) -> float:
        """For how long the group has stood still; 0 while it does not."""
        if self._since is None or now - self._since < self.patience_s:
            return 0.0
        return now - self._since

    def wants_a_look(self, now: float) -> bool:
        """Once a stall, after long: what does each rank do?"""
        if self._looked or self.stalled_s(now) < STUCK_SHARE * self.timeout_s:
            return False
        self._looked = True
        return True

    def stuck(self, now: float) -> bool:
        """Whether a step takes so long that a rank that runs may hang. No phase is given up before."""
        return self.stuck_s > 0 and not self.forming and self.stalled_s(now) > BEYOND_S

    def hung(self, pulses: Sequence[Pulse]) -> list[Pulse]:
        """The processes that keep the others waiting."""
        return [
            pulse
            for pulse in pulses
            if not pulse.state or pulse.silent_s > self.silence_s or (pulse.stopped and pulse.silent_s > STOPPED_S)
        ]


def left_behind(before: Mapping[Worker, Pulse], now: Mapping[Worker, Pulse]) -> list[Worker]:
    """Ranks that run and are not where others wait: in no collective, and in none since `before`, as some are in one.

    Both are answers to the question where they are, of all of a group. Empty where it is most of them: then it is
    something else that they lack.
    """
    found = [
        worker
        for worker, pulse in now.items()
        if worker in before
        and before[worker].asked < pulse.asked
        and before[worker].collectives == pulse.collectives
        and not pulse.waits
        and not before[worker].waits
    ]
    return found if 2 * len(found) <= len(now) and any(pulse.waits for pulse in now.values()) else []


def hanging(
    found: Iterable[Worker], now: Mapping[Worker, Pulse], usual: Usual, compiling: Collection[Worker] = ()
) -> list[Worker]:
    """Those left behind whose phase takes far longer than is usual, and than it took the others to come to a wait.

    What the first steps of others took says nothing of those that compile in theirs.
    """
    waits_s = median([pulse.waits_s for pulse in now.values() if pulse.waits] or [0.0])

    def limit_s(worker: Worker) -> float:
        phase, phase_s = now[worker].phase, now[worker].phase_s
        compiles = phase is Phase.first_step and worker in compiling
        return max(usual.limit_s(phase, max(0.0, phase_s - waits_s)), usual.unknown_s if compiles else 0.0)

    return [worker for worker in found if now[worker].phase_s > limit_s(worker)]


@dataclass(frozen=True)
class Suspect:
    """A member that does not get on, and why it is thought so."""

    member: Member
    dark: bool  # its node's keeper does not answer either
    detail: str
    phase: str = ""  # in which it hangs
    is_gone: bool = False  # its node's keeper has seen it end, before it has told of that

    @property
    def cause(self) -> Cause:
        """What it is a loss by."""
        return Cause.node_silent if self.dark else Cause.worker_died if self.is_gone else Cause.worker_hung


@dataclass
class _Asked:
    """One question to many keepers."""

    number: int
    question: Question
    waiting: set[str]  # for these nodes' answers
    at: float
    answers: dict[str, Any] = field(default_factory=dict)  # None: the keeper is gone, which shows by itself
    looked_at: int = 0  # of the answers, the first so many
    hung: dict[Worker, Pulse] = field(default_factory=dict)  # of these


class Health:
    """Finds which member keeps a group from getting on, by asking the keepers of its nodes, once it stands still.

    While it trains nothing is asked, but how fast devices are, and how GPUs are, from time to time.
    """

    def __init__(
        self,
        stalls: Stalls,
        out: Outbox,
        silent: SilentKeepers,
        *,
        usual: Usual | None = None,
        probe_every_steps: int = 0,
        on_gpus: bool = False,
        topologies: Table | None = None,
        first_steps: FirstSteps | None = None,
    ) -> None:
        """Ranks probe their devices every so many steps; GPUs can be asked how they are. `usual` is of phases, by
        `topologies` some ranks have more to do than others. `first_steps` hears of phases with limits of their own."""
        self._silent, self._first_steps = silent, first_steps or FirstSteps(stalls.timeout_s)
        self.stalls, self._probe_every_steps, self._on_gpus = stalls, probe_every_steps, on_gpus
        self._topologies = topologies or {}
        self.usual = usual or Usual(stalls.stuck_s)
        self.suspects = Suspects(out)
        self._gpus_are_read = False  # since the newest group began to train
        self.gpus: dict[str, list[GpuReading]] = {}  # by node, what they told when they were asked last
        self._out, self._number = out, 0
        self._to_ask: deque[Ask] = deque()  # the rest of questions that nothing waits for
        self._read_at = 0.0  # when it is asked next what ranks spend their time on
        self._members: tuple[Member, ...] = ()  # its ranks
        self._links: _Asked | None = None
        self._check_up: _Asked | None = None
        self._hardware: _Asked | None = None
        self._pulses: _Asked | None = None
        self._stacks: _Asked | None = None
        self._where: dict[Worker, Pulse] = {}  # when that was asked before
        self._suspects: list[Suspect] = []
        self._ask_at = 0.0
        self._gone_since: dict[str, float] = {}  # nodes whose keepers are gone
        self.lost_at: dict[str, float] = {}  # nodes to which a held connection has ended

    def begin(self) -> None:
        """Another group begins to train: what was asked of the one before is of no use."""
        self._check_up, self._links, self._gpus_are_read = None, None, False
        self._to_ask.clear()
        self.suspects.begin()

    def lost(self, members: Iterable[Member]) -> None:
        """Ranks are gone; a reading that is under way has them still."""
        self._check_up = None
        self.suspects.lost({(member.node, member.pid) for member in members})

    def look_at_devices(self, step: int, now: float, nodes: Sequence[str], members: Sequence[Member]) -> None:
        """What ranks spend their time on, now and then; how GPUs are, after probes and with a group's first step.

        GPUs that have failed cannot be asked any more.
        """
        if self._links is not None and now - self._links.at > LINKS_S:
            self._finish_links(self._links, now)
        every = self._probe_every_steps
        probed = every > 0 and (step - 1) % every == 0  # all have, a step before
        awaits = self._check_up is not None and now - self._check_up.at < LATE_S  # behind a slow link, for one
        due = bool(nodes) and now >= self._read_at and not awaits
        if due:
            self._read_at = now + max(READ_S, len(nodes) / READ_PER_S)
            self._check_up = self._ask(Question.HEARTBEATS, nodes, now, at_once=AT_ONCE)
            self._members = tuple(members)
        if self._on_gpus and (due or probed or not self._gpus_are_read):
            self._gpus_are_read = True
            self._hardware = self._ask(Question.GPUS, nodes, now, at_once=AT_ONCE)

    def answered(self, number: int, node: str, answer: Any, now: float) -> None:
        """A keeper has answered; one that was asked something else meanwhile is late."""
        for asked in (self._check_up, self._hardware, self._pulses, self._stacks, self._links):
            if asked is not None and asked.number == number and node in asked.waiting:
                asked.waiting.remove(node)
                asked.answers[node] = answer
                if asked is self._hardware and answer:
                    self.gpus[node] = answer
        if self._check_up is not None and not self._check_up.waiting:
            self._finish_check_up(self._check_up, now)
        if self._links is not None and not self._links.waiting:
            self._finish_links(self._links, now)

    def connection_lost(self, event: ConnectionLost, now: float) -> None:
        """Its keeper's process is gone, or does not answer: it alone, or all of the node."""
        self.lost_at[event.node] = now

    def knock(self, now: float, membership: Membership) -> None:
        """Have the workers' own ports tell whether a node is dead to which a connection has ended."""
        self.lost_at = {node: at for node, at in self.lost_at.items() if now - at < KNOCK_S}
        if self.lost_at and (there := [each for each in membership.survivors if each.node in self.lost_at]):
            self._out.append(Probe(tuple(there)))

    def tick(self, now: float, members: Iterable[Member], nodes: Sequence[str]) -> list[Suspect]:
        """The members of the current group that are to be given up; `nodes` are its own.

        Without keepers nothing can be asked, and no member is given up.
        """
        if self._to_ask:
            self._out.append(self._to_ask.popleft())
        stands_still = self.stalls.stalled_s(now) > 0
        if not nodes or not stands_still:
            self._first_steps.is_watched = False
            self._pulses, self._stacks, self._suspects = None, None, []
            self._where.clear()
            self._gone_since.clear()
            return []
        if self._stacks is not None:
            return self._finish_look(self._stacks, now)
        if self.stalls.wants_a_look(now):
            self._begin_look(now, nodes)
            return []
        if self._pulses is None and now > self._ask_at:
            stuck = self.stalls.stuck(now) or self._newcomers_may_hang(now)
            self._pulses = self._ask(Question.POSITIONS if stuck else Question.HEARTBEATS, nodes, now)
        if self._pulses is not None:
            self._suspects = self._found(self._pulses, now, list(members))
            if self._suspects:
                self._pulses = None
                self._begin_look(now, nodes)
        return []

    def _newcomers_may_hang(self, now: float) -> bool:
        forming = self.stalls.forming and self.stalls.stuck_s > 0
        return forming and bool(self._first_steps.overdue(now, NEWCOMERS_SHARE))

    def _ask(self, question: Question, nodes: Sequence[str], now: float, *, at_once: int = 0) -> _Asked:
        """`at_once`: so many of them, and the others bit by bit; 0: all."""
        self._number += 1
        every = at_once or max(1, len(nodes))
        parts = [Ask(self._number, question, tuple(nodes[at : at + every])) for at in range(0, len(nodes), every)]
        self._out.extend(parts[:1])
        self._to_ask.extend(parts[1:])
        return _Asked(self._number, question, set(nodes), now)

    def _found(self, asked: _Asked, now: float, members: list[Member]) -> list[Suspect]:
        new = list(islice(asked.answers.items(), asked.looked_at, None))  # every tick comes here while one is out
        asked.looked_at = len(asked.answers)
        asked.hung |= {(node, pulse.pid): pulse for node, answer in new for pulse in self.stalls.hung(answer or [])}
        apart = {(node, each.pid) for node, answer in new for each in answer or [] if each.phase in OWN_LIMITS}
        if apart and any((member.node, member.pid) in apart for member in members):
            self._first_steps.set_back(now)
        suspects = []
        for member in members if asked.hung else ():
            pulse = asked.hung.get((member.node, member.pid))
            if pulse is not None:
                how = "stopped" if pulse.stopped else f"in state {pulse.state}" if pulse.state else "gone"
                detail = f"process {pulse.pid} {how}, last ran {pulse.silent_s:.1f} s ago"
                suspects.append(Suspect(member, False, detail, is_gone=not pulse.state))
        waited = now - asked.at
        asked.waiting -= self._silent.hanging(asked.waiting, asked.at, now)  # the keeper alone hangs
        if waited > DARK_S:
            said = f"nothing was heard of the node for {waited:.1f} s"
            suspects += [Suspect(member, True, said) for member in members if member.node in asked.waiting]
        suspects += self._without_keeper(new, now, members)
        where = asked.question is Question.POSITIONS
        if not asked.waiting and where:
            suspects += self._left_behind(asked.answers, members)
        if not asked.waiting or waited > DARK_S:
            again_s = WHERE_AGAIN_S if where else ASK_AGAIN_S
            self._ask_at = now + max(again_s, len(asked.answers) / ASKED_PER_S)
            self._pulses, self._first_steps.is_watched = None, True
        return suspects

    def _without_keeper(self, answers: Iterable[tuple[str, Any]], now: float, members: list[Member]) -> list[Suspect]:
        """Members on nodes whose keepers are gone for long: Ray would have told of them, or told a coordinator before.

        A keeper alone that died is back before that. `answers` are new ones, by node.
        """
        for node, answer in answers:
            if answer is None:
                self._gone_since.setdefault(node, now)
            else:
                self._gone_since.pop(node, None)
        gone = {node for node, since in self._gone_since.items() if now - since > self.stalls.silence_s}
        those = [each for each in members if each.node in gone] if gone else []
        return [Suspect(each, True, "its keeper is gone, and does not come back") for each in those]

    def _left_behind(self, answers: Mapping[str, list[Pulse] | None], members: list[Member]) -> list[Suspect]:
        pulses = {(node, pulse.pid): pulse for node, answer in answers.items() for pulse in answer or []}
        found = {(each.node, each.pid): each for each in members}
        before, self._where = self._where, {worker: pulses[worker] for worker in found if worker in pulses}
        self.usual.learn(pulse.longest_s for pulse in self._where.values())
        suspects = []
        behind = left_behind(before, self._where)
        first_steps = self._first_steps
        if self.stalls.forming:  # what ranks do then differs: the time that newcomers have decides, reading apart
            new = [worker for worker in behind if found[worker].id in first_steps.new]
            late = [worker for worker in new if self._where[worker].phase is not Phase.restore]
        else:
            compiling = [worker for worker in behind if first_steps.may_compile(found[worker].id)]
            late = hanging(behind, self._where, self.usual, compiling)
        for worker in late:
            pulse = self._where[worker]
            usual_s = self.usual.longest_s.get(pulse.phase)
            known = f"{usual_s:.1f} s is the longest so far" if usual_s else "how long that takes was not known"
            detail = (
                f"process {worker[1]} runs, and is not in the collective that others wait in: in {pulse.phase} for "
                f"{pulse.phase_s:.1f} s, {known}"
            )
            suspects.append(Suspect(found[worker], False, detail, pulse.phase))
        return suspects

    def _finish_check_up(self, asked: _Asked, now: float) -> None:
        self._check_up = None
        pulses = {(node, pulse.pid): pulse for node, answer in asked.answers.items() for pulse in answer or []}
        self.usual.learn(pulse.longest_s for pulse in pulses.values())
        ranks = {(each.node, each.pid): rank for rank, each in enumerate(self._members)}
        if ranks and ranks.keys() <= pulses.keys():
            topology = self._topologies.get(len(ranks))
            self.suspects.read({worker: pulses[worker].spent for worker in ranks}, ranks, now, topology=topology)
            self.suspects.show(self.gpus, self._members)
            if self.suspects.wants_links and self._links is None:
                self._links = self._ask(Question.LINKS, sorted({node for node, _ in ranks}), now)

    def _finish_links(self, asked: _Asked, now: float) -> None:
        """With what was answered: the nodes at its other ends tell of a link whose own node cannot."""
        self._links = None
        found = {node: rates or {} for node, rates in asked.answers.items()}
        self.suspects.linked(found, now, all_told=not asked.waiting)

    def _begin_look(self, now: float, nodes: Sequence[str]) -> None:
        first = {suspect.member.node for suspect in self._suspects if not suspect.dark}
        self._stacks = self._ask(Question.STACKS, sorted(nodes, key=lambda node: node not in first)[:LOOKED_AT], now)

    def _finish_look(self, asked: _Asked, now: float) -> list[Suspect]:
        if asked.waiting and now - asked.at < LOOK_S:
            return []
        found = {node: text or "" for node, text in asked.answers.items()}
        self._out.append(SaveStacks(self.stalls.stalled_s(now), found))
        suspects, self._suspects, self._stacks = self._suspects, [], None
        return suspects

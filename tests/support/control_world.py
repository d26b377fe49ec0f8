"""A world in virtual time around `regrow.control.core.Control`: workers, keepers with memory, storage, a log, faults.

Everything is as simple as the promises allow: the training state is one number that every step changes, so that a state
made of the wrong steps is seen; a snapshot is that number once for each shard. Messages take random times, overtake one
another and, where nobody waits for them, get lost. What must never be is checked as it happens (`Broken`).
"""

import contextlib
import heapq
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regrow.config.check import topologies, world_sizes
from regrow.config.schema import CheckpointConfig, ClusterConfig, PretrainConfig, SnapshotConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control, Fenced
from regrow.control.health import Pulse
from regrow.control.membership import Formation, Member
from regrow.control.past import Past, formed, group_of
from regrow.control.peers import FAN_OUT
from regrow.control.states import Answer, Forming, RowAnswer, Training
from regrow.control.values import NEVER, NOTHING, SnapshotAck, Version
from regrow.control.verification import Checks
from regrow.record.events import Cause
from regrow.record.log import METRIC_KEYS, next_generation
from regrow.runtime.clock import ControlClock
from regrow.runtime.kept_rows import KeptRows

STEP_S, POLL_S, TICK_S = 1.0, 0.3, 0.5
VIEW_S = 2.0  # between tellings of all that Ray sees
COLLECTIVE_S = 8.0  # after which a rank that waits for a dead one fails by itself
NO_TIME = float("-inf")
LAST_ROOM_S = 10.0  # that a last step waits for room for its snapshot
LEAVE_S = 20.0  # after which the driver does not wait for workers any more
MOST_ON_WAY = 6  # of rank 0's calls of rows
TOLD_TWICE, LATE_S = 0.2, 5.0  # offers of workers, and how late
SLOTS = 3
KEEP = 2
FENCED = (e.Began, e.Row, e.RowsAgain, e.Verified, e.CheckpointWanted, e.Leaving, e.NotFinite, e.Logged)
KINDS = [
    "worker",
    "worker",
    "node",
    "keeper",
    "coordinator",
    "stop",
    "notice",
    "maintenance",
    "zombie",
    "broke",
    "dark",
    "nonfinite",
    "cut",
]


class Broken(AssertionError):
    """A promise was not kept."""


def advance(state: int, step: int) -> int:
    """The training state after a step, from the one before it."""
    return (state * 1_000_003 + step) % (1 << 61)


@dataclass(frozen=True)
class Shard:
    """A snapshot file: one node's part of a version."""

    moment: Version
    origin: str
    num_shards: int
    state: int
    copy_of: str = ""
    writers: int = 1


def is_whole(version: Version, held: Iterable[Shard]) -> bool:
    found = {each.origin: each for each in held if each.moment == version}
    return bool(found) and len(found) == next(iter(found.values())).num_shards


@dataclass
class Worker:
    id: str
    node: str
    pid: int
    after: int = 0
    generation: int = 0  # that it trains in, or tries to; 0: it waits for one
    alive: bool = True
    stopped: bool = False
    port: int = 1  # another one each time that it comes
    rows: KeptRows = field(default_factory=KeptRows)
    could_have: list[int] = field(default_factory=list)  # steps whose rows it could send again as rank 0


def state_of(worker: Worker) -> str:
    """As the kernel says."""
    return "" if not worker.alive else "T" if worker.stopped else "S"


@dataclass
class Node:
    name: str
    alive: bool = True
    up: bool = True  # its keeper
    dark: bool = False
    slots: list[Shard | None] = field(default_factory=lambda: [None] * SLOTS)
    copies: dict[tuple[str, int], Shard] = field(default_factory=dict)  # by origin and slot
    heard: tuple[int, Version, Version] = (-1, NEVER, NEVER)  # number of the message, what is committed, what is pinned
    kept: tuple[Version, ...] = ()
    remembered: int = 0  # the newest generation of which its keeper has heard
    peers: tuple[str, ...] = ()
    place: int = -1  # number of the message

    @property
    def held(self) -> list[Shard]:
        return [each for each in self.slots if each is not None] + list(self.copies.values())

    def hear(self, number: int, newest: Version, pinned: Version, kept: tuple[Version, ...] = ()) -> None:
        if number > self.heard[0]:
            self.heard, self.kept = (number, newest, pinned), kept
            keep = lambda s: s.moment.generation >= newest.generation or s.moment in (pinned, *kept)  # noqa: E731
            self.slots = [each if each is not None and keep(each) else None for each in self.slots]
            self.copies = {key: each for key, each in self.copies.items() if keep(each)}

    def free_slot(self) -> int | None:
        """Never the newest committed one, nor one that is on its way to storage, nor the newest of all."""
        _, newest, pinned = self.heard
        for number, each in enumerate(self.slots):
            if each is None or (each.moment not in (newest, pinned, *self.kept) and each.moment < newest):
                return number
        return None


@dataclass
class Run:
    """What a generation's ranks share: they are in step, or all wait."""

    formation: Formation
    ready: set[str] = field(default_factory=set)
    began: bool = False
    over: bool = False
    step: int = 0
    state: int = 0
    checks: Checks | None = None
    sent: list[e.Row | e.RowsAgain] = field(default_factory=list)  # the last ones of rank 0
    wanted: int | None = None  # rows from this step on, as rank 0 was told last

    def generation_is_over(self, control: Control) -> bool:
        """Whether control has broken the group off just now."""
        return not isinstance(control.state, Training)


class World:
    """Call `run`; faults are drawn from `rng`, or given."""

    control_class: type[Control] = Control
    repeats_views = True  # Ray Train's side does
    loses_reports = True  # now and then
    damages = True  # storage does, what it is given

    def __init__(
        self,
        seed: int,
        *,
        num_nodes: int,
        last_step: int,
        min_workers: int = 1,
        copies: int = 1,
        timeout_s: float = 30.0,
        num_slices: int | None = None,
        verify_every_steps: int = 0,
        cp: int = 1,
        pp: int = 1,
        fan_out: int | None = None,
    ) -> None:
        """`num_slices`: of a batch; then the ranks that make no step faster are spares. `cp` x `pp`: ranks of
        a unit; with `pp` it has others where ranks make no whole units of these.
        `fan_out`: of a node; by the seed's turn nodes speak for others, or each for itself."""
        self.fan_out = fan_out or (2 if seed % 2 else FAN_OUT)
        self.rng, self.now, self.last_step = random.Random(seed), 1000.0, last_step
        self.config = PretrainConfig(
            cluster=ClusterConfig(min_workers=min_workers, max_workers=num_nodes, wait_for_workers_s=600.0),
            checkpoint=CheckpointConfig(every_steps=4, keep=KEEP, timeout_s=timeout_s),
            snapshot=SnapshotConfig(copies=copies),
        )
        self.config.cluster.verify_every_steps, self.config.train.steps = verify_every_steps, last_step
        self.config.parallel.cp, self.config.parallel.pp, self.config.parallel.least_pp = cp, pp, 1
        self.corrupt: set[str] = set()  # nodes that compute wrong, whichever worker of theirs does
        if num_slices is not None:
            self.config.optim.num_slices, self.config.cluster.spare_workers = num_slices, "auto"
        self.sizes = set(world_sizes(self.config).values())  # that a group may have
        self.meshes = {size: each.mesh for size, each in topologies(self.config).items()}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count(1)
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, Worker] = {}
        self.runs: dict[int, Run] = {}
        self.rows: list[dict[str, Any]] = []
        self.durable_rows = 0  # that no death of the coordinator takes away
        self.logged: tuple[int, list[dict[str, Any]]] | None = None  # events and rows, while the log cannot be written
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        self.storage: dict[int, tuple[Version, int]] = {}  # step -> what is committed there, and its state
        self.parts: dict[tuple[int, str], int] = {}  # of an upload, by origin
        self.committed: dict[Version, dict[str, frozenset[str]]] = {}  # in memory; which nodes have which one's part
        self.newest_generation, self.lost_at = 0, Version()
        self.losses: list[tuple[float, str]] = []
        self.without_copies: dict[Version, set[str]] = {}  # nodes whose part of a committed version has none
        self.taken_at: dict[Version, float] = {}  # when the ranks took a snapshot
        self.met: set[str] = set()  # members whose liveness ports this coordinator has reached
        self.dead: dict[tuple[str, int], str] = {}  # processes that Ray has found dead, and why
        self.draining: dict[str, float] = {}
        self.asked: dict[str, float] = {}  # nodes that are drained for maintenance, since when
        self.cut: set[tuple[str, str]] = set()  # links over which no copies go
        self.max_nodes = num_nodes
        self.num_coordinators, self.up = 0, True
        self.order = random.Random(-1 - seed)  # of calls that are made again: other chances keep theirs
        self.stands_still = False  # it is not up, and will go on with what it knows
        self.newest_committed = NEVER  # in memory, of those that the run has not gone back before
        self.went_wrong = 0  # the newest generation whose state was not finite: its snapshots are not to be used
        self.was_stored: set[int] = set()  # steps of all checkpoints so far, without those that were damaged
        self.trouble_at = NO_TIME  # of storage: it was away, or slow
        self.away_until = NO_TIME  # that it is
        self.published_at = NO_TIME  # when this coordinator's last write to it so far is over: one comes after another
        self.rows_of: int | None = None  # the generation of which this coordinator's log takes rows
        self.done = self.stop_asked = self.over = False
        self.given_up = ""
        self.missing: int | None = None  # the step that the driver said is not in storage
        self.leave_at, self.settles_since = NO_TIME, NO_TIME
        self.control = self._control(Past())
        for _ in range(num_nodes):
            self.add_node()
        self.after(TICK_S, self._tick)
        self.after(POLL_S, self._drive)
        self.after(VIEW_S, self._view)

    # time

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.numbers), what))

    def soon(self) -> float:
        """How long a message takes: most are quick, some are not."""
        return self.rng.random() * (0.05 if self.rng.random() < 0.9 else 3.0)

    def run(self, until_s: float) -> None:
        """Let things happen until the run is over, for so long at most."""
        end = self.now + until_s
        while self.queue and not self.over:
            at, _, what = heapq.heappop(self.queue)
            if at > end:
                raise Broken(f"no end after {until_s} s: {self.control.state}, step {len(self.rows)}")
            self.now = max(self.now, at)
            what()

    # the driver

    def _drive(self) -> None:
        """Wait for the workers to end, then for what is committed to be in storage; then it is over."""
        if self.over:
            return
        self.after(POLL_S, self._drive)
        if not self.up:
            return
        if self.stop_asked:  # again and again: a coordinator that was restarted does not know
            self.tell(e.StopAsked("interrupted"))
        if self.given_up:
            self.tell(e.Failed(self.given_up))
        if self.leave_at == NO_TIME:
            if self.given_up or self.control.is_over:
                self.leave_at = self.now + LEAVE_S * self.rng.random()
        elif self.now > self.leave_at:
            self.settles_since = self.now if self.settles_since == NO_TIME else self.settles_since
            self.tell(e.Settle())
            if not self.control.settling.busy:
                self._end()

    def _end(self) -> None:
        """What is committed is in storage, or one line says what is missing; and storage worked, so it is."""
        self.over, self.missing = True, self.control.settling.unstored
        newest = self.newest_committed
        if newest == NEVER or self.is_stored(newest):
            return
        if self.missing != newest.step and not self._lost_some_of(newest):
            raise Broken(f"the run ended, {newest} is not in storage, and {self.missing} was said to be missing")
        slow_s = 2 * self.config.checkpoint.timeout_s  # one that was begun before may be waited for in vain
        if self.trouble_at < self.settles_since - slow_s and not self._lost_some_of(newest):
            raise Broken(f"the run ended, storage worked, and {newest} is not in it")

    def is_stored(self, version: Version) -> bool:
        """This step of the run, or a later one."""
        return max(self.storage, default=-1) >= version.step

    def _lost_some_of(self, version: Version) -> bool:
        """Whether a part of it is in no memory any more, or a node was away whose part has no copy."""
        held = [shard for node in self.nodes.values() if node.alive and node.up for shard in node.held]
        gone = {name for _, name in self.losses}
        without_copies = self.without_copies.get(version, set()) & gone  # as `copies_moved` said
        return not is_whole(version, held) or bool(without_copies)

    def leave_at_once(self) -> None:
        """Ctrl-C a second time: the driver says what stays behind, where the coordinator answers."""
        if not self.over:
            self.over, self.missing = True, self.control.settling.unstored if self.up else -1
            newest = self.newest_committed
            known = newest == NEVER or self.is_stored(newest) or self.missing in (newest.step, -1)
            if not known and not self._lost_some_of(newest):
                raise Broken(f"left at once, {newest} is not in storage, and {self.missing} was said to be missing")

    def kill_driver(self) -> None:
        """Coordinator and workers go with it, keepers stay; the same command is run again."""
        if not self.up or self.over:
            return
        self.up = False
        for worker in self.workers.values():
            worker.alive = False
            if worker.generation:
                self.runs[worker.generation].over = True
        del self.rows[self.durable_rows :]
        self._storage_is_back()
        self.after(5.0 + 20.0 * self.rng.random(), self._start_again)

    def _start_again(self) -> None:
        self.events.append((self.now, "submitted", {}))
        self.leave_at, self.settles_since, self.given_up = NO_TIME, NO_TIME, ""
        self._take_up(restarted=False)
        for node in self.nodes.values():
            if node.alive:
                self.add_worker(node)

    def run_for(self, seconds: float) -> None:
        """Let things happen for so long."""
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end and not self.over:
            at, _, what = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            what()
        self.now = end

    # the coordinator

    def _control(self, past: Past) -> Control:
        self.num_coordinators += 1
        self.met, self.published_at, self.rows_of = set(), NO_TIME, None
        self.clock = ControlClock(self.now, lambda: self.now)
        return self.control_class(
            self.config,
            is_whole=is_whole,
            now=self.clock.now,
            past=past,
            first_message=self.num_coordinators * 10**6,
            fan_out=self.fan_out,
        )

    def tell(self, event: e.Event, *, zombie: bool = False) -> Any:
        """An event to control; what it replies. Refused where its generation is over."""
        reply = None
        for command in self.control.on(event, self.clock.now):
            if isinstance(command, c.Reply):
                reply = command.value
            else:
                self._carry_out(command)
        if isinstance(event, FENCED) and event.generation != self.newest_generation:
            told = f"{type(event).__name__} of generation {event.generation}"
            raise Broken(f"{told} was taken in {self.newest_generation}")
        return reply

    def send(self, event: e.Event, seconds: float | None = None, *, lossy: bool = False) -> None:
        """The same, some time from now; calls wait for a coordinator that is away, reports that may be lost do not, but
        for one that stands still."""
        if lossy and self.loses_reports and self.rng.random() < 0.1:
            return

        def arrive() -> None:
            if self.up:
                self.tell(event)
            elif not lossy or self.stands_still:
                self.after(0.5, arrive)

        self.after(self.soon() if seconds is None else seconds, arrive)

    def _tick(self) -> None:
        if self.up:
            self.clock.tick()
            for command in self.control.tick(self.clock.now):
                self._carry_out(command)
        self.after(TICK_S, self._tick)

    def _view(self) -> None:
        """Ray Train tells all that it sees again: a coordinator that was restarted has forgotten."""
        if self.up and self.repeats_views:
            for process in list(self.dead):
                self._tell_of(process)
            self.tell(self._notice())
        self.after(VIEW_S, self._view)

    def _notice(self) -> e.Notice:
        return e.Notice({node: at - self.clock.stood_s for node, at in self.draining.items()}, -self.clock.stood_s)

    def _tell_of(self, process: tuple[str, int]) -> None:
        left = sum(each.alive for each in self.workers.values())
        self.tell(e.Died((process,), left, "worker_died", self.dead[process]))

    def restart_coordinator(self, *, lost_events: int = 0) -> None:
        """`lost_events`: the log's last ones were not written yet."""
        if self.up:
            self._lose_coordinator(lost_events)
            self.after(0.2 + self.rng.random(), self._come_back)

    def _lose_coordinator(self, lost_events: int) -> None:
        self.up = False
        del self.events[len(self.events) - lost_events :]
        lost = min(self.rng.choice((0, 0, 1, 2, 6)), len(self.rows) - self.durable_rows)
        del self.rows[len(self.rows) - lost :]
        self._storage_is_back()

    def take_storage_away(self) -> None:
        """With the log, until a coordinator is started anew: one that is waits for it."""
        if self.up and not self.over and self.logged is None:
            self.logged, self.away_until = (len(self.events), list(self.rows)), float("inf")

    def _storage_is_back(self) -> None:
        if self.logged is not None:
            num_events, self.rows = self.logged
            del self.events[num_events:]
            self.durable_rows, self.logged, self.away_until = len(self.rows), None, NO_TIME

    def stand_still(self, seconds: float) -> None:
        """The coordinator's process is stopped for so long: it has forgotten nothing, and what was said waits."""
        if not self.up:
            return

        def go_on() -> None:
            self.up, self.stands_still = True, False

        self.up, self.stands_still = False, True
        self.after(seconds, go_on)

    def _unwritten(self) -> int:
        """How many of the log's last events may not be written yet: none that was waited for, nor any before that.

        Nor what is said of rows, as those that follow are written after it, and stay here."""
        awaited = ("submitted", "forming", "trained", "drain", "undrain", "corruption", "note")
        late = 0
        for _, name, fields in reversed(self.events[-3:]):
            if name in awaited or fields.get("cause") == Cause.nonfinite:
                break
            late += 1
        return self.rng.randint(0, late)

    def _come_back(self) -> None:
        self._take_up(restarted=True)
        run = self.runs.get(self.newest_generation)
        if run is not None and run.sent:
            self._make_again(run, self.workers[run.formation.members[0].id])

    def _make_again(self, run: Run, first: Worker) -> None:
        """Ray does so with calls that had no answer yet, in any order, where the process that made them is there."""
        sent = run.sent[self.order.randint(0, len(run.sent)) :]
        self.order.shuffle(sent)
        if first.alive and not first.stopped:
            with contextlib.suppress(Fenced):
                for call in sent:
                    self._call(call, run)

    def _take_up(self, *, restarted: bool) -> None:
        """Another coordinator, which reads the log and finds the keepers that are up."""
        log = [{"time": at, "event": name, **fields} for at, name, fields in self.events]
        past = Past.of(
            log,
            generation=next_generation(log) - 1,
            logged=self.rows[-1]["step"] if self.rows else 0,
            stored=self.storage,
            restarted=restarted,
        )
        self.control = self._control(past)
        self.up = True
        alive = [node for node in self.nodes.values() if node.alive and node.up]
        if self.control.newest_snapshot is None and any(node.alive and not node.up for node in self.nodes.values()):
            self.newest_committed = NEVER  # a keeper and the coordinator died at once: nothing is promised
        heard = max((node.heard[1] for node in self.nodes.values() if node.alive), default=NEVER)
        self.newest_committed = min(self.newest_committed, heard)  # that a later one was went with the coordinator
        for node in alive:
            self.tell(self._keeper_up(node))
        remembered = max((node.remembered for node in alive), default=NOTHING)
        self.tell(e.KeepersFound(tuple((node.name, node.heard[1], node.held) for node in alive), remembered))
        if restarted:
            self.tell(group_of(log, self.control.generation))

    # what control wants done

    def _carry_out(self, command: c.Command) -> None:
        name = f"_do_{type(command).__name__}"
        getattr(self, name, lambda command: None)(command)

    def _do_Form(self, command: c.Form) -> None:
        if command.generation <= self.newest_generation:
            raise Broken(f"generation {command.generation} after {self.newest_generation}")
        ids = [member.id for member in command.members]
        if len(set(ids)) != len(ids) or len(ids) not in self.sizes:
            raise Broken(f"a group of {ids}")
        self.newest_generation = command.generation
        for member in command.members:
            self.nodes[member.node].remembered = command.generation
        self.runs[command.generation] = Run(Formation(command.generation, command.members))
        self.events.append((self.now, "forming", formed(command.generation, command.members)))

    def _do_Record(self, command: c.Record) -> None:
        self.durable_rows = len(self.rows)  # one writer, in order, and events are flushed
        self.events.append((self.now, command.event, dict(command.fields)))
        if command.event == "corruption" and self.newest_committed.step > command.fields["verified_step"]:
            self.newest_committed = NEVER

    def _do_GiveUp(self, command: c.GiveUp) -> None:
        self.given_up = command.message

    def _do_BeginRows(self, command: c.BeginRows) -> None:
        if command.generation != self.newest_generation:
            raise Broken(f"rows of generation {command.generation} in {self.newest_generation}")
        self.rows_of = command.generation
        self.rows = [row for row in self.rows if row["step"] <= command.start_step]
        self.durable_rows = min(self.durable_rows, len(self.rows))

    def _do_LogRow(self, command: c.LogRow) -> None:
        row = command.row
        if self.rows_of != self.newest_generation:
            raise Broken(f"a row of step {row['step']}, where no rows of {self.newest_generation} have begun")
        if row["generation"] != self.newest_generation and not command.is_late:
            raise Broken(f"a row of generation {row['generation']} in {self.newest_generation}")
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            raise Broken(f"a row of step {row['step']} after {self.rows[-1]['step']}")
        last = self.rows[-1]["step"] if self.rows else 0
        could_have = self.workers[self.runs[self.newest_generation].formation.members[0].id].could_have
        if steps := [each for each in could_have if last < each < row["step"]]:
            raise Broken(f"rows of steps {steps} are left out, and rank 0 could have them")
        self.rows.append(dict(row))

    def _do_Kill(self, command: c.Kill) -> None:
        for worker in self.workers.values():
            if (worker.node, worker.pid) == (command.node, command.pid) and self.nodes[worker.node].up:
                self.after(0.05, lambda worker=worker: self.kill_worker(worker))  # type: ignore[misc]

    def _do_Connect(self, command: c.Connect) -> None:
        self.met |= {member.id for member in command.members if self.workers[member.id].alive}

    def _do_Probe(self, command: c.Probe) -> None:
        known = [member for member in command.members if member.id in self.met]
        refused = tuple(m.id for m in known if not self.workers[m.id].alive)
        if refused and self.rng.random() < 0.7:
            self.send(e.PortRefused(refused), 0.1, lossy=True)

    def _do_Hail(self, command: c.Hail) -> None:
        """A node that is dark here is one whose keeper alone says nothing."""
        at = {worker.node for worker in self.workers.values() if worker.alive and not worker.stopped}
        if running := tuple(node for node in command.nodes if node in at and self.nodes[node].alive):
            self.send(e.Running(running), 0.1, lossy=True)

    def _do_RestartKeeper(self, command: c.RestartKeeper) -> None:
        node = self.nodes[command.node]
        node.dark = False
        self.kill_keeper(node)

    def _do_Ask(self, command: c.Ask) -> None:
        is_reading = command.question is not c.Question.HOLDINGS and not self.control.health.stalls.stalled_s(
            self.clock.now
        )
        for name in command.nodes:
            node = self.nodes[name]
            if node.alive and node.up and not node.dark:
                # a reading draws no chance: a seed keeps its schedule
                answer = e.Answered(command.number, name, self._answer(command, node))
                self.send(answer, 0.05 if is_reading else None, lossy=not is_reading)
            elif not node.alive:
                self.send(e.Answered(command.number, name, None), 1.0)

    def _answer(self, asked: c.Ask, node: Node) -> Any:
        question = asked.question
        if question is c.Question.HOLDINGS:
            return [each for each in node.held if each.moment >= asked.since]
        if question in (c.Question.HEARTBEATS, c.Question.POSITIONS):
            return [
                Pulse(w.pid, w.generation, 0, 5.0 if w.stopped else 0.0, 0.0, state_of(w))
                for w in self.workers.values()
                if w.node == node.name
            ]
        return "stacks" if question is c.Question.STACKS else ["a GPU"]

    def _do_TellOver(self, command: c.TellOver) -> None:
        for name in command.nodes:
            if self.rng.random() < 0.9:
                self.after(self.soon(), lambda name=name: self._told_over(name, command.generation))  # type: ignore[misc]

    def _told_over(self, name: str, generation: int) -> None:
        for worker in list(self.workers.values()):
            if worker.node == name and worker.generation and worker.generation <= generation:
                self._come_again(worker)

    def _do_SendPlaces(self, command: c.SendPlaces) -> None:
        for name, place in command.places.items():
            take = lambda name=name, place=place: self._take_place(name, command.number, place)  # noqa: E731
            self.after(self.soon(), take)

    def _take_place(self, name: str, number: int, place: c.Place) -> None:
        node = self.nodes[name]
        if node.alive and node.up and number > node.place:
            node.place = number
            node.peers = tuple(peer.node for peer in place.peers)
            for slot, shard in enumerate(node.slots):
                if shard is not None and shard.moment > node.heard[1]:
                    self._push(node, slot, shard)

    def _do_Announce(self, command: c.Announce) -> None:
        if command.newest != NEVER and not self._is_known(command.newest):
            raise Broken(f"{command.newest} was announced and is not committed")
        for name in self.control.snapshots.keepers.known:  # down the tree, which is not modelled
            self.after(self.soon(), lambda name=name: self._hear(name, command))  # type: ignore[misc]

    def _hear(self, name: str, command: c.Announce) -> None:
        node = self.nodes[name]
        if node.alive and node.up:
            node.hear(command.number, command.newest, command.pinned, command.kept)

    def _do_SnapshotCommitted(self, command: c.SnapshotCommitted) -> None:
        version = command.version
        if version.generation != self.newest_generation:
            raise Broken(f"{version} was committed in generation {self.newest_generation}")
        members = self.runs[version.generation].formation.members
        origins = {member.node for member in members}
        self.committed[version] = {}
        for origin in origins:
            newest = self.control.snapshots.commits.newest
            peers = newest.peers[origin] if newest is not None else ()
            holders = [
                n.name for n in self.nodes.values() if any(s.moment == version and s.origin == origin for s in n.held)
            ]
            others = [name for name in holders if name != origin]
            taken_at = self.taken_at[version]  # what was reported since may have been true then
            gone = [at for at, name in self.losses if name in (origin, *peers) and at > taken_at]
            if not holders and not gone:
                raise Broken(f"{version} was committed, and nobody has the part of {origin}")
            if len(others) < len(peers) and not gone:
                raise Broken(f"{version} was committed, and not all of {peers} have a copy of {origin}'s part")
            self.committed[version][origin] = frozenset(holders)
            if not peers:
                self.without_copies.setdefault(version, set()).add(origin)
        self.newest_committed = version

    def _is_known(self, version: Version) -> bool:
        """Whether it is committed; or sealed, and whole, as what a coordinator finds that comes after another one."""
        return version in self.committed or is_whole(version, [s for node in self.nodes.values() for s in node.held])

    def _do_Write(self, command: c.Write) -> None:
        if not self._is_known(command.version):
            raise Broken(f"a checkpoint of {command.version}, which is not committed")
        node, failed = self.nodes[command.node], e.WriteFailed(command.upload, command.origin, command.node, "is gone")
        key = command.upload + 10**6 * self.num_coordinators
        self.after(0.2 + self.rng.random(), lambda: self._write(key, command, node, failed))

    def _write(self, key: int, command: c.Write, node: Node, failed: e.WriteFailed) -> None:
        if key // 10**6 == self.num_coordinators:  # the client is there
            self._from_storage(self._answer_of(key, command, node, failed), self.soon())

    def _answer_of(self, key: int, command: c.Write, node: Node, failed: e.WriteFailed) -> e.Written | e.WriteFailed:
        held = node.copies.values() if command.copies else node.slots
        found = [each for each in held if each and each.moment == command.version and each.origin == command.origin]
        if not (node.alive and node.up and found):
            return replace(failed, has_none=True)
        try:
            self._put(key, command, found[0])
        except OSError as error:
            return replace(failed, problem=str(error))
        return e.Written(command.upload, command.origin)

    def _do_WriteAll(self, command: c.WriteAll) -> None:
        if not self._is_known(command.version):
            raise Broken(f"a checkpoint of {command.version}, which is not committed")
        key = command.upload + 10**6 * self.num_coordinators

        def answer_of(name: str) -> e.Written | e.WriteFailed:
            order = c.Write(command.upload, command.version, name, name, False, name == command.describes)
            return self._answer_of(key, order, self.nodes[name], e.WriteFailed(command.upload, name, name, "is full"))

        self._speak(command, answer_of)

    def _do_ReadBackAll(self, command: c.ReadBackAll) -> None:
        def answer_of(name: str) -> e.HasReadBack:
            problem = self._damage()
            return e.HasReadBack(command.upload, name, None if self._fails(0.02) else problem)

        self._speak(command, answer_of)

    def _speak(
        self, command: c.WriteAll | c.ReadBackAll, answer_of: Callable[[str], e.Written | e.WriteFailed | e.HasReadBack]
    ) -> None:
        """Nodes that are gone are left out, and some others; one that is gone itself speaks for none."""
        keepers, coordinator = self.control.snapshots.keepers, self.num_coordinators
        spoken_for = keepers.spoken_for(keepers.peers)

        def speak(name: str) -> None:
            there = [n for n, by in spoken_for.items() if by == name and self.nodes[n].alive and self.nodes[n].up]
            if coordinator != self.num_coordinators:
                return  # the client is gone
            answers = [answer_of(n) for n in there if self.rng.random() < 0.9] if name in there else []
            self._from_storage(e.Spoken(command.upload, name, answers), self.soon())

        for name in command.nodes:
            self.after(0.2 + self.rng.random(), lambda name=name: speak(name))  # type: ignore[misc]

    def _do_ReadBack(self, command: c.ReadBack) -> None:
        node = self.nodes[command.node]

        def read() -> None:
            is_there = node.alive and node.up and not self._fails(0.02)
            problem = self._damage()
            self._from_storage(e.HasReadBack(command.upload, command.origin, problem if is_there else None), 0.1)

        self.after(0.2 + self.rng.random(), read)

    # storage, as it answers keepers and the coordinator

    def _damage(self) -> str:
        """Of a part that is read back; mostly none."""
        if not self.damages or self.rng.random() >= 0.02:
            return ""
        self.trouble_at = self.now
        return "is damaged"

    def _put(self, key: int, command: c.Write, part: Shard) -> None:
        """Raises OSError."""
        if self._fails(0.05):
            raise OSError("storage is away")
        self.parts[key, command.origin] = part.state

    def _index(self, command: c.PublishIndex) -> e.Event:
        if self._fails(0.05):
            return e.IndexNotWritten(command.upload, "storage is away")
        return e.IndexWritten(command.upload)

    def _commit(self, command: c.PublishCommit, state: int) -> e.Event:
        if self.now < self.away_until:
            return e.PublishFailed(command.upload, "storage is away")
        self.storage[command.version.step] = command.version, state
        self.was_stored.add(command.version.step)
        return e.CheckpointCommitted(command.upload, command.version.step, 1)

    def _do_PublishIndex(self, command: c.PublishIndex) -> None:
        for origin in command.nodes:
            if (command.upload + 10**6 * self.num_coordinators, origin) not in self.parts:
                raise Broken(f"the index of {command.version} without the part of {origin}")
        late, answer = self._fails(0.1), self._index(command)  # slow storage
        if command.by and isinstance(answer, e.IndexNotWritten):
            answer = e.IndexNotWritten(command.upload)  # a keeper's, which may have gone dark since
        self._from_storage(answer, 40.0 if late else 0.2)

    def _fails(self, share: float) -> bool:
        """Whether storage does, now."""
        if self.now < self.away_until or self.rng.random() < share:
            self.trouble_at = self.now
            return True
        return False

    def _do_PublishCommit(self, command: c.PublishCommit) -> None:
        self.durable_rows = len(self.rows)
        key, version = command.upload + 10**6 * self.num_coordinators, command.version
        states = {state for (upload, _), state in self.parts.items() if upload == key}
        if len(states) != 1:
            raise Broken(f"a checkpoint of {version} of {len(states)} states")
        seconds = 20.0 * self.rng.random() if self._fails(0.1) else 0.1
        self._publish(lambda: self.tell(self._commit(command, states.pop())), seconds)

    def _publish(self, write: Callable[[], None], seconds: float = 0.0) -> None:
        """After all that this coordinator is writing, as `runtime.publisher` does; and none after its death."""
        coordinator = self.num_coordinators

        def arrive() -> None:
            if coordinator == self.num_coordinators and self.up:
                write()
            elif self.stands_still:
                self.after(0.5, arrive)

        self.published_at = max(self.published_at, self.now) + seconds
        self.after(self.published_at - self.now, arrive)

    def _from_storage(self, answer: e.Event, seconds: float) -> None:
        """An answer to this coordinator, and to none after it."""
        coordinator = self.num_coordinators

        def arrive() -> None:
            if coordinator == self.num_coordinators and self.up:
                self.tell(answer)
            elif self.stands_still:
                self.after(0.5, arrive)

        self.after(seconds, arrive)

    def _do_CleanUp(self, command: c.CleanUp) -> None:
        self._from_storage(e.Deleted("", command.upload), 0.1)

    def _do_NoteDamaged(self, command: c.NoteDamaged) -> None:
        self._publish(lambda: self._take_away(command.step))

    def _do_Withdraw(self, command: c.Withdraw) -> None:
        self._publish(lambda: self._take_away(command.step))

    def _take_away(self, step: int) -> None:
        self.storage.pop(step, None)
        self.was_stored.discard(step)

    def _do_Delete(self, command: c.Delete) -> None:
        for step in sorted(self.storage.keys() - {command.spared, *command.unread})[:-KEEP]:
            del self.storage[step]

    # nodes and workers

    def add_node(self) -> None:
        node = Node(f"n{next(self.numbers)}")
        self.nodes[node.name] = node
        self.add_worker(node)

    def add_worker(self, node: Node) -> None:
        worker = Worker(f"w{next(self.numbers)}", node.name, next(self.numbers))
        self.workers[worker.id] = worker
        self.after(self.soon(), lambda: self._join(worker))

    def _keeper_up(self, node: Node, *, restarted: bool = False) -> e.KeeperUp:
        return e.KeeperUp(node.name, node.name, (node.name, 1), restarted)

    def _member(self, worker: Worker) -> Member:
        return Member(worker.id, worker.node, worker.node, worker.port, worker.pid, 1)

    def _join(self, worker: Worker) -> None:
        if not worker.alive or self.over:
            return
        if worker.stopped or not self.up:
            self.after(1.0, lambda: self._join(worker))
            return
        offer = e.Joined(self._member(worker), self.max_nodes)
        self.tell(offer)
        if self.order.random() < TOLD_TWICE:  # by its keeper, which stood, and by itself
            self.after(LATE_S * self.order.random(), lambda: self._tell_again(offer))
        self._ask(worker)

    def _tell_again(self, offer: e.Joined) -> None:
        if not self.up or self.over:
            return
        control, state, worker = self.control, self.control.state, self.workers[offer.member.id]
        formation, waiting = control.group.formation, control.group.membership.waiting
        has_place = formation is not None and offer.member in formation.members
        if not has_place and (worker.generation or worker.port != offer.member.port):
            return  # of a group that is over, or that no log has: none is told of so late
        self.tell(offer)
        if has_place and control is self.control and (control.state != state or offer.member in waiting.values()):
            raise Broken(f"{offer.member.id} has its place, and its offer, told again, is taken for another one")

    def _ask(self, worker: Worker) -> None:
        if not worker.alive or worker.generation or self.over:
            return
        if worker.stopped or not self.up:
            self.after(0.5, lambda: self._ask(worker))
            return
        answer: Answer = self.tell(e.Asked(worker.id, worker.after))
        if answer.formation is not None:
            generation, before = answer.formation.generation, worker.after
            worker.after = worker.generation = generation
            worker.rows.was_in(generation)
            if any(self.runs[each].ready for each in range(before + 1, generation) if each in self.runs):
                worker.could_have.clear()  # of steps that were trained again without it, it may be
            self._enter(worker, self.runs[generation])
        elif answer.join_again:
            self.after(self.soon(), lambda: self._join(worker))
        elif answer.over or answer.given_up:
            worker.alive = False
        elif answer.unfit:
            self.kill_worker(worker)
        else:
            self.after(POLL_S, lambda: self._ask(worker))

    def _come_again(self, worker: Worker) -> None:
        """Its group is over for it."""
        if worker.alive and worker.generation:
            run = self.runs[worker.generation]
            run.over, worker.generation = True, 0
            worker.port += 1
            self.after(self.soon(), lambda: self._join(worker))

    def _enter(self, worker: Worker, run: Run) -> None:
        run.ready.add(worker.id)
        generation = run.formation.generation
        if run.ready == {member.id for member in run.formation.members} and not run.over:
            self.after(0.2, lambda: self._restore(run))
        self.after(COLLECTIVE_S + self.rng.random(), lambda: self._fail_if_stuck(worker, generation, -1))

    def _fail_if_stuck(self, worker: Worker, generation: int, step: int) -> None:
        """A collective's timeout: the group has not got on since."""
        run = self.runs[generation]
        if not worker.alive or worker.stopped or worker.generation != generation:
            return
        if (run.step if run.began else -1) > step and not run.over:
            at = run.step
            self.after(COLLECTIVE_S, lambda: self._fail_if_stuck(worker, generation, at))
            return
        self.send(e.Broke(generation, f"{worker.id}: timeout"), lossy=True)
        self._come_again(worker)

    def _all_here(self, run: Run) -> bool:
        generation = run.formation.generation
        workers = [self.workers[member.id] for member in run.formation.members]
        return not run.over and all(w.alive and not w.stopped and w.generation == generation for w in workers)

    def _restore(self, run: Run) -> None:
        """As ranks do: from memory, where that is newer than storage and whole; else from storage, or nothing."""
        if not self._all_here(run):
            return
        if not self.up:
            self.after(0.5, lambda: self._restore(run))
            return
        generation = run.formation.generation
        for member in run.formation.members:
            self.tell(self._keeper_up(self.nodes[member.node]))
        limit = self.control.corruptions.limit
        sound = [(at, kept) for at, (_, kept) in self.storage.items() if limit is None or at <= limit]
        step, state = max(sound, default=(0, 0))
        is_restored = False
        if limit is not None and not sound and any(each <= limit for each in self.was_stored):
            raise Broken(f"a checkpoint of step {limit} or before was there, and is deleted")
        if self.control.newest_snapshot is not None:
            held = [
                shard for node in self.nodes.values() if node.alive and node.up and not node.dark for shard in node.held
            ]
            version = self.control.newest_of(each for each in {shard.moment for shard in held} if is_whole(each, held))
            if version.generation <= self.went_wrong and version.step >= step:
                raise Broken(f"{version} went wrong, and is to be restored")
            if limit is not None and version.step > limit:
                raise Broken(f"{version} is to be restored, and nothing after step {limit} is known to be right")
            if is_whole(version, held) and version.step >= step:
                states = {shard.state for shard in held if shard.moment == version}
                if len(states) != 1:
                    raise Broken(f"{version} has {len(states)} states")
                step, state, is_restored = version.step, states.pop(), True
            elif version.step >= step and version in self.committed and not self._has_lost_a_part(version):
                raise Broken(f"{version} was committed, a node of each part is there, and it is not whole")
        run.step, run.state = step, state
        nodes = tuple(dict.fromkeys(member.node for member in run.formation.members))
        self.tell(e.NodesAlive(frozenset(node.name for node in self.nodes.values() if node.alive)))
        try:
            self.tell(e.Began(generation, step, nodes, {"workers": [{"node": node} for node in nodes]}))
        except Fenced:
            self._leave_all(run)
            return
        run.began = True
        for member in run.formation.members:
            worker = self.workers[member.id]
            worker.rows.begin(generation, step)
            worker.could_have = [each for each in worker.could_have if each <= step]
        every, mesh = self.config.cluster.verify_every_steps, self.meshes[len(run.formation.members)]
        checks = Checks(every, mesh.num_units, step + 1, self.last_step, mesh.pp, mesh.num_stages)
        run.checks = checks if every else None
        if self.newest_committed.step > step:
            self.newest_committed = NEVER
        if is_restored:
            self._snapshot(run)
        self.after(STEP_S, lambda: self._step(run))

    def _has_lost_a_part(self, version: Version) -> bool:
        """Whether all nodes that had some part of a version were lost, or are away: memory need not have it then."""
        there = {node.name for node in self.nodes.values() if node.alive and node.up and not node.dark}
        return any(holders.isdisjoint(there) for holders in self.committed[version].values())

    def _send(self, row: Mapping[str, Any], first: Worker) -> str:
        """As rank 0 does, which sends again what is wanted; why the group should leave."""
        generation, run = row["generation"], self.runs[row["generation"]]
        answer = self._call(e.Row(generation, row), run)
        for _ in range(2):  # what was wanted may be what an earlier coordinator wanted
            if (since := run.wanted) is not None:
                run.wanted = None
                answer = self._call(e.RowsAgain(generation, since, first.rows.since(since)), run)
        if run.wanted is not None:
            raise Broken(f"rows from {run.wanted} on are wanted after all were sent")
        if isinstance(self.control.state, Forming):
            raise Broken("a group trains, and control takes its rows, and does not know that it does")
        return answer.leave

    def _call(self, call: e.Row | e.RowsAgain, run: Run) -> RowAnswer:
        """Of rank 0, which hears the answer once it has made its next step."""
        run.sent = [*run.sent, call][-MOST_ON_WAY:]
        answer: RowAnswer = self.tell(call)
        run.wanted = run.wanted if answer.wanted is None else answer.wanted
        return answer

    def _checksums(self, wrong: Collection[int], members: Sequence[Member]) -> list[float]:
        """Of all stages of all units, where these ranks compute wrong."""
        mesh = self.meshes[len(members)]
        parts, slots = {mesh.part_of(rank) for rank in wrong}, list[float]()
        for unit in range(mesh.num_units):
            for stage in range(mesh.num_stages):
                slots += (1.0, 2.0 + any(unit * mesh.pp + each % mesh.pp in parts for each in range(stage + 1)), 3.0)
        return slots

    def _leave_all(self, run: Run) -> None:
        for member in run.formation.members:
            self._come_again(self.workers[member.id])

    def _step(self, run: Run) -> None:
        """One optimizer step of all ranks, its row, and its snapshots."""
        if not self._all_here(run):
            return
        if not self.up:  # a row's reply is not waited for, but for a step or two
            self.after(0.3, lambda: self._step(run))
            return
        generation = run.formation.generation
        run.step += 1
        members = run.formation.members
        wrong = tuple(rank for rank, member in enumerate(members) if member.node in self.corrupt)
        run.state = advance(run.state, run.step) + len(wrong)
        row = dict.fromkeys(METRIC_KEYS, 0.0) | {"step": run.step, "generation": generation, "step_s": STEP_S}
        row["state"] = run.state
        try:
            if run.checks is not None and run.checks.is_due(run.step):
                self.tell(e.Verified(generation, run.step, run.checks.judge(run.step, self._checksums(wrong, members))))
                if run.generation_is_over(self.control):
                    self._leave_all(run)
                    return
            for worker in (self.workers[member.id] for member in members):
                worker.rows.add(row)
                follows = worker.could_have[-1:] in ([], [run.step - 1])
                worker.could_have = [*(worker.could_have if follows else ()), run.step]
            reason = self._send(row, self.workers[run.formation.members[0].id])
            is_begun = self._snapshot(run)
            if run.step >= self.last_step:
                self.tell(e.CheckpointWanted(generation, run.step))
                self.tell(e.Done())
                self.done = run.over = True
                for member in run.formation.members:
                    self.workers[member.id].alive = False
                return
            if reason:
                cause = reason if reason in (Cause.grow, Cause.drain) else ""
                if not cause:
                    self.tell(e.CheckpointWanted(generation, run.step))
                self._leave_in_order(run, cause, is_begun, self.now + LAST_ROOM_S)
                return
        except Fenced:
            self._leave_all(run)
            return
        self.after(STEP_S * (0.9 + 0.2 * self.rng.random()), lambda: self._step(run))

    def _leave_in_order(self, run: Run, cause: str, is_begun: bool, until: float) -> None:
        """The last step waits for room for its snapshot, as ranks do."""
        if not self._all_here(run):
            return
        if self.up and (is_begun or self._snapshot(run) or self.now > until):
            with contextlib.suppress(Fenced):
                self.tell(e.Leaving(run.formation.generation, run.step, cause))
            self._leave_all(run)
        else:
            self.after(POLL_S, lambda: self._leave_in_order(run, cause, is_begun, until))

    def _snapshot(self, run: Run) -> bool:
        version = Version(run.formation.generation, run.step)
        self.taken_at[version] = self.now
        nodes = [self.nodes[name] for name in dict.fromkeys(m.node for m in run.formation.members)]
        slots = [node.free_slot() for node in nodes]
        if None in slots:
            return False  # a step is snapshot by all ranks or by none
        for node, slot in zip(nodes, slots, strict=True):
            assert slot is not None
            shard = Shard(version, node.name, len(nodes), run.state)
            node.slots[slot] = shard
            if node.up:
                self._push(node, slot, shard)
        return True

    def _push(self, node: Node, slot: int, shard: Shard) -> None:
        """Copy a shard to the peers, then report it."""
        peers = node.peers

        def copied() -> None:
            if not (node.alive and node.up) or node.slots[slot] != shard or node.peers != peers:
                return
            for peer in peers:
                there = self.nodes[peer]
                if not (there.alive and there.up) or there.dark or (node.name, peer) in self.cut:
                    self.send(e.NodesAlive(frozenset(n.name for n in self.nodes.values() if n.alive)), 0.9)
                    self.send(e.Complaint(node.name, "its peer is gone", peer, 0.5), 1.0)
                    self.after(2.0, copied)
                    return
                there.copies[node.name, slot] = replace(shard, copy_of=node.name)
            self.send(e.Sealed([SnapshotAck(node.name, shard.moment, peers)]), lossy=True)

        self.after(self.soon(), copied)

    # faults

    def kill_worker(self, worker: Worker, *, refill: bool = True) -> None:
        if not worker.alive:
            return
        worker.alive = False
        if worker.generation:
            self.runs[worker.generation].over = True
        node, detail = self.nodes[worker.node], f"{worker.id} died"
        if node.alive and node.up and self.rng.random() < 0.7:
            self.send(e.Gone(node.name, worker.pid), 0.3)
        self.after(0.5 + 3 * self.rng.random(), lambda: self.ray_finds(worker, detail))
        if refill:
            self.after(3 + 5 * self.rng.random(), lambda: self._refill(node))

    def _refill(self, node: Node) -> None:
        """Ray Train starts another one, where it may."""
        if node.alive and not self.over:
            if self.up and node.name not in self.control.excluded_nodes(self.clock.now):
                self.add_worker(node)
            else:
                self.after(1.0, lambda: self._refill(node))

    def ray_finds(self, worker: Worker, detail: str) -> None:
        """It says so at once, to a coordinator that is there."""
        if (worker.node, worker.pid) in self.dead:
            return
        self.dead[worker.node, worker.pid] = detail
        if self.up:
            self._tell_of((worker.node, worker.pid))

    def kill_node(self, node: Node) -> None:
        """With its memory; another one comes in its place."""
        if not node.alive:
            return
        node.alive = node.up = False
        node.slots, node.copies = [None] * SLOTS, {}
        self.losses.append((self.now, node.name))
        self.send(e.ConnectionLost(node.name), lossy=True)
        for worker in [each for each in self.workers.values() if each.node == node.name]:
            self.kill_worker(worker, refill=False)
        self.after(5 + 5 * self.rng.random(), self.add_node)

    def kill_keeper(self, node: Node) -> None:
        """What it held is there for the next one."""
        if not (node.alive and node.up):
            return
        node.up = False
        self.losses.append((self.now, node.name))
        self.send(e.ConnectionLost(node.name), lossy=True)

        def back() -> None:
            if node.alive:
                node.up = True
                node.peers = ()
                self.send(self._keeper_up(node, restarted=True))

        self.after(0.5 + 2 * self.rng.random(), back)

    def stop_worker(self, worker: Worker) -> None:
        """Ray Train finds it in the end, if nobody does before."""
        worker.stopped = worker.alive
        self.after(60.0, lambda: self.kill_worker(worker) if worker.stopped else None)

    def continue_worker(self, worker: Worker) -> None:
        worker.stopped = False
        if worker.alive and worker.generation:
            self._come_again(worker)

    def drain(self, node: Node) -> None:
        if node.alive:
            self.draining[node.name] = self.now + 15.0
            if self.up:
                self.tell(self._notice())

            def gone() -> None:
                self.draining.pop(node.name, None)
                self.kill_node(node)

            self.after(15.0, gone)

    def maintain(self, node: Node) -> None:
        """Its maintenance is asked for, and it is back after a while; as `jobs.drain` does it."""
        if not node.alive or not self.up or self.over or node.name in self.asked:
            return
        if not self.tell(e.DrainAsked(node.name)):
            self.asked[node.name] = self.now
            self.after(10.0 + 20.0 * self.rng.random(), lambda: self._give_back(node))

    def _give_back(self, node: Node) -> None:
        if self.over:
            return
        if not self.up:
            self.after(1.0, lambda: self._give_back(node))
            return
        if self.tell(e.UndrainAsked(node.name)) and node.alive:  # a dead one is drained no more
            raise Broken(f"{node.name} was drained, and control has forgotten it")
        del self.asked[node.name]

    def zombie(self) -> None:
        """A rank 0 of a generation that is over wakes up, and tries to write."""
        generation = self.newest_generation - 1
        if not self.up or generation < 1:
            return
        row = dict.fromkeys(METRIC_KEYS, 0.0) | {"step": self.control.next_step, "generation": generation, "state": 0}
        for event in (
            e.Row(generation, row),
            e.CheckpointWanted(generation, self.control.next_step),
            e.Began(generation, 0, (), {}),
            e.Leaving(generation, 1, "grow"),
            e.Logged(generation, "checkpoint", {}),
        ):
            before = len(self.rows), len(self.events)
            try:
                self.tell(event)
            except Fenced:
                if before != (len(self.rows), len(self.events)):
                    raise Broken("a call was refused and has changed something") from None
                continue
            raise Broken(f"{type(event).__name__} of generation {generation} was taken in {self.newest_generation}")

    def not_finite(self, run: Run) -> None:
        """Gradients are not finite: all ranks leave, and memory is not to be used."""
        if not run.over and run.formation.generation == self.newest_generation:
            self.newest_committed, self.went_wrong = NEVER, run.formation.generation
            self.tell(e.NotFinite(run.formation.generation, run.step, "loss is nan"))
            self._leave_all(run)

    def fault(self) -> None:
        """One of all kinds, at random."""
        rng, nodes = self.rng, [node for node in self.nodes.values() if node.alive]
        workers = [worker for worker in self.workers.values() if worker.alive]
        if self.over or not nodes or not workers:
            return
        kind = rng.choice(KINDS)
        worker, node = rng.choice(workers), rng.choice(nodes)
        if kind == "worker":
            self.kill_worker(worker)
        elif kind == "node":
            self.kill_node(node)
        elif kind == "keeper":
            self.kill_keeper(node)
        elif kind == "coordinator":
            self.restart_coordinator(lost_events=self._unwritten())
        elif kind == "stop":
            self.stop_worker(worker)
            self.after(12.0 * rng.random(), lambda: self.continue_worker(worker))
        elif kind == "notice":
            self.drain(node)
        elif kind == "maintenance":
            self.maintain(node)
        elif kind == "zombie":
            self.zombie()
        elif kind == "broke" and worker.generation:
            self.send(e.Broke(worker.generation, "a damaged shard"))
            self._come_again(worker)
        elif kind == "nonfinite" and worker.generation and self.up and self.runs[worker.generation].began:
            self.not_finite(self.runs[worker.generation])
        elif kind == "cut" and len(nodes) > 1:
            link = node.name, rng.choice([each.name for each in nodes if each is not node])
            self.cut.add(link)
            self.after(40.0 * rng.random(), lambda: self.cut.discard(link))
        elif kind == "dark":
            node.dark = True
            self.after(20.0 * rng.random(), lambda: setattr(node, "dark", False))

    # what must be in the end

    @property
    def known_right(self) -> float:
        """The newest step whose state is said to be known to be right, where later ones may not be."""
        notes = [fields["text"] for _, name, fields in self.events if name == "note"]
        said = [text for text in notes if "none follows that could confirm it" in text] + [self.given_up]
        return min(map(float, re.findall(r"state of step (\d+) is the newest", " ".join(said))), default=float("inf"))

    def check_log(self, *, right_until: float = float("inf")) -> None:
        """Rows are the steps in order, each with the state that all samples before it make; causes are known. Of states
        after step `right_until`, in rows and in storage, it is said that they may be wrong."""
        state, expected = 0, 1
        notes = " ".join(fields["text"] for _, name, fields in self.events if name == "note")
        missing = {int(step) for step in re.findall(r"rows before step (\d+) went with", notes)}
        for row in self.rows:
            if row["step"] != expected and row["step"] not in missing:
                raise Broken(f"a row of step {row['step']} where {expected} is expected")
            for step in range(expected, row["step"] + 1):
                state = advance(state, step)
            if row["state"] != state and row["step"] <= right_until:
                raise Broken(f"step {row['step']} has a state that is not made of the samples before it")
            expected = row["step"] + 1
        for step, (_, kept) in self.storage.items():
            made = 0
            for each in range(1, step + 1):
                made = advance(made, each)
            if kept != made and step <= right_until:
                raise Broken(f"the checkpoint of step {step} has a state that is not made of the samples before it")
        causes: set[str] = {"start"}
        for _, name, fields in self.events:
            if name == "failure":
                causes.add(fields["cause"])
            elif name in ("coordinator_restarted", "submitted"):
                causes |= {"start", "resume", "worker_failed"}
            elif name == "generation":
                if fields["cause"] not in causes | {"grow", "drain", "worker_failed"}:
                    raise Broken(f"generation {fields['generation']} has the cause {fields['cause']!r}")
                causes = set()
        generations = [fields["generation"] for _, name, fields in self.events if name == "generation"]
        if generations != sorted(set(generations)):
            raise Broken(f"generations began in the order {generations}")


def play(
    seed: int,
    control_class: type[Control] = Control,
    *,
    num_faults: int | None = None,
    world_class: type[World] = World,
) -> World:
    """A run of a few steps with faults at random times, to its end. Raises Broken."""
    rng = random.Random(seed)
    world_class = type("Played", (world_class,), {"control_class": control_class})
    sizes = {"num_nodes": rng.choice((1, 2, 3, 3, 4)), "last_step": rng.choice((6, 10, 14))}
    world: World = world_class(seed, **sizes, copies=rng.choice((1, 1, 2)), num_slices=rng.choice((None, None, 2, 5)))
    for _ in range(rng.choice((0, 1, 2, 2, 3, 4)) if num_faults is None else num_faults):
        world.after(rng.random() * 20.0, world.fault)
    if seed % 5 == 3:  # the others keep their schedules
        still = random.Random(-seed)
        world.after(still.random() * 20.0, lambda: world.stand_still(60.0 * still.random()))
    world.run(2000.0)
    world.check_log()
    if not world.done and "loss is nan" not in world.given_up:
        raise Broken(f"the run ended: {world.given_up or 'it did not say why'}")
    return world


def play_without_storage(seed: int) -> World:
    """A run whose storage, and log, is away while groups break, one of them as it forms; then the coordinator is
    started anew. Raises Broken."""
    rng = random.Random(seed)
    world = World(seed, num_nodes=rng.choice((2, 3, 4)), last_step=14)
    while not world.rows:
        world.run_for(0.5)
    world.take_storage_away()
    generation = world.newest_generation
    for _ in range(rng.choice((0, 1, 2))):
        world.run_for(3.0 * rng.random())
        living = [worker for worker in world.workers.values() if worker.alive and worker.generation]
        if len(living) > 1:
            world.kill_worker(rng.choice(living))
        while not world.done and world.newest_generation == generation:
            world.run_for(0.05)
        generation = world.newest_generation
    world.run_for(3.0 * rng.random())
    world.restart_coordinator()
    world.run(2000.0)
    world.check_log()
    return world


def play_restarts(seed: int) -> World:
    """A run whose coordinator dies again and again, and no rank does. Raises Broken."""
    rng = random.Random(seed)
    world = World(seed, num_nodes=rng.choice((1, 2, 3)), last_step=20)
    for _ in range(6):
        world.after(1.0 + rng.random() * 25.0, lambda: world.restart_coordinator(lost_events=world._unwritten()))
    world.run(2000.0)
    world.check_log()
    return world


def play_corrupt(seed: int, *, sizes: tuple[int, ...] = (3, 4, 5), least: int = 1, cp: int = 1, pp: int = 1) -> World:
    """A run in which a node begins to compute wrong, and goes on; a worker may die, and the coordinator. Raises Broken.

    What is in the log in the end, and in storage, is nothing that it spoilt, or a line says so. `sizes`: how many nodes
    there may be, of a rank each, `cp` x `pp` of which are a unit as a rule; `least` of them make a group.
    """
    rng = random.Random(seed)
    num_nodes, last_step = rng.choice(sizes), rng.choice((14, 20))
    world = World(seed, num_nodes=num_nodes, last_step=last_step, min_workers=least, verify_every_steps=3, cp=cp, pp=pp)
    victim = rng.choice([*world.nodes])
    world.after(2.0 + rng.random() * 10.0, lambda: world.corrupt.add(victim))
    if rng.random() < 0.5:
        others = [
            worker for worker in world.workers.values() if worker.node != victim
        ]  # of one that is gone none tells
        world.after(rng.random() * 20.0, lambda: world.kill_worker(rng.choice(others)))
    for _ in range(rng.choice((0, 0, 1, 2))):
        world.after(2.0 + rng.random() * 25.0, world.restart_coordinator)
    world.run(2000.0)
    world.check_log(right_until=world.known_right)
    assert world.done or world.given_up
    return world

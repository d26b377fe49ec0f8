"""A run in virtual time around regrow's own Control: its membership, topologies, commits and copies decide.

Faults come when they are given, each with its own delays; steps, groups and snapshots follow. What comes out are the
rows and events of a run, which `record.ledger` and a report account like any other's. Messages take no time: what they
take in a run is within the figures. Pure, but for the seed.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regrow.config.check import topologies
from regrow.config.schema import PretrainConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.core import Control
from regrow.control.membership import Member
from regrow.control.past import Past
from regrow.control.states import Training
from regrow.control.values import SnapshotAck, Version
from regrow.record.events import Cause, Event, Row, Stopped, Submitted, from_row
from regrow.record.log import METRIC_KEYS, rollback_of
from regrow.simulate.estimate import CAUSE_OF, Costs
from regrow.simulate.faults import Fault
from regrow.simulate.inputs import TAKES_NODE, Inputs

BEGIN = 1_700_000_000.0  # unix time of the run's beginning
REPORT_S = 60.0  # between reports of snapshots, where nothing happens
LOOK_AGAIN_S = 1.0  # whether a group can be formed, where it could not
DEADLINE_S = 30.0  # from the notice that a node is taken away to its end


@dataclass
class Log:
    """What RunLog would have written: rows that count, and events in order."""

    rows: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def begin(self, generation: int, start_step: int, now: float) -> list[Row]:
        """Take back the rows past a step."""
        taken = [row for row in self.rows if row["step"] > start_step]
        if taken:
            del self.rows[-len(taken) :]
            self.event(replace(rollback_of(taken, generation, start_step), time=now))
        return taken

    def event(self, event: Event) -> None:
        self.events.append(event)


@dataclass(frozen=True)
class Played:
    """A run that was played. `lost_s` are seconds from a group's last step to the next one's beginning, and steps done
    again, by the ledger's causes.
    """

    log: Log
    wall_s: float
    steps: int
    full_step_s: float
    productive_s: float
    lost_s: dict[str, float]
    generations: int
    ended: str = ""  # why, before its time

    @property
    def end(self) -> float:
        """Unix time, as its log has it."""
        return BEGIN + self.wall_s

    @property
    def effective(self) -> float:
        return self.steps * self.full_step_s / self.wall_s

    @property
    def goodput(self) -> float:
        return self.productive_s / self.wall_s


@dataclass
class _Node:
    name: str
    domain: int  # number of its rack
    members: list[Member]
    is_up: bool = True
    excess: float = 0.0  # by which it slows the group that it is in, of the job's step time


@dataclass
class _Run:
    """A group, from where it forms to where it is over."""

    generation: int
    members: tuple[Member, ...]
    step: int = 0
    step_s: float = 0.0
    at_speed_s: float = 0.0  # the same, but for slow nodes
    next_s: float | None = None  # from the next step on
    began: bool = False
    over: bool = False
    life: float = 0.0  # its newest step, or where it began


def play(inputs: Inputs, config: PretrainConfig, faults: Sequence[Fault], *, wall_s: float) -> Played:
    """Play a run of `config` for so long, with these faults. Its size is that of `inputs.job`."""
    return Player(inputs, config, wall_s).play(faults)


class Player:
    """The world around a Control: nodes, their workers and keepers, all of them as simple as can be."""

    def __init__(self, inputs: Inputs, config: PretrainConfig, wall_s: float) -> None:
        self.inputs, self.config, self.now, self.end = inputs, config, BEGIN, BEGIN + wall_s
        self.costs = {size: topology.step_cost for size, topology in topologies(config).items()}
        self.log = Log()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count(1)
        self.control = Control(config, is_whole=_all_are, now=self.now)
        self.nodes: dict[str, _Node] = {}
        self.peers: dict[str, tuple[str, ...]] = {}
        self.run: _Run | None = None
        self.unsealed: list[tuple[float, Version]] = []  # snapshots that were not reported, and when they are safe
        self.sealed_at = self.now
        self.form_vary, self.wrong_s = 1.0, 0.0  # of the newest fault
        self.dead: set[str] = set()  # members that no event has told of yet
        self.productive, self.lost, self.undone_s = 0.0, dict[str, float](), 0.0
        self.last_life, self.given_up = self.now, ""
        self.deadlines: dict[str, float] = {}  # of nodes that are to be taken away
        self.asks_at, self.stops = 0.0, False  # the job, with the step under way
        self.job, self.stored, self.restart_s = 0, 0, 0.0  # its number, what it began from, what its start takes
        job = inputs.job
        self.total = job.nodes + job.spares
        for number in range(self.total):
            self.add_node(number // int(inputs["nodes_rack"]))

    def play(self, faults: Sequence[Fault]) -> Played:
        self.log.event(Submitted(time=self.now, min_workers=self.config.cluster.min_workers))
        for node in self.nodes.values():
            self.join(node.members)
        self.ask()
        for fault in faults:
            self.at(BEGIN + fault.at, lambda fault=fault: self.strike(fault))  # type: ignore[misc]
        while self.queue and not self.given_up:
            at, _, what = heapq.heappop(self.queue)
            if at > self.end:
                break
            self.now = max(self.now, at)
            what()
        self.now = self.end
        return _played(self)

    # time and control

    def at(self, time: float, what: Callable[[], None]) -> None:
        """At this unix time do this."""
        heapq.heappush(self.queue, (time, next(self.numbers), what))

    def tell(self, event: e.Event) -> Any:
        """An event to control; what it replies. What it wants is done at once."""
        reply = None
        for command in self.control.on(event, self.now):
            if isinstance(command, c.Reply):
                reply = command.value
            else:
                _carry_out(self, command)
        return reply

    # nodes and workers

    def add_node(self, domain: int) -> _Node:
        """A node of this rack, whose workers have not joined."""
        name = f"node{next(self.numbers)}"
        members = [self.member(name, gpu) for gpu in range(self.inputs.job.gpus_per_node)]
        node = self.nodes[name] = _Node(name, domain, members)
        return node

    def member(self, node: str, gpu: int) -> Member:
        pid = next(self.numbers)
        return Member(f"w{pid}", node, node, 1, pid, 1, gpu=gpu)

    def join(self, members: Sequence[Member]) -> None:
        """Workers are ready, and so are the keepers of their nodes."""
        for node in dict.fromkeys(member.node for member in members):
            self.tell(e.KeeperUp(node, f"rack{self.nodes[node].domain}", (node, 1)))
        for member in members:  # each with other ports after each group
            self.tell(e.Joined(replace(member, port=self.control.generation + 1), self.inputs.job.gpus))

    def ask(self) -> None:
        """Have a group formed, if it can be; look again where it cannot yet."""
        waiting = self.control.group.membership.waiting
        self.now += 1e-3  # control looks at one instant once
        if not waiting or isinstance(self.control.state, Training):
            return
        self.tell(e.Asked(next(iter(waiting)), self.control.generation))
        if self.run is None or self.run.over:
            for command in self.control.tick(self.now):
                _carry_out(self, command)
            if self.asks_at <= self.now:
                self.asks_at = self.now + LOOK_AGAIN_S
                self.at(self.asks_at, self.ask)

    # a group

    def forming_s(self) -> float:
        """Seconds that the group which forms takes until it begins."""
        if self.control.generation <= 1:
            return 0.0  # a simulation begins with a group that trains
        inputs, gpus = self.inputs, self.inputs.job.gpus
        if self.control.group.cause == Cause.resume:
            return self.restart_s
        if self.control.group.cause == Cause.grow:
            return (inputs["join_s"] + inputs.communicators_s(gpus)) * self.form_vary
        return inputs.form_s(gpus) * self.form_vary

    def begin(self, run: _Run, took_s: float) -> None:
        """A group begins to train, `took_s` seconds after its members were chosen."""
        if run is not self.run or run.over:
            return
        if any(member.id in self.dead for member in run.members):
            run.over = True  # until it is told
            return
        start_step, source = _state(self)
        size = len(run.members)
        nodes = tuple(dict.fromkeys(member.node for member in run.members))
        restore_s = min(took_s, self.inputs["restore_s"])
        cause = self.control.group.cause
        self.undone_s = 0.0
        details = {
            "world_size": size,
            "source": source,
            "init_s": took_s - restore_s,
            "restore_s": restore_s,
            "workers": [{"node": member.node} for member in run.members],
        }
        self.tell(e.NodesAlive(frozenset(node.name for node in self.nodes.values() if node.is_up)))
        self.tell(e.Began(run.generation, start_step, nodes, details))
        self.lose(cause, self.now - self.last_life + self.undone_s)
        self.productive -= self.undone_s
        run.began, run.step, run.life = True, start_step, self.now
        full = self.costs.get(self.inputs.job.gpus, self.costs[max(self.costs)])
        run.at_speed_s = self.inputs["step_s"] * (1 + self.inputs["verify_share"]) * self.costs[size] / full
        _slow_down(self)
        run.step_s, run.next_s = run.next_s or run.at_speed_s, None
        self.last_life, self.wrong_s = self.now, 0.0
        if source != "seed":  # what was restored is copied to the group's own peers
            self.unsealed = [(self.now, Version(run.generation, start_step))]
        self.at(self.now + run.step_s, lambda: self.step(run))

    def step(self, run: _Run) -> None:
        """A group has done a step."""
        if run is not self.run or run.over:
            return
        if self.now - self.sealed_at > REPORT_S:
            _seal(self)
        run.step += 1
        run.life = self.last_life = self.now
        self.productive += run.step_s
        reason = self.tell(e.Row(run.generation, _row(run))).leave
        for command in self.control.tick(self.now):
            _carry_out(self, command)
        if run.over:
            return
        if self.stops:
            _submit_again(self, "stop")
            return
        run.step_s, run.next_s = run.next_s or run.step_s, None
        leaves = reason in (Cause.grow, Cause.drain)
        _snapshot(self, run, at_once=leaves)
        if leaves:
            _seal(self, at_once=True)
            self.form_vary = 1.0
            self.tell(e.Leaving(run.generation, run.step, reason))
            self.come_again(run)
            return
        self.at(self.now + run.step_s, lambda: self.step(run))

    def come_again(self, run: _Run) -> None:
        """Those of a group that live are ready for the next."""
        run.over = True
        alive = {member.id for node in self.nodes.values() if node.is_up for member in node.members}
        self.join([member for member in run.members if member.id in alive - self.dead])
        self.ask()

    # faults

    def strike(self, fault: Fault) -> None:
        """A fault happens."""
        trains = self.run is not None and self.run.began and not self.run.over
        if fault.kind == "stop" and trains:
            self.stops = True
            return
        if fault.kind in ("stop", "head"):
            _submit_again(self, fault.kind)
            return
        nodes, first = _in_order(self), int(fault.where * self.total)
        if first >= len(nodes):
            return
        if fault.kind == "slow":
            _is_slow(self, fault, nodes[first])
            return
        victims = [nodes[first], *_mates(self, nodes[first], nodes, fault.nodes)]
        if fault.kind == "drain":
            leave(self, victims, replace(fault, kind="host", at=0.0, notice_s=0.0))
            return
        self.take(fault, victims)

    def take(self, fault: Fault, victims: list[_Node]) -> None:
        """What a fault takes is gone; the group hears of it after its notice."""
        _seal(self)
        takes_node = fault.kind in TAKES_NODE
        gone = [member for node in victims for member in (node.members if takes_node else node.members[:1])]
        for node in victims if takes_node else ():
            node.is_up = False
        self.dead |= (ended := {member.id for member in gone})
        run = self.run
        hit = run is not None and not run.over and any(member.id in ended for member in run.members)
        if hit and run is not None:
            run.over = True
            self.unsealed.clear()
        job = self.job

        def told() -> None:
            if job == self.job:
                self.told(fault, victims, gone, run if hit else None)
            else:  # nothing of that job is left
                _come_back(self, fault, victims)

        self.at(self.now + fault.notice_s, told)

    def told(self, fault: Fault, victims: list[_Node], gone: list[Member], run: _Run | None) -> None:
        """Control hears of it. `run` is the group that it has broken."""
        self.dead -= {member.id for member in gone}
        if run is not None and run is self.run:
            self.form_vary = fault.vary
        if fault.kind == "sdc" and run is not None:
            self.wrong_s = max(self.wrong_s, fault.unnoticed_s)
        cause, detail = CAUSE_OF[fault.kind], f"{fault.kind} of node {victims[0].name}"
        if not all(node.is_up for node in victims):
            self.tell(e.NodesAlive(frozenset(node.name for node in self.nodes.values() if node.is_up)))
        self.died([(member.node, member.pid) for member in gone], cause, detail)
        _come_back(self, fault, victims)
        if run is not None and self.run is run:
            self.come_again(run)
        elif self.run is not None and self.run.over:
            self.come_again(self.run)

    def died(self, processes: Sequence[tuple[str, int]], cause: Cause, detail: str) -> None:
        """These processes, by node and pid, have ended."""
        gone = set(processes)
        for node in self.nodes.values():
            if node.is_up:
                node.members = [member for member in node.members if (member.node, member.pid) not in gone]
        left = sum(len(node.members) for node in self.nodes.values() if node.is_up)
        self.tell(e.Died(tuple(processes), left, str(cause), detail))

    def lose(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.lost[str(cause)] = self.lost.get(str(cause), 0.0) + seconds


def _played(player: Player) -> Played:
    """What came of it, now that its time is over."""
    trains = player.run is not None and player.run.began and not player.run.over
    if trains:
        player.log.event(Stopped(time=player.end, step=player.log.rows[-1]["step"] if player.log.rows else 0))
    else:
        player.lose(str(Cause.unfinished), player.end - player.last_life)
    steps = player.log.rows[-1]["step"] if player.log.rows else 0
    full_s, wall_s = player.inputs["step_s"], player.end - BEGIN
    return Played(
        player.log, wall_s, steps, full_s, player.productive, player.lost, player.control.generation, player.given_up
    )


def _carry_out(player: Player, command: c.Command) -> None:
    """What control wants done."""
    match command:
        case c.Form():
            player.run = _Run(command.generation, command.members)
            delay = player.forming_s()
            player.at(player.now + delay, lambda run=player.run: player.begin(run, delay))  # type: ignore[misc]
        case c.Record():
            player.log.event(from_row({"time": player.now, "event": command.event, **command.fields}))
        case c.BeginRows():
            taken = player.log.begin(command.generation, command.start_step, player.now)
            player.undone_s = sum(row["step_s"] for row in taken)
        case c.LogRow():
            player.log.rows.append({**command.row, "time": player.now})
        case c.SendPlaces():
            player.peers = {node: tuple(peer.node for peer in place.peers) for node, place in command.places.items()}
        case c.GiveUp():
            player.given_up = command.message
        case c.Kill():
            player.at(player.now, lambda: player.died([(command.node, command.pid)], Cause.worker_hung, "ended"))
        case c.Write():
            player.at(player.now + 1.0, lambda: player.tell(e.Written(command.upload, command.origin)))
        case c.WriteAll():
            answers = tuple(e.Written(command.upload, node) for node in player.peers)
            player.at(player.now + 1.0, lambda: player.tell(e.Spoken(command.upload, command.nodes[0], answers)))
        case c.PublishIndex():
            player.at(player.now, lambda: player.tell(e.IndexWritten(command.upload)))
        case c.PublishCommit():
            step = command.version.step
            player.at(player.now, lambda: player.tell(e.CheckpointCommitted(command.upload, step, 1)))
        case c.Ask() if command.question is c.Question.HEARTBEATS:
            pass  # a fault is told of when its figure says so


def leave(player: Player, victims: list[_Node], gone: Fault, within_s: float = DEADLINE_S) -> None:
    """The group is told that these nodes go, beside others that it was told of, and they do."""
    at = player.now + within_s
    for node in victims:
        player.deadlines[node.name] = min(at, player.deadlines.get(node.name, at))
    up = {name for name, node in player.nodes.items() if node.is_up}
    player.tell(e.Notice({name: deadline for name, deadline in player.deadlines.items() if name in up}))

    def goes() -> None:
        here = [node for node in victims if node.is_up]
        if here:  # else it went before: by another notice, or a fault
            player.take(gone, here)

    player.at(at, goes)


def _come_back(player: Player, fault: Fault, victims: Sequence[_Node]) -> None:
    for node in victims:
        domain = node.domain
        player.at(player.now + fault.away_s, lambda node=node, domain=domain: _back(player, node, domain))  # type: ignore[misc]


def _back(player: Player, node: _Node, domain: int) -> None:
    """A node that was away comes as another one; a process on a sound one is started again."""
    if not node.is_up:
        player.nodes.pop(node.name, None)
        node = player.add_node(domain)
        new = node.members
    else:
        missing = player.inputs.job.gpus_per_node - len(node.members)
        new = [player.member(node.name, gpu) for gpu in range(missing)]
        node.members += new
    player.join(new)
    if player.run is None or player.run.over:
        player.ask()


def _snapshot(player: Player, run: _Run, *, at_once: bool) -> None:
    """A snapshot of the newest step is taken, where it is time for one, and safe later; those before it still count."""
    if not at_once and run.step % max(1, round(player.inputs["snapshot_every_steps"])):
        return
    lag_s = player.inputs["lost_committed_steps"] * run.step_s
    safe = [each for each in player.unsealed if each[0] <= player.now]
    player.unsealed[: len(safe)] = safe[-1:]
    player.unsealed.append((player.now + lag_s, Version(run.generation, run.step)))


def _seal(player: Player, *, at_once: bool = False) -> None:
    """Report the newest snapshots that are safe by now. Of one after another the last is all that counts."""
    safe = [version for at, version in player.unsealed if at_once or at <= player.now]
    if safe:
        player.unsealed = player.unsealed[len(safe) :]
        player.sealed_at = player.now
        player.tell(e.Sealed([SnapshotAck(node, safe[-1], peers) for node, peers in player.peers.items()]))


def _is_slow(player: Player, fault: Fault, node: _Node) -> None:
    """Until it is as fast as before, or has slowed the group for so long that it is left for a spare."""
    if node.name not in _group(player):
        return
    evict_s = player.inputs["slow_evict_s"]
    node.excess += fault.excess
    _slow_down(player)

    def ends() -> None:
        node.excess -= fault.excess
        _slow_down(player)

    def leaves() -> None:
        group = _group(player)
        if node.name not in group or all(each.name in group for each in _in_order(player)):
            player.at(player.now + fault.lasts_s - evict_s, ends)
            return
        ends()
        steps_s = 3 * player.run.step_s if player.run is not None else 0.0  # it waits until the group has left
        leave(player, [node], replace(fault, kind="host", at=0.0), max(DEADLINE_S, steps_s))

    is_left = fault.lasts_s > evict_s
    player.at(player.now + (evict_s if is_left else fault.lasts_s), leaves if is_left else ends)


def _slow_down(player: Player) -> None:
    """From its next step on the group is as fast as its slow nodes let it be."""
    run = player.run
    if run is not None and run.at_speed_s:
        slow = sum(player.nodes[name].excess for name in {member.node for member in run.members} & player.nodes.keys())
        run.next_s = run.at_speed_s * (1 + slow)


def _submit_again(player: Player, why: str) -> None:
    """All processes end, in good order or with the head, and the run is submitted anew from what is in storage."""
    costs, rows, stored = Costs.of(player.inputs), player.log.rows, len(player.log.rows)
    if why == "head":
        stored = max(0, stored - _newest(rows, costs.durable_back_s))
    else:
        player.log.event(Stopped(time=player.now, step=stored))
    if player.run is not None:
        player.run.over = True
    player.job, player.stored, player.stops = player.job + 1, stored, False
    player.restart_s = costs.restart_s if why == "head" else costs.stop_s
    player.unsealed.clear()
    player.dead.clear()
    past = Past(player.control.generation, logged=len(rows), stored=(stored,))
    player.control = Control(player.config, is_whole=_all_are, now=player.now, past=past)
    player.log.event(Submitted(time=player.now, min_workers=player.config.cluster.min_workers))
    for node in [each for each in player.nodes.values() if each.is_up]:
        node.members = [player.member(node.name, gpu) for gpu in range(player.inputs.job.gpus_per_node)]
        player.join(node.members)
    player.ask()


def _group(player: Player) -> list[str]:
    """Names of the nodes that the newest group is on, in its order."""
    return list(dict.fromkeys(member.node for member in player.run.members)) if player.run is not None else []


def _in_order(player: Player) -> list[_Node]:
    """The nodes of the group, then those that wait."""
    group = set(_group(player))
    whole = [node for node in player.nodes.values() if _is_whole(player, node)]
    return [node for node in whole if node.name in group] + [node for node in whole if node.name not in group]


def _is_whole(player: Player, node: _Node) -> bool:
    alive = sum(member.id not in player.dead for member in node.members)
    return node.is_up and alive == player.inputs.job.gpus_per_node


def _mates(player: Player, node: _Node, nodes: Sequence[_Node], count: int) -> list[_Node]:
    """Those that go with it where so many do: of its rack, and of the racks behind it."""
    racks = -(-int(count) // int(player.inputs["nodes_rack"]))
    near = [each for each in nodes if 0 <= each.domain - node.domain < racks and each is not node]
    return sorted(near, key=lambda each: each.domain)[: int(count) - 1]


def _state(player: Player) -> tuple[int, str]:
    """From which step a group goes on, and where that is from."""
    newest = player.control.snapshots.commits.newest
    none = (player.stored, "checkpoint") if player.stored else (0, "seed")
    step, source = (newest.version.step, "snapshot") if newest is not None else none
    done = player.log.rows[-1]["step"] if player.log.rows else 0
    if newest is not None:
        up = {name for name, node in player.nodes.items() if node.is_up}
        if any(up.isdisjoint((node, *peers)) for node, peers in newest.peers.items()):
            step, source = min(step, done - _newest(player.log.rows, player.inputs["durable_back_s"])), "checkpoint"
    if player.wrong_s > 0:
        step, source = min(step, done - _newest(player.log.rows, player.wrong_s)), "checkpoint"
    return max(0, step), source


def _all_are(version: Version, held: Sequence[Any]) -> bool:
    return True


def _newest(rows: Sequence[Row], seconds: float) -> int:
    """The newest ones that took so long together."""
    taken = np.cumsum([row["step_s"] for row in reversed(rows)])
    return int(np.searchsorted(taken, seconds))


def _row(run: _Run) -> Row:
    """Of its newest step."""
    row: Row = dict.fromkeys(METRIC_KEYS, 0.0) | {
        **{"step": run.step, "generation": run.generation, "step_s": run.step_s, "world_size": len(run.members)},
        **{"tokens_seen": run.step, "loss": None, "grad_norm": None, "mfu": None, "batch_digest": 0},
    }
    row["tokens_per_s"] = 1.0 / run.step_s
    return row

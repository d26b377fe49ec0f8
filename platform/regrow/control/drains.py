"""Planned maintenance: nodes that the group leaves when a person asks for it, and stays off until they are back. Pure.

A node that is asked for goes the way of one that Ray is about to take away, but at once and without a deadline. Once a
group trains without it its workers are ended, so that others are started elsewhere; it is out of service once nothing
that the run needs is on it. What was asked for is in the log, and outlives coordinator and job.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from regrow.config.check import topologies
from regrow.config.schema import PretrainConfig
from regrow.config.snapshots import takes_snapshots
from regrow.control.commands import Reply
from regrow.control.events import DrainAsked, NodesAlive, UndrainAsked
from regrow.control.group import Group
from regrow.control.membership import Member
from regrow.control.past import Past
from regrow.control.snapshots import Snapshots
from regrow.control.states import Training

NUM_GONE = 64  # nodes of which a command is told that they died while they were drained


@dataclass(frozen=True)
class NodeState:
    """A node of the run, as `jobs.drain` is told."""

    id: str
    host: str  # its machine's name
    address: str  # empty where it has no workers
    ranks: int  # of the group
    waiting: int  # processes that have joined, and are in no group
    asked: bool  # to be drained, and not back since
    is_out: bool  # and nothing that the run needs is on it


@dataclass(frozen=True)
class Maintenance:
    """A run, as `jobs.drain` is told."""

    nodes: tuple[NodeState, ...]
    training: bool
    generation: int
    world_size: int  # of the newest group
    step: int  # the newest that is logged
    most_slices: int  # of the unit of that group that has most: its passes, where a pass is a slice
    num_coming: int  # workers that start, or have joined and make the next group faster
    ending: str  # why the run ends, or empty
    gone: tuple[NodeState, ...] = ()  # that Ray found dead while they were drained, the newest: drained no more


class Drains:
    """Asked for, undone and looked at; `group` and `snapshots` say what became of it."""

    def __init__(self, group: Group, snapshots: Snapshots, config: PretrainConfig, past: Past) -> None:
        self._group, self._snapshots, self._undrained = group, snapshots, past.undrained
        self._most_slices = {size: each.batch.most_slices for size, each in topologies(config).items()}
        self._takes_snapshots = takes_snapshots(config.snapshot)
        snapshots.keepers.drained = group.nodes.exclusions.asked
        self._gone: deque[str] = deque(maxlen=NUM_GONE)  # nodes

    def ask(self, event: DrainAsked, now: float) -> None:
        """Have the group leave a node, unless it could not go on without it; replies why not, or with nothing."""
        exclusions = self._group.nodes.exclusions
        problem = self._why_not(event.node, now)
        if not problem and event.node not in exclusions.asked:
            exclusions.asked.add(event.node)
            self._group.out.record("drain", node=event.node, deadline=now - event.ahead_s, asked=True)
            if event.node in self._snapshots.keepers.outside:
                self._snapshots.replan()
        self._group.out.append(Reply(problem))

    def undo(self, event: UndrainAsked, now: float) -> None:
        """A node is in service again: workers are started there where there is room for them; replies as `ask`."""
        exclusions = self._group.nodes.exclusions
        if event.node in exclusions.asked:
            exclusions.asked.discard(event.node)
            self._group.out.record("undrain", node=event.node)
            self._group.out.append(Reply(""))
        elif event.node in self._undrained or self._snapshots.keepers.is_dead(event.node):
            self._group.out.append(Reply(""))  # the call is made again, or the node was drained until it died
        else:
            self._group.out.append(Reply(f"node {event.node[:12]} was not drained by jobs.drain"))

    def alive(self, event: NodesAlive, now: float) -> None:
        """A node that Ray has found dead is drained no more: its host comes back as another one.

        Of one that was asked for in an earlier job, too: it had workers, so Ray knew it, and gives no id twice.
        """
        asked = self._group.nodes.exclusions.asked
        for node in sorted(asked - event.nodes):
            asked.discard(node)
            self._gone.append(node)
            self._group.out.record("undrain", node=node, lost=True)

    def look(self, step: int, now: float) -> Maintenance:
        """How it stands; `step` is the newest that is logged."""
        group, membership = self._group, self._group.membership
        ranks, waiting = Counter(m.node for m in membership.survivors), Counter(m.node for m in self._outside())
        known = {member.node: member for member in self._members()}
        asked = group.nodes.exclusions.asked
        nodes = tuple(
            NodeState(
                node,
                group.nodes.machines.get(node, node),
                known[node].host if node in known else "",
                ranks[node],
                waiting[node],
                node in asked,
                node in asked and self._is_out(node),
            )
            for node in dict.fromkeys([*known, *sorted(asked)])
        )
        return Maintenance(
            nodes,
            isinstance(group.state, Training),
            group.generation,
            len(membership.current),
            step,
            self._most_slices.get(len(membership.current), 0),
            self._num_coming(group.excluded_nodes(now)),
            group.stop_reason,
            tuple(
                NodeState(node, group.nodes.machines.get(node, node), "", 0, 0, asked=True, is_out=True)
                for node in self._gone
            ),
        )

    def _why_not(self, node: str, now: float) -> str:
        """Why a node cannot be left."""
        group, exclusions = self._group, self._group.nodes.exclusions
        if group.ending is not None:
            return f"the run ends: {group.stop_reason}"
        if not group.in_place:
            return "cluster.in_place=false: a group that restarts as a whole cannot leave a node; stop the run instead"
        if node in exclusions.asked:
            return ""
        members = self._members()
        here = sum(member.node == node for member in members)
        if not here:
            return f"no worker of the run is on node {node[:12]}"
        away = group.nodes.excluded(now) | {node}
        if group.membership.could_form_without(away):
            return ""
        staying = sum(member.node not in away for member in members)
        together = f", in units of {group.membership.unit} on a node" if group.membership.unit > 1 else ""
        return (
            f"node {node[:12]} has {here} of the {len(members)} workers that are there; without it {staying} are left"
            f"{together}, and a group takes {group.too_few.smallest}: let others come first"
        )

    def _is_out(self, node: str) -> bool:
        """Whether nothing is lost with a node: no worker is there, nor a part of the newest committed step that only
        this and one other node have, nor one that it is to write."""
        commits, upload = self._snapshots.commits, self._snapshots.checkpoints.upload
        here = {member.node for member in self._members()} | {each for each, _ in self._group.going}
        if not isinstance(self._group.state, Training) or node in here:
            return False
        if upload is not None and node in {*upload.peers, *upload.asked.values()}:
            return False
        newest = commits.newest
        if not self._takes_snapshots:
            return True
        is_of_group = newest is not None and newest.version.generation == self._group.generation
        return is_of_group and newest is not None and node not in {*newest.peers}.union(*newest.peers.values())

    def _num_coming(self, excluded: Collection[str]) -> int:
        """Workers that start on nodes in use, and those that have joined and make the group larger."""
        membership, here = self._group.membership, Counter(member.node for member in self._members())
        starting = sum(max(0, count - here[node]) for node, count in membership.placed.items() if node not in excluded)
        return starting + (len(self._outside()) if membership.could_grow else 0)

    def _outside(self) -> list[Member]:
        membership = self._group.membership
        inside = {member.id for member in membership.survivors}
        return [member for member in membership.waiting.values() if member.id not in inside]

    def _members(self) -> list[Member]:
        return [*self._group.membership.survivors, *self._outside()]

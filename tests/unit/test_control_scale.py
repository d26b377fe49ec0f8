"""What control does for one event grows with the number of ranks as that does, and not with its square.

Counted are the interpreter's instructions, in groups of which one is twice as large: the same on any machine.
"""

import heapq
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.group import FORM_POLLS_PER_S
from regrow.control.health import Pulse
from regrow.control.membership import Member
from regrow.control.replicas import Replicas
from regrow.control.states import GivenUp
from regrow.control.values import Digest, SnapshotAck, Version
from support.told import Told

RANKS_PER_NODE = 4
SMALL, LARGE = 256, 512
MOST = 2.5  # times as many instructions in the large group: 2 are in proportion, and what is sorted takes some more
FEW = 2_000  # that are not compared
MESSAGE_S = 50e-6  # from one message of a rank to the next


def instructions(run: Callable[[], Any]) -> int:
    """How many the interpreter executes meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def life(size: int) -> dict[str, int]:
    """Of each event, or each sort of event that comes from all ranks, in the life of a group that loses nodes."""
    nodes = [f"node{number}" for number in range(size // RANKS_PER_NODE)]
    members = [
        Member(
            f"m{rank}",
            nodes[rank // RANKS_PER_NODE],
            f"host{rank // RANKS_PER_NODE}",
            1,
            rank,
            machine=f"machine{rank // RANKS_PER_NODE}",
        )
        for rank in range(size)
    ]
    told, found = Told(min_workers=2, max_workers=size, wait_for_workers_s=600), dict[str, int]()

    def count(what: str, run: Callable[[], Any]) -> None:
        found[what] = instructions(run)

    def begin(step: int) -> None:
        used = list(dict.fromkeys(member.node for member in alive))
        told.begin(used, step)

    def train(step: int) -> None:
        told.now += 1.0
        count(f"row {step}", lambda: told.row(step, step_s=1.0))
        peers, version = told.peers, Version(told.control.generation, step)
        acks = [SnapshotAck(node, version, peers[node]) for node in peers]
        count(f"sealed {step}", lambda: told(e.Sealed(acks)))
        count(f"tick {step}", told)

    def again(member: Member) -> Member:
        return replace(member, port=told.control.generation + 1)

    def come(after: int) -> None:
        """All ranks join and ask, node by node, as keepers speak for them."""
        for first in range(0, len(alive), RANKS_PER_NODE):
            for message in (lambda m: e.Joined(again(m), size), lambda m: e.Asked(m.id, after)):
                for member in alive[first : first + RANKS_PER_NODE]:
                    told.now += MESSAGE_S
                    told(message(member))

    alive = members
    count("joined", lambda: told.join(*members))
    count("forms", lambda: told.ask(members[0].id))
    count("asked", lambda: [told(e.Asked(member.id, 0)) for member in members])
    count("begins", lambda: begin(0))
    for step in (1, 2, 3):
        train(step)
    for lost, how in ((1, "gone"), (2, "died"), (3, "unfit")):
        those = [member for member in members if member.node == nodes[lost]]
        generation, processes = told.control.generation, tuple((each.node, each.pid) for each in those)
        alive = [member for member in alive if member.node != nodes[lost]]
        if how == "gone":
            count(how, lambda: [told(e.Gone(*each)) for each in processes])  # noqa: B023
        elif how == "died":
            count(how, lambda: told(e.Died(processes, len(alive), "worker_died", "")))  # noqa: B023
        else:
            count(how, lambda: told(e.Unfit(nodes[3], those[0].pid, "")))  # noqa: B023
            told(e.Died(processes, len(alive), "worker_died", ""))
        count(f"{how}: broke", lambda: [told(e.Broke(generation, "")) for _ in alive])  # noqa: B023
        count(f"{how}: joined", lambda: [told(e.Joined(again(member), size)) for member in alive])  # noqa: B023
        count(f"{how}: tick", told)
        count(f"{how}: forms", lambda: told.ask(alive[0].id, generation))  # noqa: B023
        assert told.control.generation == generation + 1
        count(f"{how}: begins", lambda: begin(3))
    for lost, going in ((6, ()), (7, (nodes[8],))):
        generation, those = told.control.generation, [member for member in alive if member.node == nodes[lost]]
        alive = [member for member in alive if member.node != nodes[lost]]
        told(e.Notice(dict.fromkeys(going, told.now + 3600.0)))
        told(e.Died(tuple((each.node, each.pid) for each in those), len(alive), "worker_died", ""))
        count("keepers", lambda: [told(e.KeeperUp(node, node, (node, 1))) for node in nodes])
        count(f"come, {len(going)} of them to go", lambda: come(generation))  # noqa: B023
        assert told.control.generation == generation + 1, "it forms once the last of them has come"
        begin(3)
    count("corrupt", lambda: told.control.group.nodes.corrupt(nodes[5], told.now))
    generation = told.control.generation
    count("trouble", lambda: [told(e.Trouble(generation, member, size, "no such file")) for member in alive])
    assert isinstance(told.control.ending, GivenUp)
    count("ends", lambda: [told(e.Gone(member.node, member.pid)) for member in alive])
    return found


def test_a_group_forms_when_the_last_of_thousands_has_come_and_not_when_it_is_looked_next() -> None:
    """Between looks, which take as long as there are workers, more time passes than this run has."""
    told = Told(min_workers=2, max_workers=LARGE)
    members = [Member(f"m{rank}", f"node{rank // 4}", "host", 1, rank) for rank in range(LARGE)]
    told.join(*members)
    assert told.ask(members[0].id).formation is not None
    told(e.Broke(1, "a peer is gone"))
    for member in members:
        told(e.Joined(replace(member, port=2), LARGE))
        answer = told.ask(member.id, 1)
    assert answer.formation is not None
    assert answer.formation.generation == 2


def test_of_thousands_that_wait_one_asks_at_any_time_and_all_of_them_not_too_often() -> None:
    """A group that time alone lets form, as once a silent worker is given up, is formed when one asks."""
    nodes, until = {f"node{node}": [f"m{node}-{each}" for each in range(8)] for node in range(512)}, 10.0
    told = Told(min_workers=2, max_workers=8192)
    told.join(*(Member(each, node, node, 1, 1) for node, those in nodes.items() for each in those), expected=8192)
    begun, asked_at = told.now, list[float]()
    turns = [(0.0001 * at, node) for at, node in enumerate(nodes)]  # they have come together
    while turns[0][0] < until:
        at, node = heapq.heappop(turns)
        asked_at.append(at)
        told.now = begun + at
        wait_s = max(told(e.Asked(each, 0)).wait_s for each in nodes[node])
        assert wait_s > 0
        heapq.heappush(turns, (at + wait_s, node))
    assert max(after - before for before, after in pairwise(asked_at)) < 0.1
    rounds = until / (8 * len(nodes) / FORM_POLLS_PER_S)
    assert len(asked_at) < (rounds + 2) * len(nodes)


@pytest.fixture(scope="module")
def counts() -> tuple[dict[str, int], dict[str, int]]:
    return life(SMALL), life(LARGE)


def test_no_event_takes_more_than_in_proportion_to_the_number_of_ranks(
    counts: tuple[dict[str, int], dict[str, int]],
) -> None:
    small, large = counts
    assert small.keys() == large.keys()
    times = {what: large[what] / small[what] for what in small if large[what] > FEW}
    assert {what: round(each, 2) for what, each in times.items() if each > MOST} == {}
    assert len(times) > 15


def test_a_tick_while_one_answer_is_out_looks_at_no_rank_whose_node_has_answered() -> None:
    """It looked at each rank ten times a second for as long as a group stood still."""

    def counted(size: int) -> int:
        members = [Member(f"m{rank}", f"node{rank // RANKS_PER_NODE}", "host", 1, rank) for rank in range(size)]
        nodes = list(dict.fromkeys(member.node for member in members))
        told = Told(min_workers=2, max_workers=size)
        told.form(*members)
        told.begin(nodes)
        told.row(1, step_s=1.0)
        told.now += told.control.health.stalls.patience_s + 0.1
        told.clear()
        told()
        (asked,) = told.of(c.Ask)
        for node in nodes[1:]:
            pulses = [Pulse(member.pid, 1, 1, 0.05, 0.0, "S") for member in members if member.node == node]
            told(e.Answered(asked.number, node, pulses))
        told.now += 0.1
        told()
        return instructions(lambda: told.control.health.tick(told.now, members, nodes))

    counted(SMALL)  # Python 3.13 counts fewer the first time
    assert counted(LARGE) == counted(SMALL)


def test_comparing_replicas_takes_no_more_than_in_proportion_to_the_number_of_ranks() -> None:
    def compared(size: int) -> int:
        def digest(rank: int) -> Digest:
            return Digest(rank, f"shard {rank % (size // 2)}", 2, 0)

        firsts = range(0, size, RANKS_PER_NODE)
        digests = [tuple(digest(rank) for rank in range(first, first + RANKS_PER_NODE)) for first in firsts]
        acks = [SnapshotAck(f"node{at}", Version(1, 1), (), digests=each) for at, each in enumerate(digests)]
        return instructions(lambda: Replicas().take(acks))

    assert compared(LARGE) < MOST * compared(SMALL)

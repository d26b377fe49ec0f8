"""Which rank or link is found to be slow, in virtual time."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from regrow.config.schema import ParallelConfig
from regrow.control import commands as c
from regrow.control import events as e
from regrow.control.commands import Outbox, Record, ShowRanks
from regrow.control.health import AT_ONCE, Health, Pulse, Stalls
from regrow.control.membership import Member
from regrow.control.silent import SilentKeepers
from regrow.control.slow import Kind, SlowRanks, Spent, Suspicion, Worker, slow_node
from regrow.control.suspects import SHOWN, SHOWN_WHOLE, Suspects
from regrow.plan.pipeline import Stages
from regrow.plan.topology import Topology, plan_topology
from support.slow_world import World
from support.told import Told, one

NAMED_S = 120.0


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    ("step_s", "jitter", "tails"), [(0.5, 0.3, False), (2.0, 0.02, True), (2.0, 0.4, True), (10.0, 0.05, False)]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_rank_is_named_in_10_000_jittered_steps(
    size: int, step_s: float, jitter: float, tails: bool, seed: int
) -> None:
    suspects, read = Suspects(Outbox()), 0
    for _, now, spent in World(seed, size, step_s, jitter, tails).readings(10_000):
        before = suspects.ranks.means
        suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        read += suspects.ranks.means is not before
        assert not suspects.wants_links, "no link either"
        assert not suspects.found
    assert read > 400


@pytest.mark.parametrize("size", [3, 8, 64])
@pytest.mark.parametrize(("step_s", "jitter"), [(0.5, 0.1), (2.0, 0.05), (10.0, 0.02)])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_slows_steps_down_by_15_percent_is_named_within_two_minutes_and_cleared_once_it_does_not(
    size: int, step_s: float, jitter: float, seed: int
) -> None:
    begins = int(200 / step_s)
    world, ranks, named_at = World(seed, size, step_s, jitter, slow_s=0.15 * step_s, slow_from=begins), SlowRanks(), 0.0
    began_at = 0.0
    for step, now, spent in world.readings(begins + int(600 / step_s)):
        began_at = began_at if step >= begins else now
        ranks.read(spent, now)
        for worker in ranks.judge():
            assert worker == ("node 1", 1)
            if not named_at:
                named_at, world.slow_s = now, 0.0
        if named_at and not ranks.found:
            break
    assert 0 < named_at - began_at < NAMED_S
    assert not ranks.found


def test_a_stage_with_more_blocks_is_not_slow_and_a_rank_is_next_to_those_of_its_stage() -> None:
    """Ranks 0 to 2 have half as much to do again as ranks 3 to 5, which wait for their messages."""
    for slow_s, expected in ((0.0, set()), (0.3, {("node 1", 1)})):
        ranks, found = SlowRanks(), set()
        topology = plan_topology(6, num_slices=3, stages=Stages(2, (range(2), range(2, 3))))
        for _, now, spent in World(0, 6, 1.0, 0.02, slow_s=slow_s, slow_from=50).readings(400):
            spent = {w: replace(each, all_s=each.all_s + 0.4 * each.steps * (w[1] // 3)) for w, each in spent.items()}
            ranks.read(spent, now, ranks={worker: worker[1] for worker in spent}, topology=topology)
            found |= set(ranks.judge())
        assert found == expected


def with_fewer_slices(
    spent: Mapping[Worker, Spent], topology: Topology, ranks: Mapping[Worker, int]
) -> dict[Worker, Spent]:
    """Of a world whose steps are of a second, ranks with fewer slices wait longer for the others; a twentieth of what
    ranks compute is the same for all. Those of a slow rank's unit are as slow."""
    most, unit = topology.batch.most_slices, topology.unit_of(ranks["node 1", 1])
    made = {}
    for worker, rank in ranks.items():
        each = spent["node 1", 1] if topology.unit_of(rank) == unit else spent[worker]
        more_s = 0.95 * 0.8 * each.steps * (1 - len(topology.slices_of(rank)) / most)
        made[worker] = replace(each, all_s=each.all_s + more_s)
    return made


@pytest.mark.parametrize(
    ("num_slices", "size", "slices_per_pass", "tp", "first", "slow_s"),
    [
        (16, 6, 3, 1, 0, 0.3),  # 2 3 3 2 3 3
        (24, 7, 2, 1, 0, 0.3),  # 3 3 4 3 4 3 4
        (8, 3, 3, 1, 0, 0.3),  # 2 3 3
        (8, 3, 3, 1, 2, 0.6),  # the same: rank 0 with 2 keeps the others waiting
        (3, 2, 2, 1, 0, 0.3),  # 1 2
        (4, 3, 2, 1, 1, 0.3),  # 1 1 2
        (3, 4, 2, 2, 2, 0.3),  # 1 2, of two ranks each
    ],
)
def test_a_rank_with_more_slices_is_not_slow_and_one_that_is_slow_is_found_beside_it(
    num_slices: int, size: int, slices_per_pass: int, tp: int, first: int, slow_s: float
) -> None:
    """Also where one unit alone has more of them, or fewer. The slow worker is rank `first` + 1."""
    topology = plan_topology(size, num_slices=num_slices, slices_per_pass=slices_per_pass, tp=tp)
    ranks = {(f"node {number}", number): (number + first) % size for number in range(size)}
    slow = {rank for rank in range(size) if topology.unit_of(rank) == topology.unit_of(ranks["node 1", 1])}
    for more_s, expected in ((0.0, set()), (slow_s, slow)):
        out = Outbox()
        suspects = Suspects(out)
        for _, now, spent in World(0, size, 1.0, 0.02, slow_s=more_s, slow_from=50).readings(400):
            suspects.read(with_fewer_slices(spent, topology, ranks), ranks, now, topology=topology)
        assert {command.fields["rank"] for command in out if isinstance(command, Record)} == expected


def test_what_a_group_of_this_size_has_to_do_is_known_where_its_ranks_are_compared() -> None:
    told = Told(max_workers=5, parallel=ParallelConfig(slices_per_pass=3))
    topology = plan_topology(5, num_slices=told.control._config.optim.num_slices, slices_per_pass=3)
    assert [len(topology.slices_of(rank)) for rank in range(5)] == [2, 2, 3, 2, 3]
    told.form(*(one(rank, f"node {rank}") for rank in range(5)))
    told.begin([f"node {rank}" for rank in range(5)])
    began, last = told.now, 0
    for step, at, spent in World(0, 5, 1.0, 0.02).readings(100):
        told.now = began + at
        for each in range(last + 1, step + 1):
            told.row(each, step_s=1.0)
        last = step
        for asked in [each for each in told.of(c.Ask) if each.question is c.Question.HEARTBEATS]:
            for (node, pid), each in with_fewer_slices(spent, topology, {each: each[1] for each in spent}).items():
                told(e.Answered(asked.number, node, [Pulse(pid, 1, step, 0.0, 0.0, "R", spent=each)]))
        told.commands = [each for each in told.commands if not isinstance(each, c.Ask)]
    assert len(told.of(ShowRanks)) > 10
    assert told.records("suspected") == []


def test_a_slow_link_is_looked_for_where_collectives_take_longer_and_no_rank_is_late() -> None:
    out = Outbox()
    suspects, measured = Suspects(out), []
    rates = {"node 0": {"node 1": 1e8, "node 3": 1e9}, "node 1": {"node 2": 1e8}, "node 2": {"node 3": 1e9}}
    world = World(0, 4, 1.0, 0.02, comm_s=0.2, slow_from=100)
    for step, now, spent in world.readings(300):
        suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        if suspects.wants_links:
            measured.append(step)
            suspects.linked(rates, now)
    assert 100 < measured[0] < 220
    assert measured[1:] == []  # it is named
    (named,) = [command.fields for command in out if isinstance(command, Record)]
    assert (named["kind"], named["node"], named["pid"]) == (Kind.slow_link, "node 1", 0)
    assert suspects.slow_nodes(1e9, 60.0) == ["node 1"]


def test_a_link_that_is_slow_from_a_groups_first_step_on_is_looked_for_within_two_minutes() -> None:
    """Steps of 5 s, a reading each second one; what collectives take in groups of that size is known from before."""
    suspects = Suspects(Outbox())
    for generation, comm_s in enumerate((0.0, 4.0)):
        suspects.begin()
        for _, now, spent in World(generation, 2, 1.0, 0.02, comm_s=comm_s).readings(60):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
            if suspects.wants_links:
                break
        assert suspects.wants_links == (comm_s > 0)
    assert now < 60.0


def looked_for_after_s(suspects: Suspects, world: World, steps: int) -> float | None:
    """The seconds from a group's first step until its links are to be measured."""
    suspects.begin()
    for _, now, spent in world.readings(steps):
        suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        if suspects.wants_links:
            return now
    return None


def test_a_link_that_is_slow_from_the_first_step_of_a_group_of_a_new_size_is_looked_for_within_two_minutes() -> None:
    """What collectives take in groups of other sizes says how long they may take at most."""
    suspects = Suspects(Outbox())
    assert looked_for_after_s(suspects, World(0, 4, 1.0, 0.02), 60) is None
    assert looked_for_after_s(suspects, World(1, 3, 1.0, 0.02, comm_s=0.5), 60) is None, "it may take twice as long"
    found = looked_for_after_s(suspects, World(2, 5, 1.0, 0.02, comm_s=8.0), 60)
    assert found is not None
    assert found < NAMED_S


def test_what_collectives_took_over_a_slow_link_is_not_usual_once_it_is_well_again() -> None:
    suspects, world = Suspects(Outbox()), World(0, 3, 1.0, 0.02, comm_s=8.0, slow_from=0)
    suspects.begin()
    for comm_s in (8.0, 0.0):
        for _, now, spent in replace(world, comm_s=comm_s).readings(20 if comm_s else 100):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
            assert not suspects.wants_links
        suspects.ranks.begin()  # totals begin anew in this world
    found = looked_for_after_s(suspects, world, 60)
    assert found is not None
    assert found < NAMED_S


def test_a_slow_link_is_looked_for_while_a_rank_of_another_node_is_known_to_be_slow() -> None:
    """Of thousands of ranks some is always slow: what the one that waits least spends in collectives is theirs."""
    out = Outbox()
    suspects, began_at = Suspects(out), 0.0
    for step, now, spent in World(0, 4, 0.3, 0.02, slow_s=0.1, slow_from=100, comm_s=9.0, comm_from=500).readings(530):
        suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        began_at = began_at if step >= 500 else now
        if suspects.wants_links:
            break
    first, *_ = [command.fields["kind"] for command in out if isinstance(command, Record)]
    assert (first, suspects.wants_links) == (Kind.slow_compute, True)
    assert now - began_at < NAMED_S


def test_a_node_is_told_from_the_other_end_of_its_slow_link() -> None:
    assert slow_node({"a": 1e9, "b": 0.2e9, "c": 0.9e9}) == "b"
    assert slow_node({"a": 1e9, "b": 0.8e9, "c": 0.9e9}) == ""
    assert slow_node({"a": 1e9, "b": 0.2e9}) == ""  # both are joined by it


def test_a_rank_that_waits_for_its_rows_is_told_from_one_that_computes_slowly_and_no_node_is_left_for_it() -> None:
    for data_s, slow_s, kind, nodes in ((0.3, 0.0, Kind.slow_data, []), (0.0, 0.3, Kind.slow_compute, ["node 1"])):
        out = Outbox()
        suspects = Suspects(out)
        for _, now, spent in World(0, 4, 1.0, 0.02, slow_s=slow_s, data_s=data_s, slow_from=50).readings(200):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        (named,) = [command.fields for command in out if isinstance(command, Record)]
        assert (named["kind"], named["node"], named["rank"]) == (kind, "node 1", 1)
        assert named["factor"] > 1.1
        assert suspects.slow_nodes(1e9, 60.0) == nodes
        suspects.begin()
        assert suspects.slow_nodes(1e9, 60.0) == nodes, "it survives, and is as slow"
        rest = {worker: each for worker, each in spent.items() if worker[1] != 1}
        suspects.read(rest, {worker: worker[1] for worker in rest}, now)
        told = {"kind": kind.value, "node": "node 1", "pid": 1, "rank": 1, "since": named["since"], "recovered": False}
        assert out[-1] == Record("cleared", told)


def test_the_end_of_a_slowness_is_told_of_as_a_recovery() -> None:
    out = Outbox()
    suspects, world = Suspects(out), World(0, 4, 1.0, 0.02, slow_s=0.3, slow_from=50)
    for step, now, spent in world.readings(600):
        world.slow_s = 0.3 if step < 200 else 0.0
        suspects.read(spent, {worker: worker[1] for worker in spent}, now)
    named, cleared = [command.fields for command in out if isinstance(command, Record)]
    assert (cleared["rank"], cleared["since"], cleared["recovered"]) == (1, named["since"], True)


def test_a_slow_rank_is_named_though_the_group_changes_before_one_generation_would_have_told() -> None:
    """Four readings a generation, of a rank 20% slow: each alone is too few to name it."""
    out = Outbox()
    suspects = Suspects(out)
    for generation in range(4):
        suspects.begin()
        world = World(generation, 4, 1.0, 0.05, slow_s=0.2)
        for _, now, spent in world.readings(24):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        named = [command.fields["rank"] for command in out if isinstance(command, Record)]
        assert named in ([], [1])
        if generation == 0:
            assert named == []
    assert named == [1]


def test_all_ranks_are_shown_and_of_many_the_slowest() -> None:
    for size, shown in ((4, 4), (SHOWN_WHOLE + 1, SHOWN)):
        out = Outbox()
        suspects = Suspects(out)
        for _, now, spent in World(0, size, 1.0, 0.02, slow_s=0.3).readings(20):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
        suspects.show({}, {})
        rows = [command for command in out if isinstance(command, ShowRanks)][-1].ranks
        assert len(rows) == shown
        assert rows[0]["rank"] == 1
        assert rows[0]["wait_all_s"] < rows[1]["wait_all_s"]


def test_nothing_is_shown_of_a_generation_before_it_has_a_reading() -> None:
    """What the file and the figures had of the generation before was replaced by no ranks at all."""
    out = Outbox()
    suspects = Suspects(out)
    for generation in range(2):
        suspects.begin()
        shown = list[list[int]]()
        for _, now, spent in World(generation, 3, 1.0, 0.02).readings(20):
            suspects.read(spent, {worker: worker[1] for worker in spent}, now)
            suspects.show({}, ())
            shown.append([len(command.ranks) for command in out.take() if isinstance(command, ShowRanks)])
        assert shown == [[], *[[3]] * (len(shown) - 1)]
        assert len(shown) > 2


def test_thousands_of_nodes_are_asked_bit_by_bit_with_one_number_and_no_more_once_another_group_trains() -> None:
    out = Outbox()
    health = Health(Stalls(30.0, 600.0, 60.0), out, SilentKeepers(out))
    nodes = [f"node {number}" for number in range(2 * AT_ONCE + 100)]
    members = [Member(f"m{number}", node, "", 0, number) for number, node in enumerate(nodes)]

    def asked() -> list[c.Ask]:
        return [command for command in out.take() if isinstance(command, c.Ask)]

    health.look_at_devices(1, 0.0, nodes, members)
    parts = asked()
    assert [len(each.nodes) for each in parts] == [AT_ONCE]
    for _ in range(3):
        health.tick(0.2, members, nodes)
        parts += asked()
    assert [node for each in parts for node in each.nodes] == nodes
    assert len({each.number for each in parts}) == 1
    health.look_at_devices(2, 6.0, nodes, members)
    assert asked() == [], "these have not answered"
    for node in nodes:
        health.answered(parts[0].number, node, [], 7.0)
    health.look_at_devices(3, 8.0, nodes, members)
    assert len(asked()) == 1
    health.begin()
    health.look_at_devices(4, 100.0, nodes[:3], members[:3])
    (first,) = asked()
    health.tick(100.2, members[:3], nodes[:3])
    assert (first.nodes, asked()) == (tuple(nodes[:3]), [])


def with_a_slow_node(told: Told, steps: int, comes: dict[int, str]) -> str:
    """Train three ranks, of which `node 1` is slow, until they are to leave; nodes come at steps. Why they leave."""
    began, reason, last = told.now, "", 0
    for step, at, spent in World(0, 3, 1.0, 0.02, slow_s=0.15, slow_from=60).readings(steps):
        told.now = began + at
        told.join(*(one(10 + each, node) for each, node in comes.items() if last < each <= step))
        reason, last = [told.row(each, step_s=1.0) for each in range(last + 1, step + 1)][-1], step
        for asked in [each for each in told.of(c.Ask) if each.question is c.Question.HEARTBEATS]:
            for (node, pid), each in spent.items():
                pulse = Pulse(pid, 1, step, 0.0, 0.0, "R", spent=each)
                told(e.Answered(asked.number, node, [pulse]))
        told.commands = [each for each in told.commands if not isinstance(each, c.Ask)]
        if reason:
            break
    return reason


def test_a_check_up_that_a_node_answers_late_is_waited_for() -> None:
    """Behind a slow link answers took longer than the next check-up, which was asked in their place."""
    told = Told(max_workers=3)
    three_nodes(told)

    def asked() -> int:
        return len([each for each in told.of(c.Ask) if each.question is c.Question.HEARTBEATS])

    for step, (passed_s, expected) in enumerate([(10.0, 1), (10.0, 1), (10.0, 1), (20.0, 2)], 1):
        told.now += passed_s
        told.row(step)
        assert asked() == expected, step
    newest = told.of(c.Ask)[-1]
    for node in newest.nodes:
        told(e.Answered(newest.number, node, []))
    told.now += 10.0
    told.row(5)
    assert asked() == 3


@pytest.mark.parametrize(("answer", "named"), [((0, 2, 3), ["node 1"]), ((0,), [])])
def test_links_that_are_not_measured_in_time_are_judged_by_the_others_where_these_tell(
    answer: tuple[int, ...], named: list[str]
) -> None:
    told = Told(max_workers=4)
    members = [one(rank, f"node {rank}") for rank in range(4)]
    told.form(*members)
    told.begin([member.node for member in members])
    rates = {0: {"node 2": 1e9}, 2: {"node 3": 1e9, "node 1": 1e6}, 3: {"node 0": 1e9}}
    began, last, links = told.now, 0, list[c.Ask]()
    for step, at, spent in World(0, 4, 1.0, 0.02, comm_s=8.0, comm_from=100).readings(130):
        told.now = began + at
        for each in range(last + 1, step + 1):
            told.row(each)
        last = step
        for asked in [each for each in told.of(c.Ask) if each.question is c.Question.HEARTBEATS]:
            for (node, pid), each in spent.items():
                told(e.Answered(asked.number, node, [Pulse(pid, 1, step, 0.0, 0.0, "R", spent=each)]))
        links += [each for each in told.of(c.Ask) if each.question is c.Question.LINKS]
        told.commands = [each for each in told.commands if not isinstance(each, c.Ask)]
        for rank in answer if len(links) == 1 else ():
            told(e.Answered(links[0].number, f"node {rank}", rates[rank]))
    assert len(links) == 1 if named else len(links) > 1, "measured again where none is named"
    assert [each["node"] for each in told.records("suspected")] == named


def three_nodes(told: Told) -> list[Member]:
    members = [replace(one(rank, f"node {rank}"), machine=f"host {rank}") for rank in range(3)]
    told.form(*members)
    told.begin([member.node for member in members])
    return members


@pytest.mark.parametrize(("spares", "leaves"), [(1, True), (0, False)])
def test_a_slow_node_is_left_within_five_minutes_where_a_spare_waits_and_named_where_none_does(
    spares: int, leaves: bool
) -> None:
    told = Told(max_workers=3, quarantine_s=600.0)
    members, began = three_nodes(told), told.now
    reason = with_a_slow_node(told, 400, {number: f"spare {number}" for number in range(1, 1 + spares)})
    (suspected,) = told.records("suspected")
    assert (suspected["kind"], suspected["node"], suspected["rank"]) == (Kind.slow_compute, "node 1", 1)
    quarantines = [(each["node"], each["reason"]) for each in told.records("quarantine")]
    assert (reason, quarantines) == (("drain", [("node 1", "slow")]) if leaves else ("", []))
    if leaves:
        assert told.now - began < 60.0 + 300.0
        told.join(*members)
        answer = told.ask("m0", 1)
        assert answer.formation is not None
        assert {member.node for member in answer.formation.members} == {"node 0", "node 2", "spare 1"}
        assert told.records("failure") == []
        assert not told.ask("m1", 1).unfit
        told.begin(["node 0", "node 2", "spare 1"], told.control.next_step - 1)
        told()
        assert told.ask("m1", 1).unfit, "to be started elsewhere, where there is room"


def test_no_node_is_left_for_being_slow_where_that_is_switched_off() -> None:
    told = Told(max_workers=3, quarantine_s=600.0, drain_slow_s=0.0)
    three_nodes(told)
    began = told.now
    assert with_a_slow_node(told, 3700, {1: "spare"}) == ""
    assert told.now - began > 3600.0
    assert [each["node"] for each in told.records("suspected")] == ["node 1"]
    assert told.records("quarantine") == []


def test_as_many_slow_nodes_are_left_as_spares_can_take_the_place_of() -> None:
    told = Told(min_workers=2, max_workers=8)
    members = [one(number, f"node {number}") for number in range(8)]
    told.form(*members)
    told.begin([member.node for member in members])
    told.row(1)
    told.now += 5.0
    told.join(one(100, "spare"), expected=9)
    told.ask("m100", 0)
    for step in range(2, 7):
        told.now += 3.0
        told.row(step)
    for number in (1, 2, 3):
        slow = Suspicion(Kind.slow_compute, f"node {number}", number, number, told.now - 100.0, 1.16, "x")
        told.control.health.suspects.found[slow.key] = slow
    told.now += 1.0
    told(e.Answered(10**9, "node 0", []))
    assert [each["node"] for each in told.records("quarantine")] == ["node 1"]


def test_a_node_that_makes_the_group_larger_takes_no_slow_ones_place() -> None:
    told = Told(max_workers=4, quarantine_s=600.0)
    three_nodes(told)
    assert with_a_slow_node(told, 400, {300: "new"}) == "grow"
    assert [each["node"] for each in told.records("suspected")] == ["node 1"]
    assert told.records("quarantine") == []


def test_a_slow_rank_that_is_lost_is_suspected_no_longer_though_no_other_group_forms() -> None:
    """For as long as nodes were waited for it was said to compute slowly, and its alert fired."""
    told = Told(max_workers=3, min_workers=3)
    three_nodes(told)
    spent = Spent(1, step_s=1.0)
    told.row(1)
    told.now += 100.0
    told.row(2)
    (asked,) = [each for each in told.of(c.Ask) if each.question is c.Question.HEARTBEATS][-1:]
    found = told.control.health.suspects.found
    for rank, kind in ((1, Kind.slow_compute), (2, Kind.slow_data)):
        suspicion = Suspicion(kind, f"node {rank}", rank, rank, told.now - 100.0, 1.3, "")
        found[suspicion.key] = suspicion
    told(e.Died((("node 1", 1),), 2, "worker_died", "its node is dead"))
    (cleared,) = told.records("cleared")
    assert (cleared["kind"], cleared["node"], cleared["rank"], cleared["recovered"]) == (
        "slow_compute",
        "node 1",
        1,
        False,
    )
    told.clear()
    for rank in range(3):  # what was read before that comes now
        pulse = Pulse(rank, 1, 2, 0.0, 0.0, "R", spent=spent)
        told(e.Answered(asked.number, f"node {rank}", [pulse]))
    assert told.of(c.ShowRanks) == []
    assert [each.node for each in found.values()] == ["node 2"], "it waits"
    told(e.GroupFailed("controller_died", "all restart", (0, 2)))
    assert [each["node"] for each in told.records("cleared")] == ["node 2"]

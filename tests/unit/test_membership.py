"""Generations form with exactly the living, in time, whatever dies or returns meanwhile."""

from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.config.check import topologies, world_sizes
from regrow.config.schema import PretrainConfig
from regrow.control.membership import LAST_CALL_S, Formation, Member, Membership
from regrow.plan.topology import fewest_ranks, topology_table


def member(name: str, node: str | None = None) -> Member:
    return Member(name, node or f"node of {name}", "127.0.0.1", 1, 1)


def joined(made: Membership, names: str, now: float, expected: int = 1) -> Formation | None:
    for name in names:
        made.join(member(name), expected=expected, now=now)
    return made.form(now)


def names(formation: Formation | None) -> str:
    return "".join(each.id for each in formation.members) if formation else ""


def started(names_of: str, sizes: range = range(1, 9)) -> Membership:
    made = Membership(sizes)
    assert names(joined(made, names_of, 0.0, expected=len(names_of))) == names_of
    return made


def test_the_first_group_waits_for_all_that_were_announced_but_not_for_ever() -> None:
    made = Membership(range(1, 9), patience_s=30)
    assert joined(made, "ab", 0.0, expected=3) is None
    assert made.form(29.9) is None
    assert names(made.form(30.0)) == "ab"
    again = Membership(range(1, 9))
    joined(again, "ab", 0.0, expected=3)
    assert names(joined(again, "c", 0.1, expected=3)) == "abc"


def test_survivors_form_at_once_when_the_dead_are_known() -> None:
    made = started("abc")
    assert joined(made, "ac", 5.0) is None  # b may come yet
    assert [lost.id for lost in made.died(["b"])] == ["b"]
    formation = made.form(5.01)
    assert (names(formation), formation and formation.generation) == ("ac", 2)


def test_members_that_come_at_the_last_call_are_in_the_group_and_the_next_one_has_its_own() -> None:
    """Their calls were queued behind that which was answered first, of a coordinator that could not answer."""
    made = started("abc")
    joined(made, "a", 5.0)
    assert made.form(5.0 + 10 * made.patience_s) is None
    assert names(joined(made, "bc", 5.0 + 10 * made.patience_s)) == "abc"
    again = 1000.0 + 10 * made.patience_s
    joined(made, "a", 1000.0)
    assert made.form(again) is None
    made.died(["a"])  # and none looks any more
    joined(made, "b", again + 50.0)
    assert made.form(again + 50.0 + made.patience_s) is None
    assert made.left_out == []


def test_a_death_while_it_forms_voids_it() -> None:
    made = started("abc")
    made.died(["b"])
    assert names(joined(made, "ac", 5.0)) == "ac"
    made.died(["c"])  # after it had joined
    assert names(joined(made, "a", 5.1)) == "a"
    assert made.generation == 3


def test_who_says_nothing_is_left_out_after_a_while_and_may_come_back() -> None:
    made = started("abc")
    joined(made, "ab", 5.0)
    assert made.form(5.0 + made.patience_s - 0.1) is None
    late = 5.0 + made.patience_s
    assert made.form(late) is None  # it may have said so, and was not heard yet
    assert made.form(late + LAST_CALL_S - 0.1) is None
    assert names(made.form(late + LAST_CALL_S)) == "ab"
    assert [each.id for each in made.left_out] == ["c"]
    made.join(member("c"), expected=1, now=50.0)
    assert not made.wants_to_grow(50.1)  # others may be about to come, too
    assert made.wants_to_grow(50.0 + made.settle_s)
    assert names(joined(made, "ab", 60.0)) == "abc"  # where it was does not matter: its state is old


def test_a_worker_that_waits_and_says_so_again_does_not_put_off_a_larger_group() -> None:
    """One that goes back to its keeper is told of once more by that: at late keepers hundreds of spares are."""
    made = started("abc")
    made.join(member("d"), expected=1, now=50.0)
    made.join(member("d"), expected=1, now=50.0 + made.settle_s - 0.1)
    assert made.wants_to_grow(50.0 + made.settle_s)


def test_a_node_of_four_joins_at_once_not_one_worker_after_another() -> None:
    """Ray has started them all; each has its own start-up to go through."""
    made = started("a")
    made.placed = {"new": 4}
    changes = 0
    for at, name in ((10.0, "b"), (15.0, "c"), (21.0, "d"), (30.0, "e")):
        made.join(member(name, "new"), expected=1, now=at)
        for later in range(5):
            changes += made.wants_to_grow(at + later)
    assert changes == 3, "from two seconds after the last one of them on"
    made.join(member("a", "node of a"), expected=1, now=35.0)
    assert names(made.form(35.0)) == "abcde"


def test_workers_that_were_started_and_do_not_join_are_waited_for_a_while() -> None:
    made = started("a")
    made.placed = {"new": 4}
    made.join(member("b", "new"), expected=1, now=10.0)
    assert not made.wants_to_grow(10.0 + made.settle_s)
    assert not made.wants_to_grow(10.0 + made.settle_s + made.announced_s - 1.0)
    assert made.wants_to_grow(10.0 + made.settle_s + made.announced_s + 1.0)
    made.placed = {"new": 1}  # the others have died
    assert made.wants_to_grow(20.0)


def test_ranks_beyond_an_allowed_size_wait() -> None:
    made = started("abcd", range(2, 5, 2))
    made.died(["b"])
    assert names(joined(made, "acd", 5.0)) == "ac"
    assert list(made.waiting) == ["d"]
    assert not made.wants_to_grow(100.0)
    made.join(member("e"), expected=1, now=100.0)
    assert made.wants_to_grow(102.0)
    assert names(joined(made, "ac", 103.0)) == "acde"


def test_whoever_waits_beside_a_group_that_trains_does_not_make_it_late() -> None:
    """A spare one, for hours; then one of the group dies."""
    made = started("abc", range(1, 4))
    made.join(member("s"), expected=1, now=1.0)
    assert made.form(1.0 + 10 * made.patience_s) is None
    assert made.left_out == []
    made.died(["b"])
    now = 1000 * made.patience_s
    assert joined(made, "a", now) is None  # c has all its time
    assert made.form(now + made.patience_s - 0.1) is None
    assert names(joined(made, "c", now + made.patience_s - 0.05)) == "acs"


def test_too_few_wait() -> None:
    made = started("abc", range(2, 4))
    made.died(["a", "b"])
    assert joined(made, "c", 5.0) is None
    assert names(joined(made, "d", 9.0)) == "cd"


def test_after_all_have_died_it_waits_for_those_that_are_left() -> None:
    made = started("abc")
    made.died("abc", left=2)
    assert joined(made, "d", 5.0) is None
    assert joined(made, "e", 5.1) is None
    assert names(made.form(5.1 + made.settle_s)) == "de"


def test_ranks_of_a_node_stand_together() -> None:
    made = Membership(range(1, 9))
    for name, node in [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]:
        made.join(member(name, node), expected=4, now=0.0)
    assert names(made.form(0.0)) == "acbd"


def placed(name: str, node: str, gpu: int) -> Member:
    return Member(name, node, "127.0.0.1", 1, 1, gpu=gpu)


def test_ranks_of_a_node_stand_in_the_order_of_its_gpus_whoever_survived() -> None:
    """So that the ranks of two nodes that meet in a replica group have the same rail."""
    made = Membership(range(1, 9))
    for name, node, gpu in [("c", "x", 2), ("f", "y", 1), ("a", "x", 0), ("e", "y", 0), ("b", "x", 1), ("g", "y", 2)]:
        made.join(placed(name, node, gpu), expected=6, now=0.0)
    assert names(made.form(0.0)) == "abcefg", "in whatever order they came"
    made.died("a")
    for name, node, gpu in [("b", "x", 1), ("c", "x", 2), ("e", "y", 0), ("f", "y", 1), ("g", "y", 2)]:
        made.join(placed(name, node, gpu), expected=1, now=5.0)
    assert names(made.form(5.0)) == "bcefg", "survivors keep their order"
    for name, node, gpu in [("h", "z", 0), ("d", "x", 0), *((each.id, each.node, each.gpu) for each in made.current)]:
        made.join(placed(name, node, gpu), expected=1, now=9.0)
    assert names(made.form(9.0)) == "dbcefgh", "the survivors' nodes first, and on each by GPU"


def test_units_are_of_neighbouring_gpus() -> None:
    made = Membership(range(2, 9), unit=2)
    for name, gpu in [("d", 3), ("a", 0), ("c", 2), ("b", 1)]:
        made.join(placed(name, "x", gpu), expected=4, now=0.0)
    assert names(made.form(0.0)) == "abcd"


def on_nodes(made: Membership, layout: dict[str, str], now: float, expected: int = 1) -> Formation | None:
    """Members by the letters of their names, the nodes that they are on."""
    for node, of_node in layout.items():
        for name in of_node:
            made.join(member(name, node), expected=expected, now=now)
    return made.form(now)


def test_a_unit_is_whole_and_on_one_node() -> None:
    made = Membership(range(2, 9), unit=2)
    assert names(on_nodes(made, {"x": "abc", "y": "de"}, 0.0, expected=5)) == "abde"
    assert [each.id for each in made.without_unit] == ["c"]
    assert not made.wants_to_grow(100.0)  # one alone is no unit
    made.join(member("f", "x"), expected=1, now=100.0)
    assert made.wants_to_grow(102.0)
    assert names(on_nodes(made, {"x": "abcf", "y": "de"}, 103.0)) == "abcfde"


def test_the_rest_of_a_broken_unit_waits_until_its_node_has_another() -> None:
    made = Membership(range(2, 9), unit=2)
    on_nodes(made, {"x": "ab", "y": "cd"}, 0.0, expected=4)
    made.died(["c"])
    assert names(on_nodes(made, {"x": "ab", "y": "d"}, 5.0)) == "ab"
    assert [each.id for each in made.without_unit] == ["d"]
    made.join(member("e", "z"), expected=1, now=6.0)
    assert not made.wants_to_grow(10.0)  # on another node
    made.join(member("f", "y"), expected=1, now=11.0)
    assert made.wants_to_grow(13.0)


def test_nothing_is_stopped_for_a_group_whose_steps_would_take_as_long() -> None:
    """Seven slices: the busiest of four, five and six ranks has two of them."""
    made = Membership(range(1, 9), step_costs=costs(7))
    joined(made, "abc", 0.0, expected=3)
    made.join(member("d"), expected=1, now=1.0)
    assert made.wants_to_grow(3.0), "three slices before, two after"
    assert names(joined(made, "abc", 3.0)) == "abcd"
    for name, now in (("e", 5.0), ("f", 6.0)):
        made.join(member(name), expected=1, now=now)
        assert not made.wants_to_grow(now + 100.0), "they are spares"
    made.join(member("g"), expected=1, now=7.0)
    assert made.wants_to_grow(9.0), "one slice each"
    assert names(joined(made, "abcd", 9.0)) == "abcdefg"
    made.died(["b"])
    assert names(joined(made, "acdefg", 12.0)) == "acdefg"
    made.join(member("h"), expected=1, now=13.0)
    assert made.wants_to_grow(15.0)


def test_where_no_group_could_be_formed_there_is_nothing_to_grow_to() -> None:
    made = Membership(range(3, 9), step_costs=costs(7))
    joined(made, "abc", 0.0, expected=3)
    made.died(["b", "c"])
    made.join(member("d"), expected=1, now=1.0)
    assert not made.wants_to_grow(100.0)


def test_a_spare_takes_the_place_of_a_lost_rank_at_once() -> None:
    made = Membership(range(1, 9), step_costs=costs(7))
    joined(made, "abcd", 0.0, expected=4)
    made.join(member("e"), expected=1, now=1.0)
    assert not made.wants_to_grow(100.0)
    made.died(["b"])
    assert names(joined(made, "acd", 101.0)) == "acde"


def costs(num_slices: int, unit: int = 1) -> dict[int, float]:
    table = topology_table(min_workers=unit, max_workers=num_slices * unit, num_slices=num_slices, tp=unit)
    return {size: each.step_cost for size, each in table.items()}


FEWEST = fewest_ranks(topology_table(min_workers=1, max_workers=8, num_slices=8))  # 5, 6 and 7 do as well as 4


def test_ranks_that_make_no_step_faster_are_left_out_and_taken_in_once_others_are_lost() -> None:
    made = Membership(range(1, 9), step_costs=costs(8), fewest=FEWEST)
    assert names(joined(made, "abcdef", 0.0, expected=6)) == "abcd"
    assert [each.id for each in made.spares] == ["e", "f"]
    assert not made.wants_to_grow(100.0)
    made.died(["b"])
    assert names(joined(made, "acd", 101.0)) == "acde"
    assert [each.id for each in made.spares] == ["f"]
    for name, now in (("g", 110.0), ("h", 120.0), ("i", 130.0)):
        made.join(member(name), expected=1, now=now)
        assert made.wants_to_grow(now + 5.0) == (name == "i"), "all eight have one slice, four to seven two"
    assert names(joined(made, "acde", 136.0)) == "acdefghi"
    assert made.spares == ()
    made.died(["c"])
    assert names(joined(made, "adefghi", 140.0)) == "adef", "the first ranks hold on to what they have"
    assert [each.id for each in made.spares] == ["g", "h", "i"]


def test_a_spare_that_dies_is_none_any_more_and_one_on_a_draining_node_neither() -> None:
    made = Membership(range(1, 9), step_costs=costs(8), fewest=FEWEST)
    on_nodes(made, {"x": "abc", "y": "def"}, 0.0, expected=6)
    assert [each.id for each in made.spares] == ["e", "f"]
    made.died(["e"])
    assert not made.wants_to_grow(10.0)
    assert [each.id for each in made.spares] == ["f"]
    made.avoided = {"y"}
    assert made.wants_to_leave_nodes()
    assert not made.wants_to_grow(11.0)
    assert made.spares == ()


def test_a_group_goes_back_to_the_pipelines_asked_for_whatever_a_step_takes() -> None:
    """Three ranks with all blocks each have shorter steps than four in two stages."""
    made = Membership(range(2, 5), step_costs={2: 6.5, 3: 4.0, 4: 4.7}, fewest={2: 2, 3: 3, 4: 4}, configured={2, 4})
    joined(made, "abcd", 0.0, expected=4)
    made.died(["b"])
    assert names(joined(made, "acd", 1.0)) == "acd"
    made.join(member("e"), expected=1, now=2.0)
    assert made.wants_to_grow(5.0)
    assert names(joined(made, "acd", 5.0)) == "acde"


def test_ranks_that_share_rows_are_of_any_nodes_and_the_rest_of_a_unit_waits_as_a_spare() -> None:
    config = PretrainConfig()
    config.parallel.cp, config.cluster.min_workers, config.cluster.max_workers = 2, 2, 4
    table, sizes = topologies(config), world_sizes(config)
    made = Membership(list(sizes), 1, {size: each.step_cost for size, each in table.items()}, sizes)
    assert names(joined(made, "abcd", 0.0, expected=4)) == "abcd"
    made.died(["b"])
    assert names(joined(made, "acd", 5.0)) == "ac"
    assert [each.id for each in made.spares] == ["d"]
    assert not made.wants_to_grow(60.0)
    assert joined(made, "e", 60.0) is None
    assert made.wants_to_grow(63.0)
    assert names(joined(made, "ac", 64.0)) == "acde"


def test_a_group_that_is_to_have_more_units_than_make_its_steps_shorter_has_a_world_size_too() -> None:
    """Eight slices: of 8 to 15 ranks, two to a unit, four units are taken, unless a fifth is to tell which is wrong."""
    config = PretrainConfig()
    config.parallel.cp, config.cluster.min_workers, config.cluster.max_workers = 2, 4, 16
    config.optim.num_slices = config.optim.global_batch_seqs = 8
    config.cluster.spare_workers = "auto"
    table, sizes = topologies(config), world_sizes(config)
    made = Membership(list(sizes), 1, {size: each.step_cost for size, each in table.items()}, sizes)
    made.deciding = [size for size, each in table.items() if each.mesh.num_units >= 5]
    formed = names(joined(made, "abcdefghijk", 0.0, expected=11))
    assert formed == "abcdefghij"
    assert len(formed) in table


def test_a_group_of_as_many_units_as_it_takes_may_be_smaller_than_one_of_fewer() -> None:
    """Fourteen ranks would be two units of seven stages, twelve are three of four."""
    config = PretrainConfig()
    config.parallel.pp = config.parallel.least_pp = 4
    config.cluster.min_workers, config.cluster.max_workers = 8, 16
    config.model.num_layers = 32
    config.optim.num_slices = config.optim.global_batch_seqs = 128
    table, sizes = topologies(config), world_sizes(config)
    assert (table[14].mesh.num_units, sizes[14]) == (2, 14)
    made = Membership(list(sizes), 1, {size: each.step_cost for size, each in table.items()}, sizes)
    assert len(names(joined(made, "abcdefghijklmn", 0.0, expected=14))) == 14
    made.deciding = [size for size, each in table.items() if each.mesh.num_units >= 3]
    made.differing = {"n", "m"}
    assert names(joined(made, "abcdefghijklmn", 1.0)) == "mnabcdefghij"
    made.died(["m", "a", "b"])
    assert joined(made, "cdefghijnkl", 2.0) is None, "eleven are one unit"


def test_units_share_the_slices_out() -> None:
    made = Membership(range(2, 13), unit=2, step_costs=costs(5, unit=2))
    assert names(on_nodes(made, {"x": "abcd", "y": "ef"}, 0.0, expected=6)) == "abcdef"
    for name in "gh":
        made.join(member(name, "z"), expected=1, now=1.0)
    assert not made.wants_to_grow(100.0), "two slices in three units and in four"
    for name in "ij":
        made.join(member(name, "z"), expected=1, now=101.0)
    assert made.wants_to_grow(103.0)


def test_too_few_for_a_unit_wait() -> None:
    made = Membership(range(2, 9), unit=2)
    assert on_nodes(made, {"x": "a", "y": "b"}, 0.0, expected=2) is None


@given(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)), st.integers(1, 4), st.integers(1, 20))
def test_any_nodes_make_the_largest_group_of_whole_units(nodes: dict[str, int], unit: int, most: int) -> None:
    made = Membership(range(1, most + 1), unit=unit, settle_s=0, patience_s=0)
    for node, count in nodes.items():
        for number in range(count):
            made.join(member(f"{node}{number}", node), expected=1, now=0.0)
    formation = made.form(0.0)
    members = formation.members if formation else ()
    units = sum(count // unit for count in nodes.values())
    assert len(members) == min(units, most // unit) * unit
    for first in range(0, len(members), unit):
        assert len({each.node for each in members[first : first + unit]}) == 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("jdf"), st.sampled_from("abcdef")), max_size=60))
def test_a_generation_never_holds_the_dead_and_numbers_only_grow(steps: list[tuple[str, str]]) -> None:
    made, alive, newest = Membership(range(1, 7), settle_s=0, patience_s=0), set[str](), 0
    for now, (step, name) in enumerate(steps):
        if step == "j":
            made.join(member(name), expected=1, now=now)
            alive.add(name)
        elif step == "d":
            made.died([name])
            alive.discard(name)
        formation = made.form(now) if step == "f" else None
        if formation is not None:
            ids = [each.id for each in formation.members]
            assert set(ids) <= alive
            assert len(ids) == len(set(ids))
            assert formation.generation == newest + 1
            newest = formation.generation

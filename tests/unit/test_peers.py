"""Who holds whose copies, and trees of nodes."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.control.peers import plan_peers, plan_tree

RACKS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def in_racks(sizes: list[int]) -> list[tuple[str, str]]:
    return [(f"n{rack}-{number}", f"rack {rack}") for rack, size in enumerate(sizes) for number in range(size)]


@settings(max_examples=300)
@given(sizes=RACKS, copies=st.integers(1, 3))
def test_every_node_holds_as_many_copies_as_it_has_and_a_rack_that_is_lost_takes_one_of_them_at_most(
    sizes: list[int], copies: int
) -> None:
    nodes, plan = in_racks(sizes), plan_peers(in_racks(sizes), copies=copies)
    rack = dict(nodes)
    assert list(plan) == [node for node, _ in nodes]
    have = min(copies, len(nodes) - 1)
    for node, holders in plan.items():
        assert len({node, *holders}) == have + 1
        if len(nodes) >= (copies + 1) * max(sizes):
            assert len({rack[each] for each in (node, *holders)}) == copies + 1
        elif len(nodes) >= 2 * max(sizes):
            assert rack[holders[0]] != rack[node]
    assert set(Counter(each for holders in plan.values() for each in holders).values()) <= {have}


@pytest.mark.parametrize("copies", [1, 2])
def test_of_64_nodes_in_racks_of_8_any_racks_may_be_lost_at_once_as_many_as_there_are_copies(copies: int) -> None:
    plan = plan_peers(in_racks([8] * 8), copies=copies)
    rack = dict(in_racks([8] * 8))
    for lost in combinations({*rack.values()}, copies):
        assert all(any(rack[each] not in lost for each in (node, *holders)) for node, holders in plan.items())


@settings(max_examples=300)
@given(sizes=RACKS, copies=st.integers(1, 2), broken=st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=3))
def test_copies_go_around_links_that_do_not_do_and_nobody_holds_more_for_it(
    sizes: list[int], copies: int, broken: list[tuple[int, int]]
) -> None:
    nodes = in_racks(sizes)
    names = [node for node, _ in nodes]
    cut = {(names[a % len(names)], names[b % len(names)]) for a, b in broken}
    plan = plan_peers(nodes, copies=copies, allowed=lambda node, holder: (node, holder) not in cut)
    for node, holders in plan.items():
        assert node not in holders
        assert len(set(holders)) == len(holders)
        assert cut.isdisjoint((node, each) for each in holders)
    held = Counter(each for holders in plan.values() for each in holders)
    assert max(held.values(), default=0) <= copies
    if len(names) > copies + 2 * len(cut) + 1:
        assert all(len(holders) == copies for holders in plan.values())


def test_with_one_link_cut_of_three_nodes_all_have_copies_still() -> None:
    nodes = [(node, node) for node in "abc"]
    assert plan_peers(nodes, allowed=lambda node, holder: (node, holder) != ("a", "b")) == {
        "a": ("c",),
        "b": ("a",),
        "c": ("b",),
    }
    assert plan_peers(nodes[:2], allowed=lambda node, holder: node != "a") == {"a": (), "b": ("a",)}


@pytest.mark.parametrize("fan_out", [1, 2, 16])
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 16, 17, 272, 273])
def test_a_tree_has_every_node_once_and_nobody_leads_more_than_its_fan_out(num_nodes: int, fan_out: int) -> None:
    nodes = [f"n{number}" for number in range(num_nodes)]
    tree = plan_tree(nodes, fan_out=fan_out)
    assert list(tree) == nodes
    tops = [node for node in nodes if not tree[node].leader]
    assert tops == nodes[:fan_out], "as many as the root may have, the first ones"
    assert sum(tree[node].num_nodes for node in tops) == num_nodes
    for node, branch in tree.items():
        assert len(branch.members) <= fan_out
        assert all(tree[member].leader == node for member in branch.members)
        assert branch.num_nodes == 1 + sum(tree[member].num_nodes for member in branch.members)

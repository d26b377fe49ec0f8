"""Trees of nodes."""

import pytest

from regrow.control.peers import plan_tree


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

"""Which node holds copies of which other one's snapshots, and which speaks for which. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


def plan_peers(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """For each of (node, failure domain) the node that holds its copies; "" where there is only one.

    Every node holds the copies of exactly one other. They are of another domain for as many nodes as that can be: for
    all of them unless one domain has more than half.

    >>> plan_peers([("a", "rack 1"), ("b", "rack 1"), ("c", "rack 2"), ("d", "rack 2")])
    {'a': 'c', 'b': 'd', 'c': 'a', 'd': 'b'}
    """
    sizes = Counter(domain for _, domain in nodes)
    # domains stand together, the largest first: a shift by its size takes every node out of its own
    order = [node for node, domain in sorted(nodes, key=lambda each: (-sizes[each[1]], each[1]))]
    shift = max(sizes.values(), default=1) % max(len(order), 1) or 1
    peers = {node: order[(at + shift) % len(order)] for at, node in enumerate(order)}
    return {node: peers[node] if peers[node] != node else "" for node, _ in nodes}


@dataclass(frozen=True)
class Branch:
    """A node's place in a tree."""

    leader: str  # "": the root, which is no node
    members: tuple[str, ...]  # that it is the leader of
    num_nodes: int  # itself, its members, theirs and so on


def plan_tree(nodes: Sequence[str], *, fan_out: int) -> dict[str, Branch]:
    """A tree in which none has more than `fan_out` members, the root included, as flat as that can be.

    >>> {node: (branch.leader, branch.num_nodes) for node, branch in plan_tree("abcde", fan_out=2).items()}
    {'a': ('', 3), 'b': ('', 2), 'c': ('a', 1), 'd': ('a', 1), 'e': ('b', 1)}
    """
    sizes = [1] * len(nodes)
    for at in reversed(range(fan_out, len(nodes))):
        sizes[at // fan_out - 1] += sizes[at]
    return {
        node: Branch(
            leader=nodes[at // fan_out - 1] if at >= fan_out else "",
            members=tuple(nodes[fan_out * (at + 1) : fan_out * (at + 2)]),
            num_nodes=sizes[at],
        )
        for at, node in enumerate(nodes)
    }

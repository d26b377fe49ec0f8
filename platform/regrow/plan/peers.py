"""Which node holds copies of which other one's snapshots. Pure."""

from collections import Counter
from collections.abc import Sequence


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

"""How much memory snapshots take on a node. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotMemory:
    """Bytes that one node's keeper holds at most."""

    at_smallest: int  # in a group of the smallest size allowed
    of_before: int  # of the generation before, until the new one has committed a step; then kept for the next one

    @property
    def total(self) -> int:
        return self.at_smallest + self.of_before


def plan_snapshot_memory(
    *, rank_bytes: int, most_rank_bytes: int, slots: int, ranks_on_node: int, ranks_copied: int
) -> SnapshotMemory:
    """For a node with so many ranks, and copies of so many of other nodes; the state of a rank takes `rank_bytes` now,
    and at worst `most_rank_bytes`.

    Each rank has `slots` slots, and as many copies wherever there is one.

    >>> plan_snapshot_memory(rank_bytes=300, most_rank_bytes=400, slots=3, ranks_on_node=2, ranks_copied=2)
    SnapshotMemory(at_smallest=4800, of_before=3600)
    """
    files = slots * (ranks_on_node + ranks_copied)
    return SnapshotMemory(files * most_rank_bytes, files * rank_bytes)


def ranks_copied(peers: Mapping[str, Sequence[str]], ranks: Sequence[str]) -> Counter[str]:
    """Of other nodes' ranks, how many each node holds copies of: by the nodes' peers, and the node of each rank.

    >>> ranks_copied({"a": ["b"], "b": ["c"], "c": ["a"]}, ["a", "a", "a", "b", "c"])["b"]
    3
    """
    on = Counter(ranks)
    copied: Counter[str] = Counter()
    for node, holders in peers.items():
        for holder in holders:
            copied[holder] += on[node]
    return copied


def equal_nodes(world_size: int, per_node: int, copies: int) -> tuple[int, int]:
    """(ranks, ranks of others of which there are copies) of the fullest node, where all are filled up but the last."""
    on_node = min(per_node, world_size)
    return on_node, on_node * min(copies, -(-world_size // on_node) - 1)

"""How much memory snapshots take on a node. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotMemory:
    """Bytes that one node's keeper holds at most."""

    at_most: int  # in a group of the size that takes most
    world_size: int  # of that group
    of_before: int  # of the generation before, until the new one has committed a step; then kept for the next one

    @property
    def total(self) -> int:
        return self.at_most + self.of_before


def plan_snapshot_memory(
    world_size: int, rank_bytes: Mapping[int, int], *, slots: int, ranks_on_node: int, ranks_copied: int
) -> SnapshotMemory:
    """For a node with so many ranks, and copies of so many of other nodes; by each world size that a group may have,
    this one among them, the bytes of a rank's state.

    Each rank has `slots` slots, and as many copies wherever there is one; no group has files of more ranks than it has.

    >>> plan_snapshot_memory(8, {2: 400, 8: 100}, slots=3, ranks_on_node=2, ranks_copied=2)
    SnapshotMemory(at_most=2400, world_size=2, of_before=1200)
    """
    files = ranks_on_node + ranks_copied
    held = {size: slots * min(files, size) * num_bytes for size, num_bytes in rank_bytes.items()}
    most = max(held, key=held.__getitem__)
    return SnapshotMemory(held[most], most, held[world_size])


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

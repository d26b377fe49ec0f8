"""How much memory snapshots take on a node. Pure."""

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
    *, state_bytes: int, slots: int, ranks_on_node: int, num_shards: int, least_shards: int, has_peer: bool
) -> SnapshotMemory:
    """For a node with so many ranks, whose state is sharded `num_shards` ways now, and at worst `least_shards`.

    Each rank has `slots` slots, and as many copies of another node's rank where there is one.

    >>> plan_snapshot_memory(
    ...     state_bytes=1200, slots=3, ranks_on_node=2, num_shards=4, least_shards=3, has_peer=True
    ... )
    SnapshotMemory(at_smallest=4800, of_before=3600)
    """
    files = slots * (2 if has_peer else 1) * ranks_on_node
    return SnapshotMemory(files * -(-state_bytes // least_shards), files * -(-state_bytes // num_shards))

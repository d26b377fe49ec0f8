"""The topology of each world size: mesh, batch plan and unit, decided once and looked up everywhere. Pure.

The driver makes the table and hands it to every worker. What fills it here is a rule; a planner may fill it otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.errors import BatchError
from regrow.plan.batch import BatchPlan, plan_batch
from regrow.plan.mesh import MeshShape, plan_mesh


@dataclass(frozen=True)
class Topology:
    """How a group of one world size is laid out."""

    mesh: MeshShape
    batch: BatchPlan  # over units

    @property
    def unit(self) -> int:
        """Ranks that share the computation of their rows, on one node; a group has whole units."""
        return self.mesh.tp

    def unit_of(self, rank: int) -> int:
        """The data-parallel rank that a rank belongs to."""
        return rank // self.unit

    def slices_of(self, rank: int) -> range:
        """Of every global batch."""
        return self.batch.range_of(self.unit_of(rank))


Table = Mapping[int, Topology]  # by world size


def plan_topology(
    world_size: int, *, num_slices: int, dp_replicate: int = 1, tp: int = 1, slices_per_pass: int = 1
) -> Topology:
    """The topology of one world size by the rule of `plan_mesh` and `plan_batch`. Raises BatchError if there is none.

    >>> plan_topology(14, num_slices=21, dp_replicate=2, tp=2).slices_of(3)
    range(3, 6)
    """
    if world_size < tp or world_size % tp:
        raise BatchError(f"{world_size} workers are not whole units of parallel.tp={tp}")
    mesh = plan_mesh(world_size, dp_replicate, tp)
    return Topology(mesh, plan_batch(num_slices=num_slices, world_size=mesh.num_units, slices_per_pass=slices_per_pass))


def topology_table(
    *,
    min_workers: int,
    max_workers: int,
    num_slices: int,
    dp_replicate: int = 1,
    tp: int = 1,
    slices_per_pass: int = 1,
) -> dict[int, Topology]:
    """Every world size from `min_workers` to `max_workers` that is whole units, smallest first.

    >>> list(topology_table(min_workers=4, max_workers=9, num_slices=12, tp=2))
    [4, 6, 8]
    """
    rule = {"num_slices": num_slices, "dp_replicate": dp_replicate, "tp": tp, "slices_per_pass": slices_per_pass}
    sizes = range(-(-min_workers // tp) * tp, max_workers + 1, tp)
    return {world_size: plan_topology(world_size, **rule) for world_size in sizes}


def largest(table: Table, at_most: int) -> Topology:
    """The topology of the largest world size up to this one; of the smallest, where all are larger."""
    return table[max((size for size in table if size <= at_most), default=min(table))]


def least_shards(table: Table) -> int:
    """Into how few shards some world size splits a copy of the state: its ranks hold most."""
    return min(each.mesh.dp_shard for each in table.values())

"""The topology of each world size: mesh, batch plan and unit, decided once and looked up everywhere. Pure.

The driver makes the table and hands it to every worker. What fills it here is a rule; a planner may fill it otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from regrow.errors import BatchError
from regrow.plan.batch import BatchPlan, plan_batch
from regrow.plan.mesh import MeshShape, plan_mesh
from regrow.plan.pipeline import Stages, bubble_share


@dataclass(frozen=True)
class Topology:
    """How a group of one world size is laid out."""

    mesh: MeshShape
    batch: BatchPlan  # over units
    stages: Stages | None = None  # of a pipeline; None: each rank has all blocks

    def unit_of(self, rank: int) -> int:
        """The data-parallel rank that a rank belongs to."""
        return self.mesh.unit_of(rank)

    def slices_of(self, rank: int) -> range:
        """Of every global batch."""
        return self.batch.range_of(self.unit_of(rank))

    @property
    def bubble_share(self) -> float:
        """Of a step, in which a rank waits for its pipeline to fill and drain."""
        stages = self.stages
        return bubble_share(stages.pp, stages.per_rank, self.batch.num_micro_batches) if stages else 0.0


Table = Mapping[int, Topology]  # by world size


def plan_topology(
    world_size: int,
    *,
    num_slices: int,
    dp_replicate: int = 1,
    tp: int = 1,
    slices_per_pass: int = 1,
    stages: Stages | None = None,
) -> Topology:
    """The topology of one world size by the rule of `plan_mesh` and `plan_batch`. Raises BatchError if there is none.

    >>> plan_topology(14, num_slices=21, dp_replicate=2, tp=2).slices_of(3)
    range(3, 6)
    """
    pp = stages.pp if stages else 1
    if world_size < tp * pp or world_size % (tp * pp):
        of = f"parallel.tp={tp}" if pp == 1 else f"parallel.pp={pp} x parallel.tp={tp}"
        raise BatchError(f"{world_size} workers are not whole units of {of}")
    mesh = plan_mesh(world_size, dp_replicate, tp, pp)
    batch = plan_batch(num_slices=num_slices, world_size=mesh.num_units, slices_per_pass=slices_per_pass)
    return Topology(mesh, batch, stages)


def topology_table(
    *,
    min_workers: int,
    max_workers: int,
    num_slices: int,
    dp_replicate: int = 1,
    tp: int = 1,
    slices_per_pass: int = 1,
    stages: Stages | None = None,
) -> dict[int, Topology]:
    """Every world size from `min_workers` to `max_workers` that is whole units, smallest first.

    >>> list(topology_table(min_workers=4, max_workers=9, num_slices=12, tp=2))
    [4, 6, 8]
    """
    unit = tp * (stages.pp if stages else 1)
    return {
        world_size: plan_topology(
            world_size,
            num_slices=num_slices,
            dp_replicate=dp_replicate,
            tp=tp,
            slices_per_pass=slices_per_pass,
            stages=stages,
        )
        for world_size in range(-(-min_workers // unit) * unit, max_workers + 1, unit)
    }


def largest(table: Table, at_most: int) -> Topology:
    """The topology of the largest world size up to this one; of the smallest, where all are larger."""
    return table[max((size for size in table if size <= at_most), default=min(table))]


def fewest_ranks(table: Table) -> dict[int, int]:
    """By how many ranks are there, the smallest world size whose step takes as long: the others are its spares.

    That is, the unit with most slices has as many, so that it runs as many passes of the same size, and there are as
    many replicas of the model at the least.

    >>> fewest_ranks(topology_table(min_workers=5, max_workers=9, num_slices=16))
    {5: 5, 6: 6, 7: 6, 8: 8, 9: 8}
    """
    fewest: dict[int, int] = {}
    # by slices of the unit with most: the smallest size, and the smallest ones with more replicas
    alike: dict[int, list[int]] = {}
    for size in sorted(table):
        replicas, smaller = table[size].mesh.dp_replicate, alike.setdefault(table[size].batch.most_slices, [])
        if all(table[each].mesh.dp_replicate < replicas for each in smaller):
            smaller.append(size)
        fewest[size] = next(each for each in smaller if table[each].mesh.dp_replicate >= replicas)
    return fewest


def least_shards(table: Table) -> int:
    """Into how few shards some world size splits a copy of the state: its ranks hold most."""
    return min(each.mesh.dp_shard for each in table.values())

"""The topology of each world size: mesh, batch plan and unit, decided once and looked up everywhere. Pure.

The driver makes the table and hands it to every worker. What fills it here is a rule; a planner may fill it otherwise.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from regrow.errors import BatchError
from regrow.plan.batch import BatchPlan, plan_batch
from regrow.plan.mesh import MeshShape, plan_mesh
from regrow.plan.pipeline import Stages, bubble_share

KEEP_PP = 0.03  # of all ranks' time, for which another number of stages is not worth that all blocks move


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

    def passes_of(self, rank: int) -> frozenset[int]:
        """Slices that a rank's passes hold."""
        return self.batch.passes_of(self.unit_of(rank))

    @property
    def bubble_share(self) -> float:
        """Of a step, in which a rank waits for its pipeline to fill and drain."""
        stages = self.stages
        return bubble_share(stages.pp, stages.per_rank, self.batch.num_micro_batches) if stages else 0.0

    @property
    def step_cost(self) -> float:
        """How long a step takes, in the time of one slice through all blocks on `tp` x `cp` ranks; collectives are
        free.

        >>> plan_topology(14, num_slices=21, dp_replicate=2, tp=2).step_cost
        3.0
        """
        stages, slices = self.stages, self.batch.most_slices
        return slices / (stages.pp * stages.even) / (1 - self.bubble_share) if stages else float(slices)

    def busy_share(self, num_ranks: int) -> float:
        """Of the time of so many ranks, those included that are left over, what goes into slices."""
        return self.batch.num_slices * self.mesh.tp * self.mesh.cp / (num_ranks * self.step_cost)


Table = Mapping[int, Topology]  # by world size


@dataclass(frozen=True)
class Pipelines:
    """Into how many stages' ranks a model can be cut: `pp` where that divides the units, else `least` to `most`."""

    pp: int
    least: int
    most: int
    cut: Callable[[int], Stages]


def plan_topology(
    world_size: int,
    *,
    num_slices: int,
    dp_replicate: int = 1,
    tp: int = 1,
    cp: int = 1,
    slices_per_pass: int = 1,
    stages: Stages | None = None,
) -> Topology:
    """The topology of one world size by the rule of `plan_mesh` and `plan_batch`. Raises BatchError if there is none.

    >>> plan_topology(14, num_slices=21, dp_replicate=2, tp=2).slices_of(3)
    range(3, 6)
    """
    pp = stages.pp if stages else 1
    if world_size < tp * cp * pp or world_size % (tp * cp * pp):
        raise BatchError(f"{world_size} workers are not whole units of {ranks_of_unit(pp=pp, cp=cp, tp=tp)}")
    mesh = plan_mesh(world_size, dp_replicate, tp, pp, tuple(map(len, stages.blocks)) if stages else (), cp)
    batch = plan_batch(num_slices=num_slices, world_size=mesh.num_units, slices_per_pass=slices_per_pass)
    return Topology(mesh, batch, stages)


def ranks_of_unit(**axes: int) -> str:
    """How many ranks a unit has, as settings.

    >>> ranks_of_unit(pp=1, cp=2, tp=4)
    'parallel.cp=2 x parallel.tp=4'
    """
    return " x ".join(f"parallel.{name}={size}" for name, size in axes.items() if size > 1) or "1"


def topology_table(
    *,
    min_workers: int,
    max_workers: int,
    num_slices: int,
    dp_replicate: int = 1,
    tp: int = 1,
    cp: int = 1,
    slices_per_pass: int = 1,
    pipelines: Pipelines | None = None,
) -> dict[int, Topology]:
    """Every world size from `min_workers` to `max_workers` that is whole units, smallest first.

    With `pipelines` those of multiples of their `pp` have it. The others, which are whole multiples of `tp` x `cp`,
    have the number of stages whose step is shortest, and are left out where none divides them.

    >>> list(topology_table(min_workers=4, max_workers=9, num_slices=12, tp=2))
    [4, 6, 8]
    """
    width = tp * cp
    sizes = range(-(-min_workers // width) * width, max_workers + 1, width)

    def plan(world_size: int, stages: Stages | None) -> Topology:
        return plan_topology(
            world_size,
            num_slices=num_slices,
            dp_replicate=dp_replicate,
            tp=tp,
            cp=cp,
            slices_per_pass=slices_per_pass,
            stages=stages,
        )

    if pipelines is None:
        return {world_size: plan(world_size, None) for world_size in sizes}
    table: dict[int, Topology] = {}
    for world_size in sizes:
        units = world_size // width
        fit = [pipelines.pp] if units % pipelines.pp == 0 else _that_fit(units, num_slices, pipelines)
        plans = [plan(world_size, pipelines.cut(pp) if pp > 1 else None) for pp in fit]
        if plans:
            table[world_size] = min(plans, key=lambda each: round(each.step_cost, 9))  # of equals the fewest stages
    return table


def _that_fit(units: int, num_slices: int, pipelines: Pipelines) -> list[int]:
    """How many stages' ranks make whole units, each with a slice, of so many that are of one stage; fewest first."""
    most = min(units, pipelines.most)
    return [pp for pp in range(pipelines.least, most + 1) if units % pp == 0 and units // pp <= num_slices]


def taken_sizes(table: Table, present: Iterable[int], *, pp: int) -> dict[int, int]:
    """By how many ranks are there, in ascending order, the world size of the group: where that is a multiple of `pp`
    units of `tp` x `cp` ranks all of them, else as many as make the shortest step; with `pp` stages where that costs
    no more than 3% of all ranks' time. The others are spares. None of fewer ranks than the smallest group.
    """
    taken: dict[int, int] = {}
    sizes = sorted(table)
    at, shortest, kept = 0, 0, 0  # world sizes; 0: none yet
    for ranks in present:
        while at < len(sizes) and sizes[at] <= ranks:
            size, at = sizes[at], at + 1
            shortest = size if not shortest or _is_shorter(table, size, shortest) else shortest
            if table[size].mesh.pp == pp:
                kept = size if not kept or _is_shorter(table, size, kept) else kept
        if ranks in table and table[ranks].mesh.pp == pp:
            taken[ranks] = ranks
        elif shortest:
            costs = table[shortest].busy_share(ranks) - (table[kept].busy_share(ranks) if kept else 0.0)
            taken[ranks] = kept if kept and costs <= KEEP_PP else shortest
    return taken


def _is_shorter(table: Table, size: int, than: int) -> bool:
    """Whether a step of a larger group takes less time, or none more."""
    return table[size].step_cost <= table[than].step_cost + 1e-9


def largest(table: Table, at_most: int) -> Topology:
    """The topology of the largest world size up to this one; of the smallest, where all are larger."""
    return table[max((size for size in table if size <= at_most), default=min(table))]


def fewest_ranks(table: Table) -> dict[int, int]:
    """By how many ranks are there, the smallest world size whose step takes as long: the others are its spares.

    That is, the unit with most slices has as many, so that it runs as many passes of the same size through as many
    stages, and there are as many replicas of the model at the least.

    >>> fewest_ranks(topology_table(min_workers=5, max_workers=9, num_slices=16))
    {5: 5, 6: 6, 7: 6, 8: 8, 9: 8}
    """
    fewest: dict[int, int] = {}
    # by stages and slices of the unit with most: the smallest size, and the smallest ones with more replicas
    alike: dict[tuple[int, int], list[int]] = {}
    for size in sorted(table):
        mesh, slices = table[size].mesh, table[size].batch.most_slices
        replicas, smaller = mesh.dp_replicate, alike.setdefault((mesh.pp, slices), [])
        if all(table[each].mesh.dp_replicate < replicas for each in smaller):
            smaller.append(size)
        fewest[size] = next(each for each in smaller if table[each].mesh.dp_replicate >= replicas)
    return fewest

"""How a global batch is shared out: slices -> ranks -> micro-batches. Pure arithmetic, the same on every rank."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from regrow.errors import BatchError

MIN_BUSY_SHARE = 0.85  # ranks may idle at most 15% of the passes of a step


@dataclass(frozen=True)
class BatchPlan:
    """Which rank trains on which slices of every global batch at one world size."""

    num_slices: int
    world_size: int  # data-parallel ranks: units of those that share the same rows
    slices_per_pass: int  # most slices of one micro-batch

    def range_of(self, rank: int) -> range:
        """Slices of a data-parallel rank."""
        return range(rank * self.num_slices // self.world_size, (rank + 1) * self.num_slices // self.world_size)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Slices of each data-parallel rank, contiguous, in rank order."""
        return tuple(map(self.range_of, range(self.world_size)))

    def num_computed(self, rank: int) -> int:
        """Slices that go through a data-parallel rank's passes, those of zero-weight ones included."""
        return max(len(self.range_of(rank)), self.num_micro_batches)

    def passes_of(self, rank: int) -> frozenset[int]:
        """Slices that the passes of a data-parallel rank hold, zero-weight ones included: one number, or two.

        >>> plan = plan_batch(num_slices=32, world_size=7, slices_per_pass=2)
        >>> [sorted(plan.passes_of(rank)) for rank in (0, 1)]
        [[1, 2], [1, 2]]
        """
        slices = len(self.range_of(rank))
        passes = min(slices, self.num_micro_batches)
        return frozenset({slices // passes, -(-slices // passes)})

    @property
    def most_slices(self) -> int:
        """Slices of the rank that has most."""
        return -(-self.num_slices // self.world_size)

    @property
    def num_micro_batches(self) -> int:
        """Passes that every rank runs; ranks with fewer slices than that add zero-weight ones."""
        return -(-self.most_slices // self.slices_per_pass)

    @property
    def most_slices_of_a_pass(self) -> int:
        """Of the rank that has most."""
        return -(-self.most_slices // self.num_micro_batches)

    @property
    def busy_share(self) -> float:
        """Share of the ranks' time that trains on something, in (0, 1], a slice taking the same time everywhere."""
        return self.num_slices / (self.world_size * self.most_slices)

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_share


def plan_batch(*, num_slices: int, world_size: int, slices_per_pass: int = 1) -> BatchPlan:
    """Give each rank a contiguous range of slices of the global batch.

    Pure; the same on every rank. A rank shares its slices evenly among its passes, at most `slices_per_pass` in each,
    0 for 1. Raises BatchError if a rank would get no slice.

    >>> plan_batch(num_slices=12, world_size=5).ranges[-1]
    range(9, 12)
    """
    if world_size < 1 or num_slices < 1:
        raise BatchError(f"num_slices={num_slices} over world_size={world_size}: both must be at least 1")
    if num_slices < world_size:
        raise BatchError(
            f"num_slices={num_slices} gives 0 slices to {world_size - num_slices} of {world_size} ranks; "
            f"set optim.num_slices >= {world_size} or cluster.max_workers <= {num_slices}"
        )
    return BatchPlan(num_slices, world_size, max(1, slices_per_pass))


def check_world_sizes(
    *,
    num_slices: int,
    global_batch_seqs: int,
    min_workers: int,
    max_workers: int,
    unit: int = 1,
    runs: Callable[[], Collection[int]] | None = None,
) -> list[BatchPlan]:
    """Plan every world size from `min_workers` to `max_workers` that is whole units, of `unit` workers each.

    Of these only the ones of `runs()`, in workers, where groups have no others.

    Raises BatchError, naming a setting that works, if any of them is impossible or leaves ranks idle for more than
    15% of the passes, or if the slices do not divide the global batch.
    """
    if not 1 <= min_workers <= max_workers:
        raise BatchError(
            f"cluster.min_workers={min_workers} and cluster.max_workers={max_workers}: "
            "need 1 <= min_workers <= max_workers"
        )
    least, most = min_workers // unit, max_workers // unit
    if global_batch_seqs < 1 or num_slices < 1 or global_batch_seqs % num_slices:
        raise BatchError(
            f"optim.global_batch_seqs={global_batch_seqs} does not divide into "
            f"optim.num_slices={num_slices} equal slices; "
            f"set optim.global_batch_seqs={-(-max(global_batch_seqs, 1) // max(num_slices, 1)) * max(num_slices, 1)}"
        )
    plans, idle = [], []
    every = range(least, most + 1)
    for world_size in every if runs is None or num_slices < least else sorted(each // unit for each in runs()):
        if num_slices < world_size:
            idle.append((world_size, 1.0))
            continue
        plan = plan_batch(num_slices=num_slices, world_size=world_size)
        plans.append(plan)
        if plan.busy_share < MIN_BUSY_SHARE:
            idle.append((world_size, plan.idle_share))
    if idle:
        world_size, share = max(idle, key=lambda pair: (pair[1], pair[0]))
        what = (
            f"gives 0 slices to {world_size - num_slices} of {world_size} ranks"
            if num_slices < world_size
            else f"leaves ranks idle {share:.0%} of the passes at {world_size * unit} workers (at most 15% allowed)"
        )
        raise BatchError(
            f"optim.num_slices={num_slices} {what}; " + _suggestion(num_slices, global_batch_seqs, least, most)
        )
    return plans


def _fits(num_slices: int, min_workers: int, max_workers: int) -> bool:
    return all(
        num_slices / (d * -(-num_slices // d)) >= MIN_BUSY_SHARE and num_slices >= d
        for d in range(min_workers, max_workers + 1)
    )


def _suggestion(num_slices: int, global_batch_seqs: int, min_workers: int, max_workers: int) -> str:
    divisors = [s for s in range(num_slices + 1, global_batch_seqs + 1) if global_batch_seqs % s == 0]
    for better in divisors:
        if _fits(better, min_workers, max_workers):
            return f"set optim.num_slices={better}"
    for better in range(num_slices + 1, 16 * max_workers + 1):
        if _fits(better, min_workers, max_workers):
            return f"set optim.num_slices={better} optim.global_batch_seqs={-(-global_batch_seqs // better) * better}"
    raise AssertionError("16 slices a rank always leave at most 1/17 of the passes idle")  # pragma: no cover

"""Pipeline parallelism as data: which blocks each stage has, and what each rank does in which order. Pure.

1F1B (arXiv:2006.09503), and with several stages a rank interleaved 1F1B (arXiv:2104.04473, as Megatron-LM has it), here
for any number of micro-batches: rounds need not be equal.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple


class Action(NamedTuple):
    """The forward or the backward of a stage for one micro-batch."""

    is_forward: bool
    stage: int
    micro_batch: int


Orders = tuple[tuple[Action, ...], ...]  # by rank of the pipeline, what it does in order


@dataclass(frozen=True)
class Stages:
    """A model's blocks cut into stages; stage s is on rank s % pp of a pipeline."""

    pp: int  # ranks of a pipeline
    blocks: tuple[range, ...]  # of each stage, in the model's order
    even: float = 1.0  # share of its time that a rank computes, were there no bubble: the others' wait for the slowest

    @property
    def last(self) -> int:
        """The stage that has the output."""
        return len(self.blocks) - 1

    @property
    def per_rank(self) -> int:
        return len(self.blocks) // self.pp

    def of_rank(self, rank: int) -> range:
        """Numbers of a rank's stages."""
        return range(rank, len(self.blocks), self.pp)

    def num_blocks_of(self, rank: int) -> int:
        return sum(len(self.blocks[stage]) for stage in self.of_rank(rank))


@cache  # of every size and layout that is looked at the same
def cut_blocks(num_blocks: int, pp: int, per_rank: int, *, before: float, behind: float) -> Stages:
    """Cut blocks into `pp` times `per_rank` stages, so that the slowest rank has as little to do as it can.

    `before` and `behind` are what the embedding and the output cost, a block costing 1. Where ranks are equal a later
    one takes more, as earlier ones hold more micro-batches. Each stage has a block at least: there are so many.

    >>> cut_blocks(8, 2, 1, before=0.0, behind=2.0).blocks
    (range(0, 5), range(5, 8))
    """
    num_stages = pp * per_rank
    assert num_blocks >= num_stages, f"{num_blocks=} {num_stages=}"
    counts = [1] * num_stages
    outside = [0.0] * num_stages
    outside[0], outside[-1] = before, behind

    def cost(stage: int) -> tuple[float, float, int]:
        of_rank = sum(counts[each] + outside[each] for each in range(stage % pp, num_stages, pp))
        return round(of_rank, 6), round(counts[stage] + outside[stage], 6), -stage

    for _ in range(num_blocks - num_stages):
        counts[min(range(num_stages), key=cost)] += 1
    of_ranks = [sum(counts[each] + outside[each] for each in range(rank, num_stages, pp)) for rank in range(pp)]
    blocks = tuple(range(a, b) for a, b in pairwise(accumulate([0, *counts])))
    return Stages(pp, blocks, sum(of_ranks) / (pp * max(of_ranks)))


@cache  # of every step the same
def orders_of(pp: int, per_rank: int, num_micro_batches: int) -> Orders:
    """What each rank of a pipeline does with `num_micro_batches`, with `per_rank` stages each.

    >>> [(("B", "F")[each.is_forward], each.micro_batch) for each in orders_of(2, 1, 2)[0]]
    [('F', 0), ('F', 1), ('B', 0), ('B', 1)]
    """
    rounds = _rounds(pp, num_micro_batches)
    orders = []
    for rank in range(pp):
        stages = range(rank, pp * per_rank, pp)
        forward = [Action(True, stage, k) for each in rounds for stage in stages for k in each]
        backward = [Action(False, stage, k) for each in rounds for stage in reversed(stages) for k in each]
        behind = pp - rank - 1  # ranks, whose forwards come before this one's first backward
        ahead = behind if per_rank == 1 else 2 * behind + (per_rank - 1) * len(rounds[0])
        ahead = min(len(forward), ahead)
        steady = [each for pair in zip(forward[ahead:], backward, strict=False) for each in pair]
        orders.append((*forward[:ahead], *steady, *backward[len(forward) - ahead :]))
    return tuple(orders)


@cache
def forwards_of(pp: int, per_rank: int, num_micro_batches: int) -> Orders:
    """The same of forwards alone, for validation."""
    orders = orders_of(pp, per_rank, num_micro_batches)
    return tuple(tuple(action for action in order if action.is_forward) for order in orders)


def received_by(rank: int, orders: Orders, *, forward: bool) -> list[Action]:
    """Actions whose input comes from another rank, in the order in which that rank sends: activations come from the
    rank before, gradients from the one behind, round the ring."""
    pp = len(orders)
    last = max(action.stage for order in orders for action in order)
    sender = orders[(rank - 1 if forward else rank + 1) % pp]
    step = 1 if forward else -1
    found = (each._replace(stage=each.stage + step) for each in sender if each.is_forward is forward)
    return [each for each in found if 0 <= each.stage <= last]


def bubble_share(pp: int, per_rank: int, num_micro_batches: int) -> float:
    """Share of a step in which a rank waits while a pipeline fills and drains, all stages taking the same time.

    >>> bubble_share(4, 1, 9)
    0.25
    """
    return (pp - 1) / (num_micro_batches * per_rank + pp - 1)


def most_in_flight(pp: int, per_rank: int, num_micro_batches: int, rank: int = 0) -> int:
    """How many forwards of its stages a rank holds the activations of, at most; rank 0 holds most."""
    held = 2 * (pp - rank - 1) + (per_rank - 1) * len(_rounds(pp, num_micro_batches)[0]) + 1
    return min(num_micro_batches * per_rank, held if per_rank > 1 else pp - rank)


def _rounds(pp: int, num_micro_batches: int) -> list[range]:
    """Micro-batches that go through a rank's stages one stage after another, larger rounds first: no fewer in each
    than there are ranks, where there are so many, for nothing has to wait then."""
    count = max(1, num_micro_batches // pp)
    sizes = [len(range(index, num_micro_batches, count)) for index in range(count)]
    return [range(a, b) for a, b in pairwise(accumulate([0, *sizes]))]

"""Promise: whatever the world size is, was or becomes, every step gets exactly its rows. Here on the plan alone."""

import functools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.data.read.batch import BatchLayout, RankBatch
from regrow.plan.batch import plan_batch
from regrow.plan.order import Order

LAYOUT = BatchLayout(global_batch_seqs=24, num_slices=12, window_steps=4)
ORDER = Order.of_one(
    num_rows=301, rows_per_group=8, window_rows=LAYOUT.window_rows, seed=3
)  # epochs end inside windows

# a group of so many ranks trains so many steps, then the next one begins so many steps before where it stood
Phase = tuple[int, int, int]
PHASES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=6)


@functools.cache
def digests(world_size: int, step: int) -> tuple[list[int], int]:
    """Positions of a step in the order of ranks, and the sum of the ranks' digests; rows are made of their numbers."""
    plan, total, positions = plan_batch(num_slices=LAYOUT.num_slices, world_size=world_size), 0, []
    for slices in plan.ranges:
        mine = LAYOUT.positions(step, slices)
        rows = (ORDER.locate(mine)[:, None] * 1000 + np.arange(5)).astype(np.uint32)
        total += RankBatch(step, mine, rows).digest()
        positions += mine.tolist()
    return positions, total % 2**64


@settings(max_examples=1000)
@given(PHASES)
def test_no_position_is_lost_or_repeated_under_any_schedule_of_sizes_and_rollbacks(phases: list[Phase]) -> None:
    counted: dict[int, tuple[list[int], int]] = {}  # what each step trained on, the last time it ran
    step = 0
    for world_size, num_steps, back in phases:
        for _ in range(num_steps):
            again = digests(world_size, step)
            assert counted.get(step, again) == again  # a step that is run again is the same step
            counted[step] = again
            step += 1
        step = max(0, step - back)
    last = max(counted)
    assert sorted(counted) == list(range(last + 1))
    trained = [position for s in range(last + 1) for position in counted[s][0]]
    assert trained == list(range((last + 1) * LAYOUT.global_batch_seqs))
    assert [counted[s][1] for s in range(last + 1)] == [digests(1, s)[1] for s in range(last + 1)]

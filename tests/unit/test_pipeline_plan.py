"""Stages and schedules of a pipeline: every micro-batch through every stage once, no ring, the bubble that is known."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.pipeline import (
    Action,
    Orders,
    bubble_share,
    cut_blocks,
    forwards_of,
    most_in_flight,
    orders_of,
    received_by,
)

SHAPES = [*product(range(1, 9), range(1, 4), range(1, 30))]  # ranks, stages of each, micro-batches
FORWARD, BACKWARD = 1.0, 2.0  # time of a micro-batch in all stages of a rank


def play(orders: Orders, per_rank: int) -> float | None:
    """When the last rank is done, messages taking no time and senders never waiting; None where ranks wait in a ring.

    A rank takes its next receive only after the one before it, as the engine does.
    """
    last = len(orders) * per_rank - 1
    done: dict[Action, float] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                needed = _before(action, last)
                if needed is not None and needed not in done:
                    break
                took = (FORWARD if action.is_forward else BACKWARD) / per_rank
                free[rank] = max(free[rank], done[needed] if needed else 0.0) + took
                done[action], at[rank], moved = free[rank], at[rank] + 1, True
    return max(free) if at == [len(order) for order in orders] else None


def _before(action: Action, last: int) -> Action | None:
    if action.is_forward:
        return action._replace(stage=action.stage - 1) if action.stage else None
    return action._replace(stage=action.stage + 1) if action.stage < last else action._replace(is_forward=True)


@pytest.mark.parametrize("make", [orders_of, forwards_of])
def test_every_micro_batch_goes_through_every_stage_once_on_the_rank_that_has_it(make) -> None:
    kinds = (True, False) if make is orders_of else (True,)
    for pp, per_rank, num in SHAPES:
        orders = make(pp, per_rank, num)
        every = {Action(*each) for each in product(kinds, range(pp * per_rank), range(num))}
        assert sorted(action for order in orders for action in order) == sorted(every)
        assert all(action.stage % pp == rank for rank, order in enumerate(orders) for action in order)


def test_no_ranks_wait_for_each_other_in_a_ring_and_the_bubble_is_the_known_one() -> None:
    for pp, per_rank, num in SHAPES:
        took, busy = play(orders_of(pp, per_rank, num), per_rank), num * (FORWARD + BACKWARD)
        assert took is not None, (pp, per_rank, num)
        if num >= pp:
            assert 1 - busy / took == pytest.approx(bubble_share(pp, per_rank, num)), (pp, per_rank, num)
        assert play(forwards_of(pp, per_rank, num), per_rank) is not None


def test_what_a_rank_takes_comes_in_the_order_in_which_it_is_sent() -> None:
    for (pp, per_rank, num), make in product(SHAPES, (orders_of, forwards_of)):
        orders = make(pp, per_rank, num)
        last = pp * per_rank - 1
        for rank, order in enumerate(orders):
            for forward, end in ((True, 0), (False, last)):
                taken = [each for each in order if each.is_forward is forward and each.stage != end]
                assert received_by(rank, orders, forward=forward) == taken


def test_activations_in_flight_are_bounded_whatever_the_number_of_micro_batches() -> None:
    for pp, per_rank, num in SHAPES:
        most = []
        for order in orders_of(pp, per_rank, num):
            held = peak = 0
            for action in order:
                held += 1 if action.is_forward else -1
                peak = max(peak, held)
            most.append(peak)
        assert most == [most_in_flight(pp, per_rank, num, rank) for rank in range(pp)]
        assert most[0] == max(most)
        if per_rank == 1:
            assert most[0] <= pp


SHAPES_OF_STAGES = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])


@given(SHAPES_OF_STAGES, st.integers(0, 6), st.floats(0, 4), st.floats(0, 6))
def test_stages_are_all_blocks_in_order_and_no_cut_has_a_faster_slowest_rank(
    shape: tuple[int, int], more: int, before: float, behind: float
) -> None:
    pp, per_rank = shape
    num_stages = pp * per_rank
    num_blocks = num_stages + more
    stages = cut_blocks(num_blocks, pp, per_rank, before=before, behind=behind)
    assert [block for each in stages.blocks for block in each] == list(range(num_blocks))
    assert (len(stages.blocks), stages.per_rank, stages.last) == (num_stages, per_rank, num_stages - 1)

    def slowest(counts: Sequence[int]) -> float:
        costs = [before, *[0.0] * (num_stages - 1)]
        costs[-1] += behind
        return max(sum(counts[s] + costs[s] for s in stages.of_rank(rank)) for rank in range(pp))

    every = (counts for counts in product(range(1, more + 2), repeat=num_stages) if sum(counts) == num_blocks)
    mine = [len(each) for each in stages.blocks]
    assert all(mine)
    assert slowest(mine) == pytest.approx(min(map(slowest, every)))


def test_the_output_takes_the_place_of_the_blocks_that_it_costs() -> None:
    assert [len(each) for each in cut_blocks(32, 4, 1, before=0.0, behind=2.0).blocks] == [8, 8, 9, 7]
    assert [len(each) for each in cut_blocks(16, 2, 2, before=0.0, behind=2.0).blocks] == [4, 4, 5, 3]

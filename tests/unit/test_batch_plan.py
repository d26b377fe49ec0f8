import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import BatchError
from regrow.plan.batch import MIN_BUSY_SHARE, check_world_sizes, plan_batch

SLICES = st.integers(1, 4096)


@given(SLICES, st.integers(1, 512))
def test_every_slice_belongs_to_exactly_one_rank_and_passes_suffice(num_slices: int, world_size: int) -> None:
    if num_slices < world_size:
        with pytest.raises(BatchError, match=f"set optim.num_slices >= {world_size}"):
            plan_batch(num_slices=num_slices, world_size=world_size)
        return
    plan = plan_batch(num_slices=num_slices, world_size=world_size)
    assert [s for slices in plan.ranges for s in slices] == list(range(num_slices))
    sizes = [len(slices) for slices in plan.ranges]
    assert max(sizes) == plan.most_slices == plan.num_micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert plan.busy_share == pytest.approx(num_slices / sum([max(sizes)] * world_size))


@given(st.integers(1, 4096), st.integers(1, 512))
def test_passes_are_as_few_as_the_slices_of_one_pass_allow(most: int, slices_per_pass: int) -> None:
    plan = plan_batch(num_slices=most, world_size=1, slices_per_pass=slices_per_pass)
    assert plan.num_micro_batches * slices_per_pass >= most > (plan.num_micro_batches - 1) * slices_per_pass
    passes = np.array_split(np.arange(most), plan.num_micro_batches)  # as the loop shares them out
    assert max(map(len, passes)) == plan.most_slices_of_a_pass
    assert plan.idle_share == 0


@given(SLICES, st.integers(1, 64), st.integers(1, 8))
def test_what_a_rank_computes_is_what_its_passes_hold(num_slices: int, world_size: int, slices_per_pass: int) -> None:
    plan = plan_batch(num_slices=max(num_slices, world_size), world_size=world_size, slices_per_pass=slices_per_pass)
    for rank, slices in enumerate(plan.ranges):
        passes = [len(each) for each in np.array_split(slices, min(len(slices), plan.num_micro_batches))]
        passes += [passes[-1]] * (plan.num_micro_batches - len(passes))  # as a step adds zero-weight ones
        assert plan.num_computed(rank) == sum(passes)
        assert plan.passes_of(rank) == {*passes}


def test_448_slices_fit_every_world_size_that_h100x64_allows() -> None:
    plans = check_world_sizes(num_slices=448, global_batch_seqs=448, min_workers=32, max_workers=64)
    assert [plan.world_size for plan in plans] == list(range(32, 65))
    assert all(plan.idle_share == 0 for plan in plans if plan.world_size in (56, 64))


def test_a_world_size_that_idles_too_much_is_refused_with_a_setting_that_works() -> None:
    with pytest.raises(BatchError, match=r"idle 20% of the passes at 5 workers .*; set optim.num_slices=24$"):
        check_world_sizes(num_slices=12, global_batch_seqs=24, min_workers=1, max_workers=5)


def test_fewer_slices_than_workers_is_refused_with_a_setting_that_works() -> None:
    with pytest.raises(BatchError, match=r"gives 0 slices to 4 of 16 ranks; set optim.num_slices="):
        check_world_sizes(num_slices=12, global_batch_seqs=12, min_workers=1, max_workers=16)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 12), st.integers(0, 20))
def test_the_suggested_setting_is_accepted(num_slices: int, seqs: int, min_workers: int, more: int) -> None:
    arguments = {"min_workers": min_workers, "max_workers": min_workers + more}
    batch = num_slices * seqs
    try:
        plans = check_world_sizes(num_slices=num_slices, global_batch_seqs=batch, **arguments)
        assert all(plan.busy_share >= MIN_BUSY_SHARE for plan in plans)
    except BatchError as error:
        fix = str(error).partition("; set ")[2].split()
        values = dict(item.removeprefix("optim.").split("=") for item in fix)
        check_world_sizes(
            num_slices=int(values["num_slices"]),
            global_batch_seqs=int(values.get("global_batch_seqs", batch)),
            **arguments,
        )


def test_a_batch_that_slices_do_not_divide_is_refused_with_the_next_that_they_do() -> None:
    with pytest.raises(BatchError, match=r"set optim\.global_batch_seqs=36"):
        check_world_sizes(num_slices=12, global_batch_seqs=25, min_workers=1, max_workers=2)


def test_min_above_max_is_refused() -> None:
    with pytest.raises(BatchError, match="need 1 <= min_workers <= max_workers"):
        check_world_sizes(num_slices=12, global_batch_seqs=12, min_workers=3, max_workers=2)

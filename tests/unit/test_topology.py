"""The topology table: for every world size who computes what, decided once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import BatchError
from regrow.plan.batch import plan_batch
from regrow.plan.mesh import Coordinates, plan_mesh
from regrow.plan.pipeline import cut_blocks
from regrow.plan.topology import fewest_ranks, largest, least_shards, plan_topology, topology_table


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_the_table_has_every_world_size_of_whole_units(least: int, more: int, replicas: int, tp: int) -> None:
    table = topology_table(
        min_workers=least * tp, max_workers=(least + more) * tp, num_slices=40, dp_replicate=replicas, tp=tp
    )
    assert list(table) == [units * tp for units in range(least, least + more + 1)]
    for world_size, each in table.items():
        assert each.mesh == plan_mesh(world_size, replicas, tp)
        assert each.batch == plan_batch(num_slices=40, world_size=each.mesh.num_units)
        slices = [each.slices_of(rank) for rank in range(world_size)]
        assert all(slices[rank] == slices[rank // tp * tp] for rank in range(world_size))
        assert [number for mine in slices[::tp] for number in mine] == list(range(40))
    assert least_shards(table) == min(each.mesh.dp_shard for each in table.values())


@given(st.integers(1, 5), st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
def test_all_stages_of_a_unit_have_its_slices_and_ranks_of_a_stage_stand_together(
    units: int, replicas: int, pp: int, tp: int, per_rank: int
) -> None:
    stages = cut_blocks(12, pp, per_rank, before=0.0, behind=1.0)
    world_size = units * pp * tp
    made = plan_topology(world_size, num_slices=20, dp_replicate=replicas, tp=tp, stages=stages)
    assert (made.mesh.world_size, made.mesh.num_units, made.mesh.pp) == (world_size, units, pp)
    assert next(iter(made.mesh.axes)) == "pp"
    of_unit: dict[int, list[tuple[int, int]]] = {}
    for rank in range(world_size):
        at = Coordinates(made.mesh, rank)
        stage = at.along("pp")[0]
        assert stage == rank // (units * tp)
        of_unit.setdefault(made.unit_of(rank), []).append((stage, at.along("tp")[0]))
        assert made.slices_of(rank) == made.batch.range_of(made.unit_of(rank))
    every = [(stage, part) for stage in range(pp) for part in range(tp)]
    assert of_unit == dict.fromkeys(range(units), every)
    assert made.bubble_share == pytest.approx((pp - 1) / (made.batch.num_micro_batches * per_rank + pp - 1))


def test_the_nearest_size_below_is_looked_up_and_the_smallest_where_there_is_none() -> None:
    table = topology_table(min_workers=4, max_workers=8, num_slices=12, tp=2)
    assert [largest(table, at_most).mesh.world_size for at_most in (1, 4, 7, 99)] == [4, 4, 6, 8]


def test_workers_that_are_no_whole_units_have_no_topology() -> None:
    with pytest.raises(BatchError, match=r"7 workers are not whole units of parallel\.tp=2"):
        plan_topology(7, num_slices=12, tp=2)
    stages = cut_blocks(4, 4, 1, before=0.0, behind=0.0)
    with pytest.raises(BatchError, match=r"12 workers are not whole units of parallel\.pp=4 x parallel\.tp=2"):
        plan_topology(12, num_slices=12, tp=2, stages=stages)


@given(
    st.integers(1, 6), st.integers(0, 60), st.integers(1, 200), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2])
)
def test_the_fewest_ranks_take_as_many_passes_as_all_and_one_unit_fewer_takes_more(
    least: int, more: int, num_slices: int, slices_per_pass: int, tp: int
) -> None:
    units = range(least, min(least + more, max(least, num_slices)) + 1)
    if num_slices < units[0]:
        return
    table = topology_table(
        min_workers=units[0] * tp,
        max_workers=units[-1] * tp,
        num_slices=num_slices,
        tp=tp,
        slices_per_pass=slices_per_pass,
    )
    fewest = fewest_ranks(table)
    assert list(fewest) == list(table)
    for present, size in fewest.items():
        assert size <= present
        assert table[size].batch.most_slices == table[present].batch.most_slices
        assert table[size].batch.num_micro_batches == table[present].batch.num_micro_batches
        assert fewest[size] == size
        assert size - tp not in table or table[size - tp].batch.most_slices > table[size].batch.most_slices
        closed = max(units[0], -(-num_slices // table[present].batch.most_slices))
        assert size == closed * tp, "the fewest whose shares are no larger"


def test_the_fewest_ranks_of_large_clusters() -> None:
    """S=6144 of 768 units: all of 683 to 767 take nine passes."""
    fewest = fewest_ranks(topology_table(min_workers=512, max_workers=768, num_slices=6144))
    assert {fewest[size] for size in range(683, 768)} == {683}
    assert fewest[768] == 768
    fewest = fewest_ranks(topology_table(min_workers=64, max_workers=129, num_slices=2048))
    assert (fewest[127], fewest[128], fewest[129]) == (121, 128, 128)


def test_a_group_does_not_give_up_replicas_to_be_smaller() -> None:
    """Seven ranks of eight do as well for the slices, and would be one replica of seven shards."""
    table = topology_table(min_workers=6, max_workers=9, num_slices=21, dp_replicate=2)
    assert [table[size].batch.most_slices for size in (7, 8, 9)] == [3, 3, 3]
    assert fewest_ranks(table) == {6: 6, 7: 7, 8: 8, 9: 7}

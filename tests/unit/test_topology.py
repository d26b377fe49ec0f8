"""The topology table: for every world size who computes what, decided once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import BatchError
from regrow.plan.batch import plan_batch
from regrow.plan.mesh import plan_mesh
from regrow.plan.topology import largest, least_shards, plan_topology, topology_table


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


def test_the_nearest_size_below_is_looked_up_and_the_smallest_where_there_is_none() -> None:
    table = topology_table(min_workers=4, max_workers=8, num_slices=12, tp=2)
    assert [largest(table, at_most).mesh.world_size for at_most in (1, 4, 7, 99)] == [4, 4, 6, 8]


def test_workers_that_are_no_whole_units_have_no_topology() -> None:
    with pytest.raises(BatchError, match=r"7 workers are not whole units of parallel\.tp=2"):
        plan_topology(7, num_slices=12, tp=2)

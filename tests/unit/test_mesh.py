from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.mesh import MeshShape, plan_mesh


@given(num_units=st.integers(1, 16384), dp_replicate=st.integers(1, 64), tp=st.integers(1, 8))
def test_the_mesh_has_every_rank_once_at_any_world_size(num_units, dp_replicate, tp):
    shape = plan_mesh(num_units * tp, dp_replicate, tp)
    assert (shape.world_size, shape.num_units, shape.tp) == (num_units * tp, num_units, tp)
    assert shape.dp_replicate == (dp_replicate if num_units % dp_replicate == 0 else 1)


def test_replicas_that_do_not_divide_the_world_size_fall_back_to_plain_fsdp():
    assert plan_mesh(7, 2) == MeshShape(dp_replicate=1, dp_shard=7)
    assert plan_mesh(7, 2).axes == {"dp_shard": 7}


def test_hsdp_puts_neighbouring_ranks_into_one_replica():
    assert list(plan_mesh(8, 2).axes.items()) == [("dp_replicate", 2), ("dp_shard", 4)]


def test_the_ranks_of_a_unit_are_neighbours():
    assert list(plan_mesh(8, 2, 2).axes.items()) == [("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)]
    assert list(plan_mesh(6, 2, 2).axes.items()) == [("dp_shard", 3), ("tp", 2)]

from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.mesh import Coordinates, MeshShape, plan_mesh


@given(num_units=st.integers(1, 16384), dp_replicate=st.integers(1, 64), tp=st.integers(1, 8), cp=st.integers(1, 16))
def test_the_mesh_has_every_rank_once_at_any_world_size(num_units, dp_replicate, tp, cp):
    shape = plan_mesh(num_units * tp * cp, dp_replicate, tp, cp=cp)
    assert (shape.world_size, shape.num_units, shape.tp, shape.cp) == (num_units * tp * cp, num_units, tp, cp)
    assert shape.dp_replicate == (dp_replicate if num_units % dp_replicate == 0 else 1)


def test_replicas_that_do_not_divide_the_world_size_fall_back_to_plain_fsdp():
    assert plan_mesh(7, 2) == MeshShape(dp_replicate=1, dp_shard=7)
    assert plan_mesh(7, 2).axes == {"dp_shard": 7}


def test_hsdp_puts_neighbouring_ranks_into_one_replica():
    assert list(plan_mesh(8, 2).axes.items()) == [("dp_replicate", 2), ("dp_shard", 4)]


def test_the_ranks_of_a_unit_are_neighbours():
    assert list(plan_mesh(8, 2, 2).axes.items()) == [("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)]
    assert list(plan_mesh(6, 2, 2).axes.items()) == [("dp_shard", 3), ("tp", 2)]


def test_ranks_that_share_rows_are_neighbours_along_the_sharding_axis():
    assert list(plan_mesh(16, 2, 2, cp=2).axes.items()) == [("dp_replicate", 2), ("dp_shard", 4), ("tp", 2)]
    assert plan_mesh(12, 2, 2, cp=2) == MeshShape(dp_replicate=1, dp_shard=6, tp=2, cp=2)


def test_a_place_is_what_it_was_after_it_has_been_json_also_that_of_an_earlier_version():
    at = Coordinates(plan_mesh(16, 2, 2, 2, (3, 2), 2), 5)
    plain = at.to_plain()
    assert Coordinates.of_plain([list(each) if isinstance(each, tuple) else each for each in plain]) == at
    assert Coordinates.of_plain([1, 4, 2, 2, [3, 2], 5]) == Coordinates(MeshShape(1, 4, 2, 2, (3, 2)), 5)
    assert Coordinates.of_plain([1, 4, 2, 5]) == Coordinates(MeshShape(1, 4, 2), 5)

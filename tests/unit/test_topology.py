"""The topology table: for every world size who computes what, decided once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.config.schema import ModelConfig
from regrow.errors import BatchError
from regrow.model.size import parameter_shapes
from regrow.plan.batch import plan_batch
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, plan_mesh
from regrow.plan.pipeline import Stages, cut_blocks
from regrow.plan.placement import num_copies, placed, stage_of, that_hold
from regrow.plan.topology import (
    KEEP_PP,
    Pipelines,
    Topology,
    fewest_ranks,
    largest,
    plan_topology,
    taken_sizes,
    topology_table,
)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_the_table_has_every_world_size_of_whole_units(least: int, more: int, replicas: int, tp: int, cp: int) -> None:
    unit = tp * cp
    table = topology_table(
        min_workers=least * unit, max_workers=(least + more) * unit, num_slices=40, dp_replicate=replicas, tp=tp, cp=cp
    )
    assert list(table) == [units * unit for units in range(least, least + more + 1)]
    for world_size, each in table.items():
        assert each.mesh == plan_mesh(world_size, replicas, tp, cp=cp)
        assert each.batch == plan_batch(num_slices=40, world_size=each.mesh.num_units)
        slices = [each.slices_of(rank) for rank in range(world_size)]
        assert all(slices[rank] == slices[rank // unit * unit] for rank in range(world_size))
        assert [number for mine in slices[::unit] for number in mine] == list(range(40))
    assert taken_sizes(table, table, pp=1) == {size: size for size in table}


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
    with pytest.raises(BatchError, match=r"6 workers are not whole units of parallel\.cp=2 x parallel\.tp=2"):
        plan_topology(6, num_slices=12, tp=2, cp=2)
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


def pipelines(pp: int, least: int = 1, num_blocks: int = 12, per_rank: int = 1, behind: float = 0.7) -> Pipelines:
    def cut(ranks: int) -> Stages:
        return cut_blocks(num_blocks, ranks, per_rank, before=0.05, behind=behind)

    return Pipelines(pp, least, num_blocks // per_rank, cut)


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 8), st.integers(1, 3), st.sampled_from([1, 2]), st.data())
def test_no_layout_that_could_be_taken_makes_a_shorter_step_but_where_the_pipeline_asked_for_is_kept(
    pp: int, tp: int, more: int, per_rank: int, replicas: int, data: st.DataObject
) -> None:
    least = data.draw(st.integers(1, pp))
    num_slices, most = data.draw(st.integers(1, 60)), (pp + more) // pp * pp * tp
    options = pipelines(pp, least, num_blocks=15, per_rank=per_rank)
    if num_slices < most // (pp * tp):
        return
    common = {"num_slices": num_slices, "dp_replicate": replicas, "tp": tp}
    table = topology_table(min_workers=least * tp, max_workers=most, pipelines=options, **common)
    taken = taken_sizes(table, range(tp, most + 1, tp), pp=pp)

    def every(units: int) -> list[Topology]:
        """By brute force."""
        return [
            plan_topology(size * ranks * tp, stages=options.cut(ranks) if ranks > 1 else None, **common)
            for ranks in range(least, 15 // per_rank + 1)
            for size in range(1, min(units // ranks, num_slices) + 1)
        ]

    for present in range(tp, most + 1, tp):
        units = present // tp
        if present not in taken:
            assert not every(units)
            continue
        found = table[taken[present]]
        assert found.mesh.world_size == taken[present] <= present
        assert found.mesh.tp == tp
        assert sorted(slice_ for unit in range(found.mesh.num_units) for slice_ in found.batch.range_of(unit)) == list(
            range(num_slices)
        )
        if units % pp == 0:
            assert (found.mesh.pp, found.mesh.world_size) == (pp, present)
            continue
        # sizes that pp divides have no other layout, whichever sizes leave ranks over for them
        free = [each for each in every(units) if each.mesh.pp == pp or each.mesh.world_size // tp % pp]
        best = max(each.busy_share(present) for each in free)
        lost = best - found.busy_share(present)
        assert lost <= (KEEP_PP if found.mesh.pp == pp else 0.0) + 1e-9


def test_a_cluster_that_loses_nodes_one_after_the_other_is_planned_anew() -> None:
    """405B, 126 blocks, on 16 units of a node: a pipeline of 8 that is kept at any price has half of the ranks idle."""
    options = pipelines(8, 4, num_blocks=126)
    table = topology_table(min_workers=9, max_workers=16, num_slices=128, pipelines=options)
    taken = taken_sizes(table, range(9, 17), pp=8)
    found = {present: table[size] for present, size in taken.items()}
    shapes = {present: (each.mesh.pp, each.mesh.num_units) for present, each in found.items()}
    assert shapes == {16: (8, 2), 15: (5, 3), 14: (7, 2), 13: (13, 1), 12: (4, 3), 11: (11, 1), 10: (5, 2), 9: (9, 1)}
    assert all(each.busy_share(present) > 0.85 for present, each in found.items())
    fixed = plan_topology(8, num_slices=128, stages=options.cut(8))
    assert fixed.busy_share(15) < 0.52 < 0.88 < found[15].busy_share(15)


@pytest.mark.parametrize(("num_slices", "taken"), [(64, 8), (96, 9)])
def test_another_number_of_stages_is_worth_three_points_and_no_less(num_slices: int, taken: int) -> None:
    """Of nine ranks, eight have two stages and nine three: 2.8 points apart, then 6.1."""
    table = topology_table(
        min_workers=2, max_workers=10, num_slices=num_slices, pipelines=pipelines(2, 2, num_blocks=24)
    )
    assert (table[8].mesh.pp, table[9].mesh.pp) == (2, 3)
    gained = table[9].busy_share(9) - table[8].busy_share(9)
    assert gained == pytest.approx({64: 0.028, 96: 0.061}[num_slices], abs=1e-3)
    assert taken_sizes(table, [9], pp=2) == {9: taken}


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_boxes_of_all_stages_cover_each_tensor_once_a_replica(
    num_blocks: int, pp: int, shards: int, replicas: int, tp: int, data: st.DataObject
) -> None:
    per_rank = data.draw(st.integers(1, 3))
    if pp * per_rank > num_blocks:
        return
    stages = cut_blocks(num_blocks, pp, per_rank, before=0.05, behind=1.4) if pp > 1 else None
    mesh = plan_topology(
        pp * shards * replicas * tp, num_slices=shards * replicas, dp_replicate=replicas, tp=tp, stages=stages
    ).mesh
    config = ModelConfig(num_layers=num_blocks, dim=8, num_heads=4, num_kv_heads=2, ffn_dim=12, vocab_size=10)
    ranks = [Coordinates(mesh, rank) for rank in range(mesh.world_size)]
    held: dict[int, set[str]] = {rank: set() for rank in range(mesh.world_size)}
    for name, shape in parameter_shapes(config).items():
        whole, counts = Box.whole(f"optim/exp_avg/{name}", shape), np.zeros(shape, int)
        there = [at for at in ranks if stage_of(name, mesh) == at.along("pp")[0]]
        for at in there:
            counts[placed(whole, at).slices] += 1
            held[at.rank].add(name)
        copies = num_copies(name, there[0])[1]
        assert (counts == copies).all(), "each replica has all of it, and no other stage any"
        for place in that_hold(whole, mesh):
            assert place.get("pp", 0) == there[0].along("pp")[0]
    blocks = {
        rank: {int(name.split(".")[1]) for name in names if name.startswith("layers")} for rank, names in held.items()
    }
    for at in ranks:
        mine = stages.of_rank(at.along("pp")[0]) if stages else []
        assert blocks[at.rank] == (
            {b for stage in mine for b in stages.blocks[stage]} if stages else set(range(num_blocks))
        )

"""Gradients reduced by a communicator of their own: the same steps, and a group that is watched like the others."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.accept.tiny import count_up_rows
from regrow.config.schema import Dtype, Float8, OptimConfig, ParallelConfig
from regrow.parallel.fsdp import build_mesh, let_go_of_meshes, reduce_groups, shard_group
from regrow.plan.mesh import plan_mesh
from regrow.train.build import build_step
from support.gloo import run_ranks
from support.ragged import ragged_model

TIMEOUT_S = 77.0


def trained(parallel: ParallelConfig) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps of two passes, and what the gradients go through."""
    cpu, model, world_size = torch.device("cpu"), ragged_model(), dist.get_world_size()
    mesh = build_mesh(plan_mesh(world_size, parallel.dp_replicate), "cpu", timeout_s=TIMEOUT_S)
    step = build_step(model, parallel, OptimConfig(), mesh=mesh, device=cpu, seed=0)
    rows = count_up_rows(dist.get_rank(), num_rows=4, seq_len=12, vocab_size=model.vocab_size)
    reducing: set[dist.ProcessGroup] = set()
    reduce_scatter = dist.reduce_scatter_single

    def noted(*arguments: Any, group: dist.ProcessGroup, **more: Any) -> Any:
        reducing.add(group)
        return reduce_scatter(*arguments, group=group, **more)

    dist.reduce_scatter_single = noted
    try:
        losses = [step.run(list(rows.split(2)), num_micro_batches=2, lr=1e-3).resolve().loss for _ in range(3)]
    finally:
        dist.reduce_scatter_single = reduce_scatter
    (group,) = reduce_groups(step.model)
    about = {
        "own": group is not shard_group(mesh),
        "ranks": dist.get_process_group_ranks(group),
        "used": reducing == {group},
        "timeout": group._get_backend(cpu).options._timeout,
        "known": group in distributed_c10d._world.pg_map,
    }
    return losses, about


def both(parallel: ParallelConfig) -> list[tuple[list[float], dict[str, Any]]]:
    return [trained(parallel), trained(ParallelConfig(**{**parallel.__dict__, "separate_reduce": True}))]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, ParallelConfig()),
        (4, ParallelConfig(dp_replicate=2)),
        (3, ParallelConfig(dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather, prefetch_blocks=2)),
    ],
    ids=["fsdp", "hsdp", "float8-prefetch"],
)
def test_a_separate_group_reduces_the_same_and_is_found_by_whoever_breaks_off(world_size, parallel):
    for rank, ((shared_losses, shared), (losses, own)) in enumerate(run_ranks(both, world_size, parallel)):
        assert losses == shared_losses
        assert not shared["own"]
        ranks = [rank - rank % 2, rank - rank % 2 + 1] if parallel.dp_replicate == 2 else list(range(world_size))
        timeout = timedelta(seconds=TIMEOUT_S)
        assert own == {"own": True, "ranks": ranks, "used": True, "timeout": timeout, "known": True}


def again_and_again() -> list[int]:
    """Groups that torch knows after each of three generations of one process."""
    known = []
    address = dist.distributed_c10d._get_default_store()
    for generation in range(3):
        trained(ParallelConfig(separate_reduce=True))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        let_go_of_meshes()
        known.append(len(distributed_c10d._world.pg_map))
        store = dist.PrefixStore(f"generation-{generation}", address)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a rank that ends before its peer is connected leaves it without a group
    return known


def test_a_group_that_is_given_up_takes_it_along():
    assert run_ranks(again_and_again, 2) == [[0, 0, 0]] * 2


def alone() -> bool:
    return trained(ParallelConfig(separate_reduce=True))[1]["own"]


def test_one_rank_needs_none():
    assert run_ranks(alone, 1) == [False]

"""Real training state on the ranks of `run_ranks`, to be saved, moved and compared."""

import torch
import torch.distributed as dist

from regrow.accept.tiny import count_up_rows, tiny_model
from regrow.config.schema import Dtype, Float8, OptimConfig, ParallelConfig
from regrow.parallel.float8 import inner_tensor
from regrow.parallel.fsdp import build_mesh, coordinates_of, replica_group
from regrow.plan.mesh import Coordinates, plan_mesh
from regrow.state.entries import Entry, training_entries
from regrow.train.build import build_step
from support.ragged import ragged_model


def entries_after(
    steps: int,
    *,
    seed: int,
    replicas: int = 1,
    tp: int = 1,
    tied: bool = False,
    float8: bool = False,
    moments: Dtype = Dtype.float32,
    even: bool = False,
) -> tuple[list[Entry], Coordinates, dist.ProcessGroup | None]:
    """This rank's state after some real steps (moments and all), its place on the mesh, and who else holds it.

    `even`: of the model whose widths tensor parallelism can cut, as those of `tp` above 1 and of float8 are.
    """
    mesh = build_mesh(plan_mesh(world_size=dist.get_world_size(), dp_replicate=replicas, tp=tp), "cpu")
    parallel = ParallelConfig(tp=tp)
    if float8:
        parallel = ParallelConfig(tp=tp, dtype=Dtype.bfloat16, float8=Float8.tensorwise_all_gather)
    config = tiny_model(tied=tied, dim=64) if float8 or even or tp > 1 else ragged_model(tied=tied)
    optim = OptimConfig(moments=moments)
    step = build_step(config, parallel, optim, mesh=mesh, device=torch.device("cpu"), seed=seed)
    for index in range(steps):
        rows = count_up_rows(index, num_rows=2, seq_len=8)
        step.run([rows], num_micro_batches=1, lr=1e-3)
    entries = training_entries(step.model, step.optimizer, inner_tensor=inner_tensor)
    return entries, coordinates_of(mesh), replica_group(mesh)


def whole(entries: list[Entry]) -> dict[str, torch.Tensor]:
    """The full tensors, on every rank, from all ranks' entries."""
    gathered: list[list[Entry]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, entries)
    full = {e.box.name: torch.full(e.box.shape, torch.nan, dtype=e.memory.dtype) for e in entries}
    for part in gathered:
        for entry in part:
            full[entry.box.name][entry.box.slices] = entry.memory.view(entry.box.sizes)
    return full

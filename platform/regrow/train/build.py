"""A training step from its configuration: model, optimizer and loss on this rank of a mesh."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.fsdp import everyone, shard_group, tensor_group
from regrow.train.step import TrainStep, build_loss


def build_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int | None,
    eot_id: int | None = None,
) -> TrainStep:
    """Collective over the mesh. `seed` and `eot_id` are as for `build_model`."""
    built = build_model(model, parallel, mesh=mesh, device=device, seed=seed, eot_id=eot_id)
    return TrainStep(
        built,
        build_optimizer(built, optim),
        max_grad_norm=optim.max_grad_norm,
        group=everyone(mesh),
        shard_group=shard_group(mesh),
        tensor_group=tensor_group(mesh),
        sync_every_micro_batch=bool(parallel.sync_every_micro_batch),
        keep_gathered=not parallel.reshard_after_forward,
        loss_function=build_loss(parallel, device, tensor_group(mesh)),
    )

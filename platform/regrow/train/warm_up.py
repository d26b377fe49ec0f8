"""What a process' first step takes long for, once and before anyone waits for it: imports, caches, first calls."""

import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.optim.adamw import build_optimizer
from regrow.parallel.apply import build_model
from regrow.parallel.fsdp import BACKENDS, build_mesh, data_parallel_group, let_go_of_meshes, shard_group
from regrow.plan.mesh import plan_mesh
from regrow.train.step import TrainStep

MODEL = ModelConfig(vocab_size=512, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64)


def warm_up(device: torch.device) -> None:
    """Train a very small model for a step, in a group of this process alone, which is given up again.

    A group that takes in a newcomer stands still until it has built its model; the first one takes a second more.
    """
    dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(plan_mesh(1, 1), device.type)
        model = build_model(MODEL, ParallelConfig(), mesh=mesh, device=device, seed=0)
        step = TrainStep(
            model,
            build_optimizer(model, OptimConfig()),
            max_grad_norm=1.0,
            group=data_parallel_group(mesh),
            shard_group=shard_group(mesh),
        )
        rows = torch.zeros(1, 9, dtype=torch.int64, device=device)
        step.run([rows], num_micro_batches=1, lr=0.0).resolve()
    finally:
        dist.destroy_process_group()
        let_go_of_meshes()

"""What a process' first step takes long for, once and before anyone waits for it: imports, caches, first calls."""

import torch
import torch.distributed as dist

from regrow.config.schema import ModelConfig, OptimConfig, ParallelConfig
from regrow.parallel.fsdp import BACKENDS, build_mesh, let_go_of_meshes
from regrow.plan.mesh import plan_mesh
from regrow.train.build import build_step

MODEL = ModelConfig(vocab_size=512, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64)


def warm_up(device: torch.device) -> None:
    """Train a very small model for a step, in a group of this process alone, which is given up again.

    A group that takes in a newcomer stands still until it has built its model; the first one takes a second more.
    """
    dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(plan_mesh(1, 1), device.type)
        step = build_step(MODEL, ParallelConfig(), OptimConfig(), mesh=mesh, device=device, seed=0)
        rows = torch.zeros(1, 9, dtype=torch.int64, device=device)
        step.run([rows], num_micro_batches=1, lr=0.0).resolve()
    finally:
        dist.destroy_process_group()
        let_go_of_meshes()

"""What a process' first step takes long for, once and before a group waits for it: imports, compiling, first calls."""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from regrow.config.schema import Dtype, ModelConfig, OptimConfig, ParallelConfig
from regrow.model.llama import Head
from regrow.parallel.fsdp import BACKENDS, build_mesh, let_go_of_meshes
from regrow.plan.mesh import plan_mesh
from regrow.train.build import build_step
from regrow.train.step import build_loss, compiles_loss

MODEL = ModelConfig(vocab_size=512, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64)


def warm_up(
    device: torch.device,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    pass_seqs: int,
    seq_len: int,
    backend: str | None = None,
) -> None:
    """Train for a step in a group of this process alone, which is given up again.

    A group that takes in a newcomer stands still until it has built its model and come through its first step: the
    first model of a process takes a second more, and compiling a block half a minute. So where blocks are compiled, one
    block of `model` is, for a pass of `pass_seqs` rows; otherwise, and where several ranks compute a block together, a
    very small model does.
    """
    if parallel.compile and parallel.tp == parallel.cp == 1:
        if compiles_loss(parallel, device):
            with contextlib.suppress(torch.OutOfMemoryError):
                warm_up_loss(device, model.vocab_size, parallel, pass_seqs=pass_seqs, seq_len=seq_len)
        model = replace(model, num_layers=1, vocab_size=MODEL.vocab_size)
    else:
        model, parallel, pass_seqs, seq_len = MODEL, ParallelConfig(), 1, 8
    dist.init_process_group(backend or BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = build_mesh(plan_mesh(1, 1), device.type)
        eot_id = 0 if model.document_attention else None
        step = build_step(model, parallel, OptimConfig(), mesh=mesh, device=device, seed=0, eot_id=eot_id)
        # for this vocabulary it would be compiled as well, and for the real one then for sizes in general: slower code
        step.loss_function = build_loss(replace(parallel, compile=False), device)
        rows = torch.zeros(pass_seqs, seq_len + 1, dtype=torch.int64, device=device)
        step.run([rows], num_micro_batches=1, lr=0.0).resolve()
    except torch.OutOfMemoryError:
        pass  # a block whole, with its moments, where the group holds shards: it compiles in the group's first step
    finally:
        dist.destroy_process_group()
        let_go_of_meshes()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def warm_up_loss(
    device: torch.device, vocab_size: int, parallel: ParallelConfig, *, pass_seqs: int, seq_len: int
) -> None:
    """The loss of a pass and its gradient, in its logits' shapes and dtype, by a model of hardly any width."""
    dtype = torch.bfloat16 if parallel.dtype is Dtype.bfloat16 else torch.float32
    head = _Head(torch.zeros(pass_seqs, seq_len, 16, device=device, dtype=dtype), vocab_size)
    targets = torch.zeros(pass_seqs, seq_len, dtype=torch.int64, device=device)
    build_loss(parallel, device)(head, targets, targets).backward()


class _Head(nn.Module):
    """A model of which there is nothing but the output weights."""

    def __init__(self, x_BTD: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.x_BTD = x_BTD
        self.weight_VD = nn.Parameter(x_BTD.new_zeros(vocab_size, x_BTD.size(-1)))

    def forward(self, tokens_BT: Tensor, head: Head = F.linear) -> Tensor:
        return head(self.x_BTD, self.weight_VD)

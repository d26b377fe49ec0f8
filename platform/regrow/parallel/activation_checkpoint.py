"""Activation checkpointing: backward recomputes what a block did not keep."""

import types
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers its operators
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from regrow.config.schema import ActivationCheckpoint
from regrow.model.llama import Block, Llama

# what takes longer to recompute than its result is worth in memory
SAVED_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,  # tensor parallelism's sums: all would wait again
        torch.ops.aten.max.default,  # float8's scales: a scalar that costs a pass over the activations
    }
)


def apply_activation_checkpoint(model: Llama, mode: ActivationCheckpoint) -> None:
    """Make each block recompute in backward: all of it (full), or all but SAVED_OPS (selective).

    Replaces the blocks' `forward`, so that parameter names stay, FSDP's hooks run outside, where they gather the
    parameters for recomputing too, and torch.compile finds one function to compile for all blocks.
    """
    if mode is ActivationCheckpoint.none:
        return
    forward = _recompute_all if mode is ActivationCheckpoint.full else _recompute_cheap
    for layer in model.layers:
        layer.forward = types.MethodType(forward, layer)


# nothing in a block draws random numbers, so their state need not be kept


def _recompute_all(block: Block, *inputs: Any) -> Tensor:
    return checkpoint(Block.forward, block, *inputs, use_reentrant=False, preserve_rng_state=False)


def _recompute_cheap(block: Block, *inputs: Any) -> Tensor:
    return checkpoint(
        Block.forward,
        block,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_selective_contexts,
    )


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

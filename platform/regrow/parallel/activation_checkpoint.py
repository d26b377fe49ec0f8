"""Activation checkpointing: backward recomputes what a block did not keep."""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from regrow.config.schema import ActivationCheckpoint
from regrow.model.llama import Llama

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
        torch.ops.aten.max.default,  # float8's scales: a scalar that costs a pass over the activations
    }
)


def apply_activation_checkpoint(model: Llama, mode: ActivationCheckpoint) -> None:
    """Make each block recompute in backward: all of it (full), or all but SAVED_OPS (selective).

    Inside FSDP's hooks, so that recomputing finds the parameters gathered. Nothing in a block draws random numbers.
    """
    if mode is ActivationCheckpoint.none:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode is ActivationCheckpoint.selective:
        options["context_fn"] = _selective_contexts
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _selective_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

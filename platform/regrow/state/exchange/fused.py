"""`wq`, `wk` and `wv` as one matrix, as Megatron-Core and torchtitan train them: after the rows of each group of query
heads come those of their key head and of their value head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regrow.config.schema import ModelConfig

PARTS = ("wq", "wk", "wv")


def fused_rows(model: ModelConfig) -> int:
    """Of the one matrix."""
    return (model.num_heads + 2 * model.num_kv_heads) * (model.dim // model.num_heads)


def part_of(fused: Tensor, part: str, model: ModelConfig) -> Tensor:
    """The rows of one of PARTS in [fused_rows, dim]."""
    head_dim, group = model.dim // model.num_heads, model.num_heads // model.num_kv_heads
    by_head = fused.view(model.num_kv_heads, group + 2, head_dim, -1)
    return by_head.split((group, 1, 1), dim=1)[PARTS.index(part)].flatten(0, 2)


def fuse(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The inverse, of all three."""
    head_dim = model.dim // model.num_heads
    return torch.cat([part.view(model.num_kv_heads, -1, head_dim, model.dim) for part in parts], dim=1).flatten(0, 2)

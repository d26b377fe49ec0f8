"""Causal attention over whole rows, or within the documents that are packed in them.

The end-of-text token stands before, between and after documents. Here it begins the document after it, and belongs to
that one; it stays what the last token of the document before has to predict. A row that was cut from the middle of a
document begins with the rest of it.

Within documents, a GPU runs flex_attention, which skips the blocks of the attention matrix that no document reaches;
other devices are given the whole matrix as a mask.

Shape suffixes as in `llama.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask


def document_starts_BT(tokens_BT: Tensor, eot_id: int) -> Tensor:
    """Where in its row the document of each token begins, int64.

    >>> document_starts_BT(torch.tensor([[5, 6, 0, 7, 8, 0, 0, 9]]), eot_id=0)
    tensor([[0, 0, 2, 2, 2, 5, 6, 6]])
    """
    index_T = torch.arange(tokens_BT.size(1), device=tokens_BT.device)
    return torch.where(tokens_BT == eot_id, index_T, 0).cummax(dim=1).values


def document_mask(starts_BT: Tensor) -> Mask:
    """Each token sees its own document up to itself; in the form that `attend` is fastest with on this device."""
    return block_mask(starts_BT) if starts_BT.is_cuda else mask_B1TT(starts_BT)


def mask_B1TT(starts_BT: Tensor) -> Tensor:
    """True where a token (dim 2) sees another (dim 3)."""
    index_T = torch.arange(starts_BT.size(1), device=starts_BT.device)
    return ((starts_BT[:, :, None] <= index_T) & (index_T <= index_T[:, None]))[:, None]


def block_mask(starts_BT: Tensor) -> BlockMask:
    """The same for flex_attention."""

    def sees(row: Tensor, head: Tensor, token: Tensor, other: Tensor) -> Tensor:
        return (starts_BT[row, token] <= other) & (other <= token)

    create: Callable[..., BlockMask] = create_block_mask
    if starts_BT.is_cuda:  # uncompiled, it would hold the whole mask in memory
        create = _compiled(create)
    B, T = starts_BT.shape
    return create(sees, B, None, T, T, device=starts_BT.device)


def attend(
    q_BHTQ: Tensor, k_BKTQ: Tensor, v_BKTQ: Tensor, mask: Mask | None, kernels: Sequence[SDPBackend] = ()
) -> Tensor:
    """Attention's output [B, H, T, Q]; without a mask each token sees all tokens up to itself.

    By the first of `kernels` that can, if any are given and flex_attention does not compute it. Raises RuntimeError
    if none can.
    """
    if not isinstance(mask, BlockMask):
        with sdpa_kernel(list(kernels), set_priority=len(kernels) > 1) if kernels else nullcontext():
            return F.scaled_dot_product_attention(
                q_BHTQ, k_BKTQ, v_BKTQ, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
    flex: Callable[..., Tensor] = flex_attention
    if q_BHTQ.is_cuda and not torch.compiler.is_compiling():  # uncompiled, it would hold all scores in memory
        flex = _compiled(flex)
    return flex(q_BHTQ, k_BKTQ, v_BKTQ, block_mask=mask, enable_gqa=True)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)

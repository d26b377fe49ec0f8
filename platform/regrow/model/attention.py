"""Causal attention over whole rows, or within the documents that are packed in them.

The end-of-text token stands before, between and after documents. Here it begins the document after it, and belongs to
that one; it stays what the last token of the document before has to predict. A row that was cut from the middle of a
document begins with the rest of it.

Within documents, and where ranks share a row's tokens, a GPU runs flex_attention, which skips the blocks of the
attention matrix that no token sees; other devices are given the whole matrix as a mask.

Shape suffixes as in `llama.py`; P tokens of a row's T are this rank's, which are all where it shares none.
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

from regrow.plan.share import Share

Mask = Tensor | BlockMask


def document_starts_BT(tokens_BT: Tensor, eot_id: int) -> Tensor:
    """Where in its row the document of each token begins, int64.

    >>> document_starts_BT(torch.tensor([[5, 6, 0, 7, 8, 0, 0, 9]]), eot_id=0)
    tensor([[0, 0, 2, 2, 2, 5, 6, 6]])
    """
    index_T = torch.arange(tokens_BT.size(1), device=tokens_BT.device)
    return torch.where(tokens_BT == eot_id, index_T, 0).cummax(dim=1).values


def take_BP(x_BT: Tensor, share: Share) -> Tensor:
    """What a rank has of rows, in the order of their tokens.

    >>> take_BP(torch.arange(8)[None], Share(rank=1, cp=2))
    tensor([[2, 3, 4, 5]])
    """
    chunks = [x_BT[:, each.start : each.stop] for each in share.chunks(x_BT.size(1))]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)


def mask_of(starts_BP: Tensor, at_P: Tensor, num_tokens: int) -> Mask:
    """A token at a position `at_P` of a row of `num_tokens` sees those from where its document starts up to itself; in
    the form that `attend` is fastest with on this device."""
    return (block_mask if starts_BP.is_cuda else mask_B1PT)(starts_BP, at_P, num_tokens)


def mask_B1PT(starts_BP: Tensor, at_P: Tensor, num_tokens: int) -> Tensor:
    """True where a token (dim 2) sees another (dim 3)."""
    index_T = torch.arange(num_tokens, device=starts_BP.device)
    return ((starts_BP[:, :, None] <= index_T) & (index_T <= at_P[:, None]))[:, None]


def block_mask(starts_BP: Tensor, at_P: Tensor, num_tokens: int) -> BlockMask:
    """The same for flex_attention, which asks for each row of a pass: with a B of 1 they are all alike."""
    B, P = starts_BP.shape

    def sees(row: Tensor, head: Tensor, token: Tensor, other: Tensor) -> Tensor:
        start = starts_BP[0, token] if B == 1 else starts_BP[row, token]
        return (start <= other) & (other <= at_P[token])

    create: Callable[..., BlockMask] = create_block_mask
    if starts_BP.is_cuda:  # uncompiled, it would hold the whole mask in memory
        create = _compiled(create)
    return create(sees, None if B == 1 else B, None, P, num_tokens, device=starts_BP.device)


def attend(
    q_BHTQ: Tensor, k_BKTQ: Tensor, v_BKTQ: Tensor, mask: Mask | None, kernels: Sequence[SDPBackend] = ()
) -> Tensor:
    """Attention's output [B, H, T, Q]; without a mask each token sees all tokens up to itself. With one there may be
    more keys than queries.

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

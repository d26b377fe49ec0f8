"""Cross-entropy summed over tokens: of whole logits, or of some tokens' logits at a time, straight to the gradients.

At Llama 3's vocabulary the logits of 8,192 tokens are 4.2 GB in float32, and their loss keeps and makes three tensors
of that size. Chunked, forward already computes what backward will ask for, a chunk of tokens at a time: no more than
one chunk's logits exist, none is computed twice, and nothing but the gradients of the two inputs is kept. torch 2.13
has `linear_cross_entropy` for this, older versions that we run on do not.

Shape suffixes: B sequences, T tokens, N = B*T tokens, C tokens of a chunk, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # a target that does not count

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sum_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over valid targets, in float32; exactly 0, with gradient 0, where there is none."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def loss_and_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_cross_entropy` of a chunk and its gradient in the logits, in their dtype, with no graph in between."""
    valid_C1 = (targets_C != IGNORE_INDEX)[:, None]
    index_C1 = targets_C[:, None].clamp(min=0)
    log_probabilities_CV = F.log_softmax(logits_CV, dim=-1, dtype=torch.float32)
    loss = -log_probabilities_CV.gather(1, index_C1).masked_fill(~valid_C1, 0.0).sum()
    if torch.compiler.is_compiling():  # scatter_add_ would have inductor write the chunk in float32 first
        is_target_CV = torch.arange(logits_CV.size(1), device=logits_CV.device) == index_C1
        gradient_CV = (log_probabilities_CV.exp() - torch.where(is_target_CV, 1.0, 0.0)) * valid_C1
    else:
        gradient_CV = log_probabilities_CV.exp_().mul_(valid_C1)
        gradient_CV.scatter_add_(1, index_C1, -valid_C1.float())
    return loss, gradient_CV.to(logits_CV.dtype)


def chunked_cross_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunk_tokens: int,
    chunk_loss: ChunkLoss = loss_and_gradient,
) -> Tensor:
    """`sum_cross_entropy(F.linear(x_BTD, weight_VD), targets_BT)`, holding the logits of `chunk_tokens` tokens at most.

    Where there are several chunks their weight gradients are added up in float32, whatever the dtype. `chunk_loss` is
    `loss_and_gradient`, perhaps compiled. Backward runs once, first derivatives only.
    """
    x_ND, targets_N = x_BTD.flatten(0, -2), targets_BT.flatten()
    num_chunks = max(1, math.ceil(len(targets_N) / chunk_tokens))
    chunk_tokens = max(1, math.ceil(len(targets_N) / num_chunks))  # as equal as can be: a short last one is slow
    loss: Tensor = _ChunkedCrossEntropy.apply(
        x_ND, weight_VD, targets_N, chunk_tokens, chunk_loss, torch.is_grad_enabled()
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk_tokens: int,
        chunk_loss: ChunkLoss,
        with_gradients: bool,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        gradient_ND, gradient_VD = torch.empty_like(x_ND) if with_gradients else None, None
        for start in range(0, len(targets_N), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            share, gradient_CV = chunk_loss(F.linear(x_ND[chunk], weight_VD), targets_N[chunk])
            loss += share
            if gradient_ND is not None:
                torch.mm(gradient_CV, weight_VD, out=gradient_ND[chunk])
                if gradient_VD is None:
                    gradient_VD = gradient_CV.t() @ x_ND[chunk]
                    gradient_VD = gradient_VD if chunk_tokens >= len(targets_N) else gradient_VD.float()
                elif gradient_VD.dtype is x_ND.dtype:
                    gradient_VD.addmm_(gradient_CV.t(), x_ND[chunk])
                else:
                    gradient_VD += gradient_CV.t() @ x_ND[chunk]
            del gradient_CV  # before the next chunk's logits
        if gradient_ND is not None:
            ctx.save_for_backward(gradient_ND, gradient_VD)
            ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ND, gradient_VD = ctx.saved_tensors
        # in place: a second backward finds that its saved tensors have changed, and is refused; of one dimension, or a
        # GPU rounds the factor to bfloat16 before it multiplies
        gradient = gradient[None]
        return gradient_ND.mul_(gradient), gradient_VD.mul_(gradient).to(ctx.weight_dtype), None, None, None, None

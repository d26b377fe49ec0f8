"""Tensor parallelism with sequence parallelism (arXiv:2205.05198): the ranks of a group share each block's arithmetic.

Between blocks a rank holds its share of each sequence's tokens: norms, residuals and what backward keeps of them are
shared out too. Attention and feed-forward gather the sequence, work on their share of heads and hidden width, and
scatter what they add up to. The vocabulary is cut as well: no rank looks up, multiplies or holds more than its share.

Parameters are cut before FSDP shards them, and are plain tensors to it; collectives are torch's functional ones, which
compile with the block around them.

Shape suffixes as in `model.llama`; P is T over the group's size.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from regrow.model.llama import Llama
from regrow.model.loss import IGNORE_INDEX
from regrow.parallel.functional import all_gather, give_name, reduce_scatter
from regrow.plan.boxes import Box
from regrow.plan.mesh import Coordinates, MeshShape
from regrow.plan.placement import dims_of, placed

SEQUENCE = 1  # dim of activations
GROUP: Any = "regrow_tp"  # the name by which collectives find this rank's group


def apply_tensor_parallel(model: Llama, group: dist.ProcessGroup) -> None:
    """Cut the model's parameters, on meta, and have it run on this rank's blocks. Before everything else. Local.

    Heads, key and value heads, feed-forward width, vocabulary and the tokens of a sequence are multiples of the group's
    size.
    """
    give_name(GROUP, group)
    at = Coordinates(MeshShape(1, 1, group.size()), group.rank())
    for name, parameter in list(model.named_parameters()):
        box = placed(Box.whole(name, tuple(parameter.shape)), at)
        if box.sizes != box.shape:
            _cut(model, name.removesuffix(".weight"), box.sizes)
    layer: Any
    for layer in model.layers:
        for module in (layer.attention, layer.ffn):
            module.register_forward_pre_hook(_gather_input)
            module.register_forward_hook(_scatter_output)
    if model.embed is not None:
        model.embed.forward = partial(_embed, model.embed, group.rank())  # type: ignore[method-assign]
    if model.norm is not None:
        model.norm.register_forward_hook(_gather_output)


def sum_uncut_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Norms saw this rank's tokens only: add up their gradients, in one all-reduce. Collective over `group`."""
    grads = [_local(parameter.grad) for parameter in uncut_parameters(model) if parameter.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def uncut_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that every rank of a group has."""
    return [parameter for name, parameter in model.named_parameters() if "tp" not in dims_of(name)]


def loss_and_gradient_of_cut(logits_CV: Tensor, targets_C: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """As `model.loss.loss_and_gradient`, of logits of which each rank of a group holds its block of the vocabulary.

    The loss is the whole one on every rank, the gradient that of the rank's own logits. Collective over the group that
    a model was given to last.
    """
    index_C = targets_C - rank * logits_CV.size(-1)
    valid_C, here_C = targets_C != IGNORE_INDEX, (index_C >= 0) & (index_C < logits_CV.size(-1))
    index_C1 = index_C.clamp(0, logits_CV.size(-1) - 1)[:, None]
    largest_C = collectives.all_reduce(logits_CV.amax(-1).float(), "max", GROUP)
    shifted_CV = logits_CV.float() - largest_C[:, None]
    mine_C = shifted_CV.gather(1, index_C1)[:, 0].masked_fill(~here_C, 0.0)
    gradient_CV = shifted_CV.exp_()
    sum_C, target_C = collectives.all_reduce(torch.stack([gradient_CV.sum(-1), mine_C]), "sum", GROUP)
    loss = (sum_C.log() - target_C).masked_fill(~valid_C, 0.0).sum()
    gradient_CV.mul_((valid_C / sum_C)[:, None])
    gradient_CV.scatter_add_(1, index_C1, -(here_C & valid_C)[:, None].float())
    return loss, gradient_CV.to(logits_CV.dtype)


def _cut(model: Llama, name: str, sizes: tuple[int, ...]) -> None:
    """Leave a module its block of its weight."""
    module: Any = model.get_submodule(name)
    module.weight = nn.Parameter(module.weight.new_empty(sizes))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = sizes


def _gather_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return _gather(inputs[0]), *inputs[1:]


def _gather_output(module: nn.Module, inputs: Any, output_BPD: Tensor) -> Tensor:
    return _gather(output_BPD)


def _scatter_output(module: nn.Module, inputs: Any, output_BTD: Tensor) -> Tensor:
    return _scatter(output_BTD)


def _embed(embed: nn.Embedding, rank: int, tokens_BT: Tensor) -> Tensor:
    """Look up the tokens that this rank has rows for; the others' come from the others. [B, P, D]."""
    rows = embed.weight.size(0)
    index_BT = tokens_BT - rank * rows
    here_BT = (index_BT >= 0) & (index_BT < rows)
    x_BTD = nn.functional.embedding(index_BT.clamp(0, rows - 1), embed.weight)
    return _scatter(x_BTD.masked_fill(~here_BT[..., None], 0.0))


def _gather(x_BPD: Tensor) -> Tensor:
    gathered: Tensor = _Gather.apply(x_BPD)
    return gathered


def _scatter(x_BTD: Tensor) -> Tensor:
    scattered: Tensor = _Scatter.apply(x_BTD)
    return scattered


class _Gather(torch.autograd.Function):
    """[B, P, D] to [B, T, D]; backward adds up the ranks' gradients and leaves each its tokens'."""

    @staticmethod
    def forward(ctx: Any, x_BPD: Tensor) -> Tensor:
        return all_gather(x_BPD, SEQUENCE, GROUP)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> Tensor:
        return reduce_scatter(gradient_BTD, SEQUENCE, GROUP)


class _Scatter(torch.autograd.Function):
    """[B, T, D] to this rank's [B, P, D] of the sum over the ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor) -> Tensor:
        return reduce_scatter(x_BTD, SEQUENCE, GROUP)

    @staticmethod
    def backward(ctx: Any, gradient_BPD: Tensor) -> Tensor:
        return all_gather(gradient_BPD, SEQUENCE, GROUP)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
